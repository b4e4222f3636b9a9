"""Attention to the selected blocks, forward and backward."""
