"""XLA: any platform, no custom kernel, fast on the CPU."""
