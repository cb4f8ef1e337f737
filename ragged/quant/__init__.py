"""Scaled numbers of few bits: formats, scalings, `quantize`, recipes of training, and what they cost in accuracy.

`formats`, `scales` and `scaling` are at the bottom: backends and the tensor import them. The others are above products.
"""
