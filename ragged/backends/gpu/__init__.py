"""One Triton kernel for NVIDIA's GPUs."""
