"""The JAX primitives: derivatives, batching, partitioning over devices, and lowering to a backend."""
