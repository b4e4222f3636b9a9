"""Kinds of blocks against NumPy, and the promise that no document is longer than it was told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from nsa_flex import NSAConfig
from nsa_flex.documents import align_packed
from reference.interpreter import DEVICE, INTERPRETED, interpreted, kernels

pytest.importorskip("triton")
import triton
import triton.language as tl

from nsa_flex.fallback_kernels.common import block_kinds as module
from nsa_flex.fallback_kernels.common.block_kinds import (
    MASKED_DOCUMENT,
    SHORT_DOCUMENT,
    SHORT_QUERIES,
    UNMASKED_DOCUMENT,
    block_kinds,
    has_kind,
    span_has_kind,
)
from nsa_flex.fallback_kernels.fused import operators
from nsa_flex.fallback_kernels.fused.operators import core_attention
from nsa_flex.fallback_kernels.launch import plans

CONFIG = NSAConfig(8, 4, 16, 3, window_size=37)
SIZE, SHORT = CONFIG.select_block_size, CONFIG.num_selected_tokens

test_kernels_under_the_interpreter = interpreted(__file__)


def starts_of(lengths: list[int], tokens: int) -> Tensor:
    """int32 (tokens,): `document_start` of documents in whole blocks, the last one goes on."""
    starts = np.cumsum([0, *(-(-x // SIZE) * SIZE for x in lengths)])[:-1]
    places = np.searchsorted(starts, np.arange(tokens), side="right") - 1
    return torch.from_numpy(starts[places].astype(np.int32))


def kinds_by_numpy(document_start: Tensor, short_documents: int) -> np.ndarray:
    rows = []
    for row in document_start.cpu().numpy():
        first = row[::SIZE]
        lengths = np.array([(row == start).sum() for start in first])
        short = np.minimum(SHORT, short_documents)
        kind = np.where(lengths <= short, UNMASKED_DOCUMENT.value, MASKED_DOCUMENT.value)
        kind = np.where(lengths <= short_documents, kind, 0)
        is_short = np.arange(0, len(row), SIZE) - first < SHORT
        rows.append(kind + np.where(is_short, SHORT_QUERIES.value, 0))
    return np.stack(rows)


def random_starts(tokens: int) -> Tensor:
    """(2, tokens), of documents up to three times as long as what is short."""
    rows = [
        starts_of(torch.randint(1, 3 * SHORT, (tokens // SHORT + 1,)).tolist(), tokens)
        for _ in range(2)
    ]
    return torch.stack(rows).to(DEVICE)


@kernels
@pytest.mark.parametrize("short_documents", [0, SIZE, SHORT, 2 * SHORT])
@pytest.mark.parametrize("tokens", [1, 9 * SHORT, 9 * SHORT + 5])
def test_kinds_of_random_documents(
    tokens: int, short_documents: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows with other documents, whole blocks or not, in several turns of the kernel."""
    monkeypatch.setattr(module, "BLOCKS", 16)
    starts = random_starts(tokens)
    kinds = block_kinds(starts, CONFIG, short_documents)
    assert kinds.dtype == torch.uint8
    np.testing.assert_array_equal(kinds.cpu().numpy(), kinds_by_numpy(starts, short_documents))


