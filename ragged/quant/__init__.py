"""Scaled numbers of few bits: scalings, `quantize`, recipes of training, and what they cost in accuracy."""
