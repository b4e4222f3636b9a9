"""Families of transformers decoders, by what `patch` must know of their attention modules.

Most have `q_proj`, `k_proj` and `v_proj`, or `qkv_proj`, as wide as the heads of the config say,
and hand keyword arguments down to transformers' attention interface. The others have an entry in
`_FAMILIES` that says what differs; beyond that they take the very same path (padding, packing,
caches, decoding).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from nsa_flex.patching.layer import AttentionShape


def _grouped(module: Any) -> int:
    config = module.config
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def _multi_head(module: Any) -> int:
    return module.config.num_attention_heads


def _falcon_kv_heads(module: Any) -> int:
    if module.new_decoder_architecture:
        return module.num_kv_heads
    return 1 if module.multi_query else module.num_heads


_SEPARATE = {"q_proj": (1, 0), "k_proj": (0, 1), "v_proj": (0, 1)}
_FUSED = {"qkv_proj": (1, 2)}
# Beside the query, q_proj gives a gate for the output of attention.
_GATED = {"q_proj": (2, 0), "k_proj": (0, 1), "v_proj": (0, 1)}


@dataclass(frozen=True)
class Family:
    """What an attention module of one family has, and where its call goes.

    Args:
        widths: projection -> (a, b): its output is (a * Hq + b * Hkv) * D wide.
        head_dim: the attribute of the module that holds D.
        num_kv_heads: reads Hkv from the module.
        declares_interface: False where the decoder's class does not say that its attention takes
            any implementation (`_supports_attention_backend`).
        calls_interface: False where the module attends by itself and `hf_falcon` runs it.
        dropped_by: who drops keyword arguments that attention functions do not name, so that
            `hf_handover` must bring them: the decoder, its layers, or nobody.
    """

    widths: dict[str, tuple[int, int]]
    head_dim: str = "head_dim"
    num_kv_heads: Callable[[Any], int] = _grouped
    declares_interface: bool = True
    calls_interface: bool = True
    dropped_by: Literal["decoder", "layer"] | None = None


# By the name of the attention class, or of one of its bases.
_FAMILIES = {
    "FalconAttention": Family(
        {"query_key_value": (1, 2)},
        num_kv_heads=_falcon_kv_heads,
        declares_interface=False,
        calls_interface=False,
        dropped_by="decoder",
    ),
    "GPT2Attention": Family({"c_attn": (1, 2)}, num_kv_heads=_multi_head),
    "GPTNeoXAttention": Family(
        {"query_key_value": (1, 2)}, head_dim="head_size", num_kv_heads=_multi_head
    ),
    "NemotronAttention": Family(_SEPARATE, dropped_by="layer"),
    "Qwen3NextAttention": Family(_GATED, declares_interface=False),
    "Qwen3_5Attention": Family(_GATED, declares_interface=False),
    "Qwen3_5MoeAttention": Family(_GATED, declares_interface=False),
    "StableLmAttention": Family(_SEPARATE, declares_interface=False, dropped_by="layer"),
}


def family_of(module: nn.Module) -> Family:
    """What is known of the module's family."""
    for base in type(module).__mro__:
        if base.__name__ in _FAMILIES:
            return _FAMILIES[base.__name__]
    return Family(_FUSED if hasattr(module, "qkv_proj") else _SEPARATE)


def read_shape(module: Any) -> AttentionShape:
    """Sizes of a transformers attention module.

    Raises:
        ValueError: its projections have other widths than its family and its config say, or names
            that are not known.
    """
    family, config = family_of(module), module.config
    heads, kv_heads = config.num_attention_heads, family.num_kv_heads(module)
    dim = getattr(module, family.head_dim, 0)
    expected = {
        name: (query * heads + key * kv_heads) * dim
        for name, (query, key) in family.widths.items()
    }
    linears = {name: getattr(module, name, None) for name in expected}
    found = {name: _width(linear) for name, linear in linears.items()}
    if expected != found or dim == 0:
        raise ValueError(
            f"{type(module).__name__} has projections {found}, expected {expected} for "
            f"{heads} query heads, {kv_heads} key-value heads and head_dim {dim}: register an "
            "adapter for it (nsa_flex.register_adapter)"
        )
    hidden_size = getattr(linears[next(iter(linears))], "in_features", config.hidden_size)
    return AttentionShape(hidden_size, heads, kv_heads, dim)


def _width(linear: Any) -> int | None:
    """Output width of an nn.Linear, or of a transformers Conv1D (`nf`)."""
    return getattr(linear, "out_features", getattr(linear, "nf", None))
