"""Top-k block selection: scores of all blocks, and the best n of each query."""
