"""The public products and their checks: `matmul`, `einsum`, `gated_matmul`, `sharded_matmul`, and plain arrays."""
