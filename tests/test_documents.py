"""Alignment of packed documents and padded batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nsa_flex import DocumentLayout, NSAConfig, align_packed, align_padded, align_positions
from nsa_flex.documents import gather_real

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


@pytest.mark.parametrize(
    ("num_tokens", "at_most"), [(2048, 0.45), (8192, 0.2), (65536, 0.14)], ids=str
)
def test_unused_slots_are_few_and_room_for_short_documents(
    num_tokens: int, at_most: float
) -> None:
    config = NSAConfig()
    average = 4 * config.select_block_size
    lengths = np.random.default_rng(num_tokens).integers(1, 2 * average, num_tokens)
    bounds = np.minimum(lengths.cumsum(), num_tokens)
    lengths = np.diff(bounds, prepend=0)
    position_ids = torch.cat([torch.arange(n) for n in lengths])[None]
    layout = align_positions(position_ids, config)
    assert torch.equal(layout.positions, position_ids)
    assert layout.source.shape[1] <= (1 + at_most) * num_tokens


def test_as_many_documents_as_tokens() -> None:
    position_ids = torch.zeros(3, 5, dtype=torch.int64)
    layout = align_positions(position_ids, CONFIG, max_documents=15)
    assert torch.equal(layout.target.flatten(), 8 * torch.arange(15))
    assert torch.equal(layout.positions, position_ids)


@given(lengths=lengths_of)
def test_blocks_behind_the_documents_are_documents_of_their_own(lengths: list[int]) -> None:
    total = sum(lengths)
    layout = align_packed(cumulative([*lengths, 0, 0, 0]), total, CONFIG)
    assert layout.start is not None
    used = int(layout.target.max()) // 8 * 8 + 8
    slots = torch.arange(used, layout.source.shape[1])
    assert torch.equal(layout.start[0, used:], (slots // 8 * 8).int())


def test_more_documents_than_the_bound_pass_if_they_fit() -> None:
    layout = align_positions(torch.arange(24)[None] % 8, CONFIG, max_documents=1)
    assert torch.equal(layout.target[0], torch.arange(24))


def test_short_documents_beyond_expectation_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"more short documents .* pass max_documents, a bound"):
        align_positions(torch.zeros(1, 40, dtype=torch.int64), CONFIG)


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


@pytest.mark.parametrize(
    "cu_seqlens", [[2, 5, 9], [0, 5, 8], [0, 5, 10], [0, 6, 4, 9], [-1, 9], [9, 5, 0]]
)
def test_cu_seqlens_that_do_not_span_the_row(cu_seqlens: list[int]) -> None:
    with pytest.raises(RuntimeError, match="must begin with 0, never descend, and end with"):
        align_packed(torch.tensor(cu_seqlens), 9, CONFIG)


def test_what_is_no_layout_of_tokens() -> None:
    for dtype in (torch.bool, torch.complex64):
        with pytest.raises(ValueError, match="cu_seqlens must be a 1-D integer tensor"):
            align_packed(torch.zeros(3, dtype=dtype), 9, CONFIG)
    with pytest.raises(ValueError, match="num_tokens=0 must be at least 1"):
        align_packed(torch.zeros(3).int(), 0, CONFIG)
    for shape in ((9,), (2, 0)):
        with pytest.raises(ValueError, match=r"position_ids must be integers \(B, S\)"):
            align_positions(torch.zeros(shape).long(), CONFIG)


def test_a_document_longer_than_it_was_said_to_be_is_refused() -> None:
    cu_seqlens = torch.tensor([0, 3, 3, 10]).int()
    assert align_packed(cu_seqlens, 10, CONFIG).max_document_length is None
    assert align_packed(cu_seqlens, 10, CONFIG, 7).max_document_length == 7
    with pytest.raises(RuntimeError, match="document that is longer than max_document_length"):
        align_packed(cu_seqlens, 10, CONFIG, 6)
    with pytest.raises(ValueError, match="max_document_length=0 must be at least 1"):
        align_packed(cu_seqlens, 10, CONFIG, 0)


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


LAYOUTS = {
    "packed": align_packed(cumulative([5, 0, 9, 1]), 15, CONFIG),
    "left": align_padded((torch.arange(15) >= torch.tensor([[4], [0]])).int()),
    "right": align_padded((torch.arange(15) < torch.tensor([[4], [0]])).int()),
    "gaps": gather_real(torch.arange(15) % torch.tensor([[2], [3]]) > 0),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_come_back_to_where_tokens_came_from(name: str) -> None:
    layout = LAYOUTS[name]
    batch, length = layout.target.shape
    real = torch.ones(batch, length, dtype=torch.bool)
    real = real if layout.padding is None else ~layout.padding
    x = torch.randn(batch, 2, length, 3, requires_grad=True)
    weight = torch.randn_like(x)
    wanted = weight * real[:, None, :, None]
    (grad,) = torch.autograd.grad((layout.restore(layout.align(x)) * wanted).sum(), x)
    assert torch.equal(grad, wanted)


@pytest.mark.parametrize("name", LAYOUTS)
def test_slots_that_repeat_a_token_get_and_give_no_gradient(name: str) -> None:
    layout = LAYOUTS[name]
    rows, slots = layout.source.shape
    taken = torch.zeros(rows * slots, dtype=torch.bool)
    tokens = layout.target if layout.padding is None else layout.target[~layout.padding]
    taken[tokens.flatten()] = True
    aligned = torch.randn(rows, 2, slots, 3, requires_grad=True)
    (grad,) = torch.autograd.grad(layout.restore(aligned).sum(), aligned)
    assert torch.equal(grad, taken.view(rows, 1, slots, 1).float().expand_as(grad))

    x = torch.randn(*layout.target.shape, 2, 3).transpose(1, 2).requires_grad_()
    (grad,) = torch.autograd.grad(layout.align(x).sum(), x)
    assert grad.max() == 1
    assert grad.sum() == 2 * 3 * tokens.numel()


def test_second_derivatives_of_moved_tokens() -> None:
    layout = LAYOUTS["packed"]
    x = torch.randn(1, 1, 15, 2, dtype=torch.float64, requires_grad=True)

    def there_and_back(x: Tensor) -> Tensor:
        return layout.restore(layout.align(x).square())

    assert torch.autograd.gradcheck(there_and_back, x)
    assert torch.autograd.gradgradcheck(there_and_back, x)
