"""What `layer_types` of a transformers config says of an attention module."""

from __future__ import annotations

from typing import Any

# Their masks are made for a limited context; all others read the mask of full attention.
_LOCAL = ("sliding_attention", "chunked_attention", "window_attention", "hybrid_sliding")
# Their modules read no mask that a mask function makes.
_RECURRENT = ("linear_attention", "conv", "moe")


def layer_type(module: Any) -> str | None:
    """The type of the layer that the module attends in; None if its config has no types."""
    types = getattr(module.config, "layer_types", None)
    return types[module.layer_idx] if types and module.layer_idx is not None else None


def local_attention(module: Any) -> str | None:
    """How this layer's context is limited, or None if it sees all of it.

    A window at least as long as the context the model was made for is no limit.
    """
    config, kind = module.config, layer_type(module)
    if kind == "full_attention":
        return None
    if kind not in (None, "sliding_attention"):
        return f"layer type {kind}"
    window = getattr(module, "sliding_window", None) or getattr(config, "sliding_window", None)
    if window is None or window >= getattr(config, "max_position_embeddings", float("inf")):
        return None
    return f"sliding_window={window}"


def kind_of_mask(module: Any) -> str | None:
    """Which mask an unpatched module reads: "full", "local", or none."""
    kind = layer_type(module)
    if kind in _RECURRENT:
        return None
    if kind in _LOCAL or (kind is None and local_attention(module) is not None):
        return "local"
    return "full"
