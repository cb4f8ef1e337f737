"""Many devices: what a product alone can't say."""
