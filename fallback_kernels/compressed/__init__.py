"""The compressed branch on cuDNN: the fold, and causal attention over its parts."""
