"""How transformers' attention modules lay out their projections, read as an `AttentionShape`.

Most families have `q_proj`, `k_proj` and `v_proj`, or `qkv_proj`, as wide as the heads of the
config say. The others have an entry in `_FAMILIES`: what differs is how to read the sizes, and
nothing else, since all of them call transformers' attention interface with queries, keys and
values after position embedding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from nsa_flex.patching.layer import AttentionShape


@dataclass(frozen=True)
class Projections:
    """The projections of one family.

    Args:
        widths: name -> (a, b): its output is a * Hq * D + b * Hkv * D wide.
        head_dim: the attribute of the module that holds D.
        multi_head: whether Hkv is Hq, whatever the config holds beside.
        calls_interface: whether the module calls the attention interface although the class of
            its decoder does not say so (`_supports_attention_backend`).
    """

    widths: dict[str, tuple[int, int]]
    head_dim: str = "head_dim"
    multi_head: bool = False
    calls_interface: bool = False


_SEPARATE = {"q_proj": (1, 0), "k_proj": (0, 1), "v_proj": (0, 1)}
# Beside the query, q_proj gives a gate for the output of attention.
_GATED = {"q_proj": (2, 0), "k_proj": (0, 1), "v_proj": (0, 1)}

# By the name of the attention class, or of one of its bases.
_FAMILIES = {
    "GPT2Attention": Projections({"c_attn": (1, 2)}, multi_head=True),
    "GPTNeoXAttention": Projections(
        {"query_key_value": (1, 2)}, head_dim="head_size", multi_head=True
    ),
    "Qwen3NextAttention": Projections(_GATED, calls_interface=True),
    "Qwen3_5Attention": Projections(_GATED, calls_interface=True),
    "Qwen3_5MoeAttention": Projections(_GATED, calls_interface=True),
}


def projections_of(module: nn.Module) -> Projections:
    """How the module's family lays out its projections."""
    for base in type(module).__mro__:
        if base.__name__ in _FAMILIES:
            return _FAMILIES[base.__name__]
    return Projections({"qkv_proj": (1, 2)} if hasattr(module, "qkv_proj") else _SEPARATE)


def read_shape(module: Any) -> AttentionShape:
    """Sizes of a transformers attention module.

    Raises:
        ValueError: its projections have other widths than its family's and its config's sizes
            say, or names that are not known.
    """
    layout, config = projections_of(module), module.config
    heads, dim = config.num_attention_heads, getattr(module, layout.head_dim, 0)
    grouped = None if layout.multi_head else getattr(config, "num_key_value_heads", None)
    kv_heads = grouped or heads
    expected = {
        name: (query * heads + key * kv_heads) * dim
        for name, (query, key) in layout.widths.items()
    }
    linears = {name: getattr(module, name, None) for name in expected}
    found = {name: _width(linear) for name, linear in linears.items()}
    if expected != found or dim == 0:
        raise ValueError(
            f"{type(module).__name__} has projections {found}, expected {expected} for "
            f"{heads} query heads, {kv_heads} key-value heads and head_dim {dim}: register an "
            "adapter for it (nsa_flex.register_adapter)"
        )
    hidden_size = getattr(linears[next(iter(linears))], "in_features", None)
    return AttentionShape(hidden_size or config.hidden_size, heads, kv_heads, dim)


def _width(linear: Any) -> int | None:
    """Output width of an nn.Linear, or of a transformers Conv1D (`nf`)."""
    return getattr(linear, "out_features", getattr(linear, "nf", None))
