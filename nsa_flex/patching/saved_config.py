"""What config.json says of a patched model, and what it said before it was patched.

On disk a patched model is of a model type and an architecture of its own, and names an attention
that transformers does not know. So transformers alone, and other readers of config.json, refuse it
where they would otherwise load a dense model and drop the trained tensors of NSA.
"""

from __future__ import annotations

from typing import Any

from nsa_flex.patching.formats import FORMATS, format_of

MODEL_TYPE = "nsa_flex"
# Named in transformers' error where a class of its own reads such a checkpoint.
_ATTENTION = "nsa_flex.load"
_FORMER = "nsa_flex_base"


def to_saved(config: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a patched model, from that of the model in memory."""
    known = format_of(config.get("nsa_flex", {}))
    if known is not None:
        return known.to_upstream(config)
    architectures = config.get("architectures") or []
    return {
        **config,
        "model_type": MODEL_TYPE,
        "architectures": [f"NSA{name}" for name in architectures],
        "attn_implementation": _ATTENTION,
        # Not "model_type": transformers takes a dict with its own type for the whole config.
        _FORMER: {"type": config["model_type"], "architectures": architectures},
    }


def from_saved(config: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `to_saved`; any other config as it is."""
    if config.get("model_type") in FORMATS:
        return FORMATS[config["model_type"]].from_upstream(config)
    if config.get("model_type") != MODEL_TYPE:
        return config
    former = config[_FORMER]
    kept = {k: v for k, v in config.items() if k not in ("attn_implementation", _FORMER)}
    return {**kept, "model_type": former["type"], "architectures": former["architectures"]}