@kernels
def test_kinds_of_aligned_documents() -> None:
    """Empty documents have no block; blocks behind the last are documents of their own."""
    lengths = (0, 2 * SHORT + 1, 3, 0, 0, SHORT, SHORT + 1)
    cu = torch.tensor([0, *np.cumsum(lengths)], device=DEVICE)
    start = align_packed(cu, sum(lengths), CONFIG).start
    assert start is not None
    kinds = block_kinds(start, CONFIG, 2 * SHORT)
    np.testing.assert_array_equal(kinds.cpu().numpy(), kinds_by_numpy(start, 2 * SHORT))
    short, masked = (SHORT_QUERIES | UNMASKED_DOCUMENT).value, MASKED_DOCUMENT.value
    gap = (start.shape[1] - sum(-(-x // SIZE) * SIZE for x in lengths)) // SIZE
    assert gap > 0
    want = [1] * 3 + [0] * 4 + [short] + [short] * 3 + [masked + 1] * 3 + [masked] + [short] * gap
    assert kinds[0].tolist() == want


@triton.jit
def _spans_kernel(
    kinds_ptr, first_ptr, last_ptr, out_ptr, each_ptr, num_tokens,
    KIND: tl.constexpr, SIZE: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    span = tl.program_id(0)
    first, last = tl.load(first_ptr + span), tl.load(last_ptr + span)
    found = span_has_kind(kinds_ptr, span % 2, first, last, num_tokens, KIND, SIZE, BLOCKS)
    tl.store(out_ptr + span, found.to(tl.int8))
    token = first + tl.arange(0, BLOCK)
    each = has_kind(kinds_ptr, span % 2, token, num_tokens, KIND, SIZE)
    tl.store(each_ptr + span * BLOCK + tl.arange(0, BLOCK), each.to(tl.int8))


@kernels
@pytest.mark.parametrize("blocks", [2, 16])
@pytest.mark.parametrize("kind", [SHORT_QUERIES, SHORT_DOCUMENT], ids=["queries", "documents"])
def test_kinds_of_spans(kind: tl.constexpr, blocks: int) -> None:
    """Never said of a span where it does not hold, and always where it does and blocks suffice."""
    tokens, width, around = 12 * SHORT + 5, 64, 40
    starts = random_starts(tokens)
    kinds = block_kinds(starts, CONFIG, 2 * SHORT)
    first = torch.randint(-around, tokens, (200,))
    last = (first + torch.randint(width, (200,))).clamp(min=0)
    found = torch.full((200,), -1, dtype=torch.int8, device=DEVICE)
    each = torch.full((200, width), -1, dtype=torch.int8, device=DEVICE)
    ends = (x.to(torch.int32).to(DEVICE) for x in (first, last))
    _spans_kernel[(200,)](
        kinds, *ends, found, each, tokens, KIND=kind, SIZE=SIZE, BLOCKS=blocks, BLOCK=width
    )
    by_token = (kinds_by_numpy(starts, 2 * SHORT) & kind.value != 0).repeat(SIZE, 1)
    padding = ((0, 0), (around, 2 * width))

    def rows(outside: bool) -> list[np.ndarray]:
        padded = np.pad(by_token[:, :tokens], padding, constant_values=outside)
        return [padded[i % 2, begin + around :] for i, begin in enumerate(first.tolist())]

    np.testing.assert_array_equal(each.cpu().numpy(), [row[:width] for row in rows(False)])
    want = [
        bool(row[: end - begin + 1].all()) and end - begin <= (blocks - 1) * SIZE
        for row, begin, end in zip(rows(True), first.tolist(), last.tolist(), strict=True)
    ]
    assert found.tolist() == want
    assert len(set(want)) == 2


def call_core(lengths: list[int], told: int | None, **options: bool) -> Tensor:
    """`core_attention` of one packed row, without gradients."""
    start = starts_of(lengths, sum(-(-x // SIZE) * SIZE for x in lengths))[None].to(DEVICE)
    tokens, like = start.shape[1], {"device": DEVICE, "dtype": torch.float16}
    query, key, value = (torch.randn(1, tokens, 1, 16, **like).transpose(1, 2) for _ in range(3))
    compressed = torch.randn(1, 1, CONFIG.num_compressed_blocks(tokens), 16, **like)
    return core_attention(
        *(query, key, value, compressed, compressed, key, value),
        torch.rand(1, 1, tokens, 3, **like),
        config=CONFIG,
        scale=0.25,
        document_start=start,
        max_document_length=told,
        **options,
    ).out


@kernels
@pytest.mark.skipif(not INTERPRETED, reason="on CUDA the process does not survive")
@pytest.mark.parametrize(
    "lengths",
    [[5, SHORT + 1, 7], [5, 2 * SHORT + 1, 7], [5, 3 * SHORT, 3 * SHORT + 1]],
    ids=["short", "masked", "lists"],
)
@pytest.mark.parametrize("replayed", [False, True], ids=["", "replayed"])
def test_a_longer_document_than_was_told_stops(
    lengths: list[int], replayed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every route, and by a launch plan of calls that kept the promise."""
    told = (max(lengths) - 1) // SHORT * SHORT
    if replayed:
        monkeypatch.setattr(plans, "DEVICES", {DEVICE})
        plans.forget_plans()
        kept = operators.core_forward._init_fn.plans
        before = kept.replayed
        for _ in range(3):
            call_core([1] * (sum(-(-x // SIZE) for x in lengths)), told)
        assert kept.replayed == before + 1
    with pytest.raises(RuntimeError, match="longer than max_document_length"):
        call_core(lengths, told)
    call_core(lengths, max(lengths))


IN_A_PROCESS = """
import torch
from kernels.test_block_kinds import SHORT, call_core
call_core([5, SHORT, 7], SHORT)
torch.cuda.synchronize()
print("kept", flush=True)
call_core([5, SHORT + 1, 7], SHORT)
torch.cuda.synchronize()
print("broken", flush=True)
"""


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="a process of its own, with compiled kernels")
def test_a_longer_document_than_was_told_stops_on_cuda() -> None:
    """In a process of its own: a CUDA context does not survive an assertion."""
    command = [sys.executable, "-c", IN_A_PROCESS]
    tests = str(Path(__file__).parents[1])
    ran = subprocess.run(command, cwd=tests, capture_output=True, text=True, check=False)
    assert ran.returncode != 0
    assert ran.stdout.split() == ["kept"], ran.stderr
    assert "longer than max_document_length" in ran.stderr
