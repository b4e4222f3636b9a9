"""What an eager step of generation asks of the host: operators a layer, beside dense attention."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import nsa_flex
from nsa_flex import NSACache, decoding
from patching.tiny_models import NSA, tiny_model, tokens
from reference.counted import Operators

pytest.importorskip("triton")
from nsa_flex.fallback_kernels.decode import checks

STEP = "nsa_flex.decode_step.default"
MOST_MORE = 10  # operators of NSA's step beyond those of dense attention, a layer


class OperatorsOnCuda(Operators):
    """The one of Triton kernels computes nothing."""

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        return as_on_cuda(*args) if str(func) == STEP else func(*args, **kwargs)


def as_on_cuda(query: Tensor, _new_key: Tensor, _new_value: Tensor, *cache: Any) -> Any:
    """Results of the operator's shapes."""
    value = cache[1]
    batch, heads, count, _ = query.shape
    out = query.new_zeros((batch, count, heads, value.shape[3]))
    return out, query.new_zeros(0, dtype=torch.int32), query.new_zeros(0)


@pytest.fixture
def _as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes the path of CUDA, where dense attention is one operator too."""
    monkeypatch.setattr(decoding, "unsupported_reason", lambda *_: None)
    monkeypatch.setattr(checks, "triton_unsupported_reason", lambda _: None)
    name = "scaled_dot_product_attention"
    monkeypatch.setattr(torch.nn.functional, name, lambda query, *_, **__: query.abs())


def operators_of_a_step(layers: int, patched: bool, static: bool, masked: bool) -> Counter[str]:
    """Of a model with so many layers, after 40 tokens: one that completes no block."""
    model = tiny_model(num_hidden_layers=layers).eval()
    model.set_attn_implementation("sdpa")
    if patched:
        nsa_flex.patch(model, NSA)
    if patched and static:
        cache: Any = NSACache(model, max_length=64)
    elif static:
        cache = transformers.StaticCache(config=model.config, max_cache_len=64)
    else:
        cache = transformers.DynamicCache(config=model.config)
    mask = torch.ones(1, 41, dtype=torch.long) if masked else None
    ids = tokens(1, 41)
    with torch.no_grad():
        before = None if mask is None else mask[:, :40]
        model(ids[:, :40], past_key_values=cache, attention_mask=before)
        with OperatorsOnCuda() as operators:
            model(ids[:, 40:], past_key_values=cache, attention_mask=mask)
    return operators.seen


def operators_of_a_layer(*options: Any) -> Counter[str]:
    """What one more layer adds."""
    return operators_of_a_step(3, *options) - operators_of_a_step(2, *options)


@pytest.mark.usefixtures("_as_on_cuda")
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_a_layer_takes_few_more_operators_than_dense_attention(static: bool, masked: bool) -> None:
    """Views are counted too: each takes the host some microseconds, whatever it does."""
    dense = operators_of_a_layer(False, static, masked)
    ours = operators_of_a_layer(True, static, masked)
    assert ours[STEP] == 1
    assert dense["aten.mm.default"] == 7  # a whole layer
    assert dense["aten.abs.default"] == 1  # the stand-in of its attention
    more = ours.total() - dense.total()
    assert more <= MOST_MORE, (ours - dense, dense - ours)
