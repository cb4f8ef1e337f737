"""Grouped products: their layouts, the one JAX primitive under all of them, and which backend computes it."""
