"""Mask functions and analytic BlockMasks of the three branches."""
