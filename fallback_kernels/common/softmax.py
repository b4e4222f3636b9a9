"""Kernels compute softmax in base 2, which the hardware has an instruction for."""

LOG2E = 1.4426950408889634  # log2(e): e^x = 2^(x * LOG2E)
