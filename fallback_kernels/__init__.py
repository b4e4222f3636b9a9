"""What FlexAttention handles poorly: FA-2 varlen and hand-tuned Triton kernels."""
