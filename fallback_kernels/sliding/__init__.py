"""What kernels of the fused core share of the sliding window: tiles, and the forward of one."""
