"""Useful FLOPs of training a token, and the peak of the device: for the MFU."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nsa_flex.config import NSAConfig
from nsa_flex.flops import attention_flops, core_parts
from nsa_flex.patching.hf_families import kind_of_mask, window_of
from nsa_flex.patching.hf_layers import is_attention
from nsa_flex.patching.layer import NSALayer, layer_of

# Dense bfloat16 tensor-core peaks of the makers' data sheets, by a word of torch's device name.
PEAK_TFLOPS = {"B200": 2250.0, "H200": 989.0, "H100": 989.0, "H800": 989.0, "A100": 312.0}
PASSES = ("forward", "backward")


def flops_per_token(model: Any, seq_len: int) -> float:
    """6 FLOPs a weight of a matrix, and those of attention over rows of `seq_len` tokens.

    Recomputed activations do not count. Attention is counted layer by layer, by the visible pairs
    of queries and keys (`nsa_flex.flops`): those of NSA in a patched layer, of its sliding window
    in another that has one, and of dense causal attention in all others. Layers that carry a state
    have no such pairs.
    """
    weights = sum(p.numel() for p in model.parameters() if p.dim() >= 2)
    embedding = model.get_input_embeddings().weight
    if embedding is not model.get_output_embeddings().weight:
        weights -= embedding.numel()  # read, not multiplied
    attention = 0.0
    for module in model.modules():
        if isinstance(module, NSALayer):
            attention += _nsa_flops(module, seq_len)
        elif is_attention(module) and layer_of(module) is None and kind_of_mask(module):
            attention += _unpatched_flops(module, seq_len)
    return 6.0 * weights + attention / seq_len


def peak_flops(device: torch.device) -> float | None:
    """FLOPs a second in bfloat16, or None of a device that the table lacks."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((1e12 * peak for word, peak in PEAK_TFLOPS.items() if word in name), None)


def _nsa_flops(layer: NSALayer, seq_len: int) -> float:
    shape = layer.shape
    value_dim = shape.head_dim if shape.value_head_dim is None else shape.value_head_dim
    return shape.num_query_heads * sum(
        attention_flops(part, which, seq_len, shape.head_dim, value_dim, layer.config)
        for part in core_parts(layer.config)
        for which in PASSES
    )


def _unpatched_flops(module: Any, seq_len: int) -> float:
    config, window = module.config, window_of(module)
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    part, sizes = "dense", NSAConfig()
    if window is not None:
        part, sizes = "sliding", NSAConfig(window_size=window)
    return heads * sum(attention_flops(part, which, seq_len, dim, dim, sizes) for which in PASSES)


def num_parameters(model: nn.Module) -> int:
    """Each counted once, tied or not."""
    return sum(parameter.numel() for parameter in model.parameters())
