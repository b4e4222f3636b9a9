"""The cuDNN operator: its backward in pieces. cuDNN is played in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nsa_flex.fallback_kernels.compressed import cudnn_op as cudnn_attention
from nsa_flex.fallback_kernels.compressed.cudnn_op import Gradients, Problem
from reference import played_cudnn

BATCH, HEADS, KV_HEADS, ROWS, DIM, VALUE_DIM, SCALE = 3, 6, 3, 7, 8, 4, 0.3


def played(problem: Problem, scale: float, is_causal: bool) -> Gradients:
    differentiate = played_cudnn.causal_gradients if is_causal else played_cudnn.whole_gradients
    return Gradients(*differentiate(*problem, scale))


def strided(heads: int, width: int, layout: str) -> Tensor:
    """(B, H, N, D): views of tokens, as the fold's residues are, or keys of one row for all."""
    if layout == "expanded":
        return torch.randn(1, heads, ROWS, width, dtype=torch.float64).expand(BATCH, -1, -1, -1)
    if layout == "residues":
        tokens = torch.randn(ROWS, BATCH, heads, width, dtype=torch.float64)
        return tokens.permute(1, 2, 0, 3)
    return torch.randn(BATCH, ROWS, heads, width, dtype=torch.float64).transpose(1, 2)


@pytest.mark.parametrize(
    ("queries", "keys"), [("natural", "natural"), ("residues", "expanded")], ids=["rows", "fold"]
)
@pytest.mark.parametrize(("heads_at_once", "calls"), [(1, 9), (2, 6), (5, 3)])
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "whole"])
def test_pieces_are_the_whole(
    queries: str,
    keys: str,
    heads_at_once: int,
    calls: int,
    is_causal: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    differentiate = cudnn_attention.causal_gradients
    if not is_causal:
        differentiate = cudnn_attention.whole_gradients
    query, grad, out = (strided(HEADS, x, queries) for x in (DIM, VALUE_DIM, VALUE_DIM))
    key, value = strided(KV_HEADS, DIM, keys), strided(KV_HEADS, VALUE_DIM, keys)
    problem = Problem(grad, query, key, value, out, torch.rand(BATCH, HEADS, ROWS).double() + 2)
    want = played(problem, SCALE, is_causal)
    seen = []

    def call(piece: Problem, scale: float, asked: bool) -> Gradients:
        assert asked == is_causal
        seen.append(piece)
        return played(piece, scale, asked)

    monkeypatch.setattr(cudnn_attention, "_gradients_at_once", call)
    assert torch.equal(differentiate(*problem, SCALE).key, want.key)
    assert len(seen) == 1  # as long as it fits
    assert seen.pop().query is query

    monkeypatch.setattr(cudnn_attention, "MAX_SPAN", cudnn_attention._span(query))
    size = heads_at_once * ROWS * HEADS // KV_HEADS * DIM
    monkeypatch.setattr(cudnn_attention, "PIECE", size)
    got = differentiate(*problem, SCALE)
    assert len(seen) == calls
    for piece in seen:
        for x in (piece.query, piece.grad, piece.out):
            assert x.transpose(1, 2).is_contiguous()
            assert x.numel() <= size
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    assert got.query.stride() == query.stride()
