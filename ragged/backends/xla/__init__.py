"""The XLA backend."""
