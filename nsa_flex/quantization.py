"""What of a model may be quantized beside NSA."""

from __future__ import annotations

from torch import nn

from nsa_flex.gates import GateLinear


def quantization_filter(module: nn.Module, name: str) -> bool:
    """Whether to quantize a module: a `filter_fn` for torchao's `quantize_`.

    All linear maps but those of the gates. A gate is a few hundred numbers a layer, and scales a
    whole branch: rounding it saves nothing and is seen everywhere. φ holds no linear modules.

    Activations want a scale a token, `granularity=PerRow()` of torchao's float8 config: one scale
    for a whole call rounds a token of a step otherwise than the same token of a prompt.

    Args:
        module: each module of the model in turn.
        name: its name, which does not matter.

    >>> from nsa_flex import NSAAttention
    >>> layer = NSAAttention(64, num_query_heads=4, num_kv_heads=2)
    >>> [name for name, part in layer.named_modules() if quantization_filter(part, name)]
    ['q_proj', 'k_proj', 'v_proj', 'o_proj']
    """
    return isinstance(module, nn.Linear) and not isinstance(module, GateLinear)
