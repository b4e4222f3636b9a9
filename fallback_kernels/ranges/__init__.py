"""Attention of each query to one contiguous range of keys: packed documents, offsets, windows."""
