"""Alignment of packed documents and padded batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nsa_flex import DocumentLayout, NSAConfig, align_packed, align_padded, align_positions

CONFIG = NSAConfig(4, 2, 8, 3, window_size=5)
lengths_of = st.lists(st.integers(0, 30), min_size=1, max_size=5).filter(sum)


def check_layout(layout: DocumentLayout, lengths: list[int]) -> None:
    """Every document stands whole at a multiple of l', and comes back."""
    total = sum(lengths)
    tokens = torch.arange(total).float().view(1, 1, total, 1)
    aligned = layout.align(tokens)
    assert torch.equal(layout.restore(aligned), tokens)
    assert layout.start is not None
    starts = layout.start.flatten()
    assert (starts % CONFIG.select_block_size == 0).all()
    places = layout.target.flatten()
    begin = 0
    for length in lengths:
        mine = places[begin : begin + length]
        if length:
            assert torch.equal(mine, mine[0] + torch.arange(length)), "a document was torn"
            assert (starts[mine] == mine[0]).all(), "document_start is not the document's start"
            assert torch.equal(
                layout.positions.flatten()[begin : begin + length], torch.arange(length)
            )
        begin += length


def cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)


@given(lengths=lengths_of)
def test_packed(lengths: list[int]) -> None:
    total = sum(lengths)
    layout = align_packed(cumulative(lengths), total, CONFIG)
    check_layout(layout, lengths)
    assert layout.source.shape[1] <= total + len(lengths) * (CONFIG.select_block_size - 1)


@given(lengths=lengths_of)
def test_positions_give_what_cu_seqlens_give(lengths: list[int]) -> None:
    lengths = [n for n in lengths if n]
    position_ids = torch.cat([torch.arange(n) for n in lengths])[None]
    layout = align_positions(position_ids, CONFIG, max_documents=len(lengths))
    check_layout(layout, lengths)
    more = align_positions(position_ids, CONFIG, max_documents=len(lengths) + 3)
    check_layout(more, lengths)


def test_rows_of_positions_become_one_row() -> None:
    position_ids = torch.stack([torch.arange(6), torch.tensor([0, 1, 0, 1, 2, 3])])
    layout = align_positions(position_ids, CONFIG, max_documents=3)
    assert layout.source.shape == (1, 32)
    assert layout.target.shape == (2, 6)
    assert torch.equal(layout.positions, position_ids)


def test_too_many_documents_are_refused() -> None:
    with pytest.raises(RuntimeError, match="more than max_documents=2 documents"):
        align_positions(torch.zeros(1, 5, dtype=torch.int64), CONFIG, max_documents=2)


@given(
    pads=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=4),
)
def test_padded(pads: list[tuple[int, int]]) -> None:
    length = 15
    mask = torch.zeros(len(pads), length, dtype=torch.int64)
    for row, (left, right) in enumerate(pads):
        mask[row, left : length - right] = 1
    layout = align_padded(mask)
    x = torch.randn(len(pads), 2, length, 3)
    aligned = layout.align(x)
    back = layout.restore(aligned)
    for row, (left, right) in enumerate(pads):
        real = slice(left, length - right)
        assert torch.equal(aligned[row, :, : length - right - left], x[row, :, real])
        assert torch.equal(back[row, :, real], x[row, :, real])
        assert torch.equal(layout.positions[row, real], torch.arange(length - right - left))


def test_gaps_in_a_padding_mask_are_refused() -> None:
    with pytest.raises(RuntimeError, match="attention_mask has gaps"):
        align_padded(torch.tensor([[1, 0, 1]]))


def test_rows_that_are_all_padding_are_finite_places() -> None:
    layout = align_padded(torch.tensor([[0, 0, 0], [0, 1, 1]]))
    assert layout.source.min() >= 0
    assert layout.source.max() < 6


@pytest.mark.parametrize(
    "cu_seqlens", [torch.zeros(1).int(), torch.zeros(2, 2).int(), torch.zeros(3)]
)
def test_bad_cu_seqlens(cu_seqlens: Tensor) -> None:
    with pytest.raises(ValueError, match="cu_seqlens must be a 1-D integer tensor"):
        align_packed(cu_seqlens, 4, CONFIG)


def test_compiled_layouts_equal_eager_ones() -> None:
    """Index arithmetic is where Inductor's CPU code has been wrong before."""
    lengths = [13, 0, 7, 22, 1]

    def layouts(cu_seqlens: Tensor, mask: Tensor) -> list[Tensor]:
        packed, padded = align_packed(cu_seqlens, 43, CONFIG), align_padded(mask)
        assert packed.start is not None
        return [
            packed.source,
            packed.target,
            packed.start,
            packed.positions,
            padded.source,
            padded.target,
            padded.positions,
        ]

    mask = (torch.arange(43) >= torch.tensor([[3], [0], [20]])).int()
    arguments = cumulative(lengths), mask
    compiled = torch.compile(layouts, fullgraph=True)
    for got, want in zip(compiled(*arguments), layouts(*arguments), strict=True):
        assert torch.equal(got, want)


def test_gradients_flow_through_align_and_restore() -> None:
    layout = align_packed(cumulative([5, 9]), 14, CONFIG)
    x = torch.randn(1, 2, 14, 3, requires_grad=True)
    (grad,) = torch.autograd.grad(layout.restore(layout.align(x)).sum(), x)
    assert torch.equal(grad, torch.ones_like(x))
