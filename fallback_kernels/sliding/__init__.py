"""Sliding-window attention, forward and backward."""
