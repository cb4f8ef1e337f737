"""One product as data: the letters of its einsum, its layout, its operands, and its configuration."""
