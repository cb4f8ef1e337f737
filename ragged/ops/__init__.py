"""Public products and their checks: `matmul`, `einsum`, `gated_matmul`, `sharded_matmul`, products of arrays."""
