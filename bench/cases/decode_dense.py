"""Dense attention of one query token a row over all stored tokens, as PyTorch has it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsa_flex.bench.cases.decode_inputs import Inputs
from nsa_flex.bench.measure.timing import Call


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """`scaled_dot_product_attention`, whose kernel PyTorch chooses."""
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)


def sdpa(inputs: Inputs, backend: SDPBackend) -> Call:
    """The same on one backend."""

    def run() -> Tensor:
        with sdpa_kernel(backend):
            return attend(inputs.query, inputs.key, inputs.value)

    return run


def varlen(inputs: Inputs) -> Call:
    """FA-2 over packed rows, keys and values in its own (tokens, heads, D) memory."""
    from torch.nn.attention.varlen import varlen_attn

    batch, _, length, _ = inputs.key.shape
    query = inputs.query.transpose(1, 2).flatten(0, 1).contiguous()
    key, value = (x.transpose(1, 2).flatten(0, 1) for x in (inputs.key, inputs.value))
    first_query = torch.arange(batch + 1, device="cuda", dtype=torch.int32)
    first_key = first_query * length
    return lambda: varlen_attn(query, key, value, first_query, first_key, 1, length)


def flex(inputs: Inputs) -> Call:
    """FlexAttention with a BlockMask of the stored tokens; a compilation for each shape."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    length = inputs.key.shape[2]
    mask = create_block_mask(lambda b, h, q, kv: kv < length, None, None, 1, length, device="cuda")
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    return lambda: compiled(
        inputs.query, inputs.key, inputs.value, block_mask=mask, enable_gqa=True
    )


@functools.cache
def compiled(call: Callable[..., Any], mode: str | None = None) -> Callable[..., Any]:
    """One graph for all shapes; with "reduce-overhead" a CUDA graph of each inside."""
    return torch.compile(call, fullgraph=True, dynamic=True, mode=mode)
