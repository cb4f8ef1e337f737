"""`quantize`, training recipes, and weights quantised once for many products."""
