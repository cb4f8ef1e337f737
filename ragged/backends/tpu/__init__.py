"""Pallas kernels for TPUs."""
