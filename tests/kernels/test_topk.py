"""The fused choice of blocks against the float64 oracle."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from nsa_flex.config import NSAConfig
from reference import oracle
from reference.interpreter import DEVICE, INTERPRETED, LOW_PRECISION, interpreted, kernels
from reference.modes import no_synchronization

pytest.importorskip("triton")
from nsa_flex.fallback_kernels.common.arch import gluon_unsupported_reason
from nsa_flex.fallback_kernels.topk import config as topk_config
from nsa_flex.fallback_kernels.topk import interface as topk
from nsa_flex.fallback_kernels.topk.interface import select_topk_blocks

SMALL = NSAConfig(
    compress_block_size=8, compress_stride=4, select_block_size=16, num_selected_blocks=4
)
PAPER = NSAConfig()
NARROW = NSAConfig(select_block_size=32, num_selected_blocks=8)
WIDE = NSAConfig(64, 32, 128, 5)
APART = NSAConfig(8, 8, 16, 4)  # compressed blocks do not overlap
DENSE = NSAConfig(16, 4, 16, 5)  # each token in four compressed blocks
BARE = NSAConfig(8, 4, 16, 3, num_initial_blocks=0, num_local_blocks=1)
FORCED = NSAConfig(8, 4, 16, 4, num_initial_blocks=2, num_local_blocks=2)
TILED = NSAConfig(4, 4, 4, 8, 0, 1, selection="tiled_top_k")
NSA_1B = NSAConfig(16, 16, 16, 16, 0, 1, 128, "mean", "tiled_top_k")
ODD_TILED = NSAConfig(8, 4, 8, 6, 0, 1, selection="tiled_top_k")

test_kernels_under_the_interpreter = interpreted(__file__)


@dataclass(frozen=True)
class Case:
    """Sizes of one call; see `inputs`."""

    config: NSAConfig = SMALL
    batch: int = 1
    kv_heads: int = 1
    group: int = 2
    num_queries: int = 6
    past: int = 94
    unused: int = 0  # keys behind the last query, as in a static cache
    head_dim: int = 16
    documents: bool = False
    dtype: torch.dtype = torch.float32
    document_blocks: int = 7  # of the documents of the first batch row

    @property
    def num_keys(self) -> int:
        return self.past + self.num_queries + self.unused

    @property
    def num_compressed(self) -> int:
        return max(1, self.config.num_compressed_blocks(self.num_keys))

    @property
    def num_blocks(self) -> int:
        return self.config.num_select_blocks(self.num_keys)

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def starts(self) -> np.ndarray | None:
        """Document of each query: rows of a batch have documents of different lengths."""
        if not self.documents:
            return None
        blocks = self.document_blocks + 2 * np.arange(self.batch)[:, None]
        length = blocks * self.config.select_block_size
        return (np.arange(self.num_queries) + self.past) // length * length


def inputs(case: Case) -> tuple[Tensor, Tensor]:
    """Query and compressed keys with memory (B, S, H, D)."""

    def new(tokens: int, heads: int) -> Tensor:
        x = torch.randn(case.batch, tokens, heads, case.head_dim, device=DEVICE)
        return x.to(case.dtype).transpose(1, 2)

    return new(case.num_queries, case.kv_heads * case.group), new(
        case.num_compressed, case.kv_heads
    )


def references(case: Case, q: Tensor, k: Tensor) -> tuple[Tensor, np.ndarray]:
    """Float32 log-sum-exp of the compressed branch and float64 scores of the blocks."""
    mask = oracle.compressed_mask(
        case.num_queries, case.num_keys, k.shape[2], case.config, case.past, case.starts
    )
    queries, keys = (x.detach().double().cpu().numpy() for x in (q, k))
    _, lse, p = oracle.branch(queries, keys, keys, mask, case.scale)
    scores = oracle.block_scores(p, case.config, case.num_blocks, case.kv_heads)
    return torch.from_numpy(lse).float().to(DEVICE), scores


def choice(case: Case, q: Tensor, k: Tensor, lse: Tensor | None) -> Tensor:
    starts = case.starts
    return select_topk_blocks(
        q,
        k,
        lse,
        torch.arange(case.num_queries, device=DEVICE)[None] + case.past,
        None if starts is None else torch.from_numpy(starts).int().to(DEVICE),
        config=case.config,
        scale=case.scale,
        num_blocks=case.num_blocks,
    )


def assert_best(case: Case, blocks: Tensor, scores: np.ndarray) -> None:
    """The oracle's choice but for scores that agree to float32 rounding.

    Logits of some units carry errors of some last places, which are relative errors of p; a score
    sums no more than G probabilities, each counted at most l/d times.
    """
    overlap = case.config.compress_block_size // case.config.compress_stride
    rounding = 32 * torch.finfo(torch.float32).eps * case.group * overlap
    shape = (case.batch, case.kv_heads, case.num_queries, case.config.num_selected_blocks)
    assert blocks.dtype == torch.int32
    assert blocks.shape == shape
    got = blocks.cpu().numpy()
    excess = oracle.choice_excess(got, scores, case.config, case.past, case.starts)
    assert excess <= rounding, (case, excess)


def check(case: Case) -> None:
    q, k = inputs(case)
    lse, scores = references(case, q, k)
    assert_best(case, choice(case, q, k, lse), scores)
    assert_best(case, choice(case, q, k, None), scores)


@kernels
@pytest.mark.kept(lambda group: group in (1, 3, 16))
@pytest.mark.parametrize("group", [1, 2, 3, 4, 6, 8, 12, 16, 32])
def test_group_sizes(group: int) -> None:
    check(Case(group=group))


@kernels
@pytest.mark.parametrize("head_dim", [8, 16, 24, 80, 96, 128, 192, 256])
def test_head_dims(head_dim: int) -> None:
    check(Case(head_dim=head_dim))


@kernels
@pytest.mark.parametrize("dtype", LOW_PRECISION)
@pytest.mark.parametrize("head_dim", [64, 80])
def test_low_precision(dtype: torch.dtype, head_dim: int) -> None:
    """Products of halves are exact in float32: no allowance beyond float32's is needed."""
    check(Case(dtype=dtype, kv_heads=2, head_dim=head_dim, past=130))


@kernels
@pytest.mark.parametrize("config", [PAPER, NARROW, WIDE, APART, DENSE, BARE, FORCED])
def test_configs(config: NSAConfig) -> None:
    """The last queries choose from five blocks more than they may have."""
    blocks = config.num_selected_blocks + 5
    length = blocks * config.select_block_size + 3
    check(Case(config=config, past=length - 6, group=1))


@kernels
@pytest.mark.parametrize("config", [TILED, ODD_TILED])
def test_tiles(config: NSAConfig) -> None:
    """Queries in the first tile, in the first and the last block of the second, in the third."""
    tile = config.num_selected_blocks * config.select_block_size
    for past in (tile - 3, 2 * tile - 3, 3 * tile - 9):
        check(Case(config=config, past=past, group=1))


@kernels
@pytest.mark.parametrize("config", [TILED, ODD_TILED])
def test_tiles_of_documents(config: NSAConfig) -> None:
    """They are counted from a document's first block, which no vector of scores begins with."""
    blocks = 2 * config.num_selected_blocks + 3
    last = (2 * blocks - 2) * config.select_block_size  # in the last tile of the second document
    check(Case(config=config, past=last - 12, num_queries=18, batch=2, group=1,
               documents=True, document_blocks=blocks))  # fmt: skip


def check_wide_rows(config: NSAConfig, num_blocks: int) -> None:
    """Then with ties: across threads and their vectors, and all over the last tile."""
    case = Case(config=config, num_queries=2, past=4 * num_blocks - 2, group=1)
    case = replace(case, dtype=torch.float16)
    q, k = inputs(case)
    for _ in range(2):
        lse, scores = references(case, q, k)
        assert_best(case, choice(case, q, k, lse), scores)
        k[:, :, num_blocks // 3 :] = 0.0


@kernels
@pytest.mark.kept(lambda num_blocks: num_blocks in (129, 1100))
@pytest.mark.parametrize("num_blocks", [129, 513, 1100, 4100])
def test_wide_rows_of_tiles(num_blocks: int) -> None:
    check_wide_rows(TILED, num_blocks)


@kernels
def test_many_slots() -> None:
    config = NSAConfig(4, 4, 4, 64, num_initial_blocks=3, num_local_blocks=5)
    check(Case(config=config, past=276, group=1))


@kernels
@pytest.mark.kept(lambda num_blocks: num_blocks in (129, 1100))
@pytest.mark.parametrize("num_blocks", [129, 400, 513, 1100, 4100])
def test_wide_rows_of_scores(num_blocks: int) -> None:
    """Rows of scores that fill one and several warps."""
    config = NSAConfig(4, 4, 4, 32, num_initial_blocks=2, num_local_blocks=3)
    check_wide_rows(config, num_blocks)


@kernels
@pytest.mark.parametrize("num_queries", [1, 2, 7, 8, 9, 16, 17])
def test_short_sequences(num_queries: int) -> None:
    check(Case(num_queries=num_queries, past=0, batch=2, kv_heads=2))


@kernels
@pytest.mark.parametrize("num_queries", [64, 65, 81])
def test_from_the_first_query_to_the_first_choice(num_queries: int) -> None:
    check(Case(num_queries=num_queries, past=0))


@kernels
@pytest.mark.parametrize(("num_queries", "past"), [(1, 300), (1, 301), (3, 90), (9, 150)])
def test_query_offset(num_queries: int, past: int) -> None:
    check(Case(num_queries=num_queries, past=past, batch=2))
    check(Case(num_queries=num_queries, past=past, unused=40))


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_keys_after_the_queries_may_hold_anything(dtype: torch.dtype) -> None:
    case = Case(num_queries=10, past=170, unused=100, dtype=dtype)
    q, k = inputs(case)
    lse, scores = references(case, q, k)
    k[:, :, case.config.num_compressed_blocks(180) :] = float("nan")
    assert_best(case, choice(case, q, k, lse), scores)
    assert_best(case, choice(case, q, k, None), scores)


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_offsets_of_batch_rows_differ(dtype: torch.dtype) -> None:
    case = Case(num_queries=8, past=200, batch=2, dtype=dtype)
    q, k = inputs(case)
    offset = torch.tensor([[120], [200]], device=DEVICE)
    options = {"config": SMALL, "scale": case.scale, "num_blocks": case.num_blocks}
    positions = torch.arange(8, device=DEVICE)[None] + offset
    blocks = select_topk_blocks(q, k, None, positions, None, **options)
    for row, past in enumerate((120, 200)):
        alone = replace(case, batch=1, past=past, unused=200 - past)
        q_row, k_row = q[row : row + 1], k[row : row + 1]
        _, scores = references(alone, q_row, k_row)
        assert_best(alone, blocks[row : row + 1], scores)


@kernels
@pytest.mark.kept(lambda dtype, together: (dtype == torch.float16) == together)
@pytest.mark.parametrize("together", [False, True], ids=["", "queries together"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("config", "past", "num_queries", "blocks"),
    [(SMALL, 108, 38, 7), (SMALL, 205, 6, 7), (DENSE, 205, 6, 7), (SMALL, 500, 70, 33)],
)
def test_documents(
    config: NSAConfig,
    past: int,
    num_queries: int,
    blocks: int,
    dtype: torch.dtype,
    together: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over the ends of documents, and where the second one is long enough to choose from.

    Of the last case some queries see more blocks than `topk_span_kernel` takes, and some fewer.
    """
    if together:
        monkeypatch.setattr(topk_config, "SELECT_MANY_ROWS", 1)
    case = Case(config, 2, 1, 2, num_queries, past, 0, 16, True, dtype, blocks)
    check(case)


HALF = torch.float16


@kernels
@pytest.mark.kept(lambda case: case.num_queries < 3000)
@pytest.mark.parametrize(
    "case",
    [
        *(Case(group=group, kv_heads=2, dtype=HALF) for group in (1, 3, 8, 24)),
        *(Case(head_dim=dim, dtype=HALF) for dim in (8, 24, 80, 96, 128, 192, 256)),
        *(
            Case(config, 2, 1, 2, 70, past=20 * config.select_block_size + 3, dtype=HALF)
            for config in (SMALL, PAPER, NARROW, WIDE, APART, DENSE, BARE, FORCED)
        ),
        *(Case(num_queries=n, past=0, batch=3, dtype=HALF) for n in (1, 2, 16, 65, 129)),
        Case(num_queries=512, past=0, dtype=HALF),  # up to the most blocks that it takes
        Case(PAPER, 2, 2, 4, 3000, 0, 0, 16, True, HALF, 21),
        Case(SMALL, 2, 1, 2, 200, 0, 0, 16, True, HALF, 9),
    ],
)
def test_queries_that_see_few_blocks(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """All by `topk_span_kernel`, and none with scores in memory where the longest is known."""
    launched = []
    launch = topk._launch_span
    monkeypatch.setattr(topk, "_launch_span", lambda *a, **kw: launched.append(launch(*a, **kw)))
    q, k = inputs(case)
    lse, scores = references(case, q, k)
    chosen = choice(case, q, k, lse)
    assert len(launched) == (case.num_blocks > case.config.num_selected_blocks)
    assert_best(case, chosen, scores)
    assert_best(case, choice(case, q, k, None), scores)
    if not launched:
        return
    monkeypatch.delattr(topk, "_launch_scores")
    monkeypatch.delattr(topk, "_launch_select")
    longest = topk_config.SPAN * case.config.select_block_size
    starts = None if case.starts is None else torch.from_numpy(case.starts).int().to(DEVICE)
    told = topk.run_topk(
        *(q, k, lse, torch.arange(case.num_queries, device=DEVICE)[None] + case.past, starts),
        *(case.scale, case.num_blocks, case.config.counts, longest),
    )
    assert torch.equal(told, chosen)


@kernels
def test_what_follows_documents_of_a_known_length_has_blocks_too() -> None:
    """It may be longer than these: any blocks will do that the queries see."""
    case = Case(num_queries=40, past=560, documents=True, dtype=HALF, document_blocks=40)
    q, k = inputs(case)
    lse, _ = references(case, q, k)
    positions = torch.arange(40, device=DEVICE)[None] + 560
    starts = torch.zeros_like(positions, dtype=torch.int32)
    arguments = (case.scale, case.num_blocks, case.config.counts, 32 * 16)
    blocks = topk.run_topk(q, k, lse, positions, starts, *arguments)
    assert bool((blocks.diff() > 0).all())
    assert bool(((blocks >= 0) & (blocks <= (positions // 16)[:, None, :, None])).all())


@kernels
@pytest.mark.parametrize("slots", [3, 12, 31])
def test_equal_scores_of_few_blocks_take_the_lower_index(slots: int) -> None:
    """Scores of three values, exactly: keys that are 0 but for some, and no overlap."""
    case = Case(NSAConfig(8, 8, 16, slots), 1, 1, 2, 64, 440, dtype=HALF)
    q, k = inputs(case)
    q[:] = 1.0
    k[:] = 0.0
    k[:, :, torch.randperm(case.num_compressed)[: case.num_compressed // 3]] = 0.125
    lse, scores = references(case, q, k)
    want = oracle.choose_all(scores.round(9), case.config, case.past)
    np.testing.assert_array_equal(choice(case, q, k, lse).cpu().numpy(), want)


def test_span_refuses_what_it_does_not_take() -> None:
    q = torch.empty(1, 2, 4096, 128, dtype=torch.bfloat16)

    def reason(query: Tensor = q, config: NSAConfig = PAPER) -> str | None:
        return topk.span_unsupported_reason(query, config)

    assert reason() is None
    assert topk.has_spans(PAPER, True, 64)
    assert topk.has_spans(PAPER, False, 32)
    assert not topk.has_spans(PAPER, False, 33)  # one long document
    assert not topk.has_spans(NSAConfig(num_selected_blocks=32), True, 64)  # nothing to choose
    for refused, words in (
        (reason(q.float()), "float32"),
        (reason(config=NSAConfig(8, 4, 8, 4)), "8 tokens"),
        (reason(config=NSAConfig(8, 4, 32, 4)), "8 compressed blocks"),
        (reason(q.new_empty(1, 2, 4, 512)), "shared memory"),
    ):
        assert refused is not None
        assert words in refused


@kernels
def test_chunks_and_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of 64 queries at a time, and every tile of keys in a program of its own."""
    case = Case(num_queries=66, past=200)
    row = topk_config.row_width(case.num_blocks) + 32
    monkeypatch.setattr(topk_config, "SCORE_BYTES", 64 * 4 * row)
    q, k = inputs(case)
    lse, scores = references(case, q, k)
    monkeypatch.setattr(topk_config, "MIN_CTAS", 1000)
    assert_best(case, choice(case, q, k, lse), scores)
    monkeypatch.setattr(topk_config, "MIN_CTAS", 1)
    first = replace(case, num_queries=4, unused=62)
    assert_best(first, choice(first, q[:, :, :4], k, None), scores[:, :, :4])


@pytest.mark.parametrize("kv_heads", [1, 4, 16, 700])
@pytest.mark.parametrize(
    ("num_queries", "past"), [(1, 5000), (9000, 0), (70_001, 33), (1 << 20, 0)]
)
def test_chunks_hold_every_query_and_its_blocks(
    num_queries: int, past: int, kv_heads: int
) -> None:
    num_blocks = PAPER.num_select_blocks(past + num_queries)
    plan = topk_config.TopkPlan(1, kv_heads, kv_heads, num_queries, 128, num_blocks, 16, 64, 2)
    stop = 0
    for chunk in plan.chunks():
        assert chunk.start == stop
        assert chunk.size > 0
        stop += chunk.size
        own = (past + stop - 1) // 64
        assert min(own + 1, num_blocks) <= chunk.width <= topk_config.row_width(num_blocks)
        bytes_ = 4 * kv_heads * chunk.size * chunk.pitch
        assert bytes_ <= topk_config.SCORE_BYTES or chunk.size == plan.tile_tokens
    assert stop == num_queries


def row_of_scores(kind: str, width: int) -> Tensor:
    """A row's scores, float32, not negative."""
    scores = torch.rand(width)
    if kind == "few values":
        return (scores * 4).floor() / 4
    if kind == "zeros":
        return torch.zeros(width)
    if kind == "close together":
        scores[width // 3 : width // 3 + 20] += 1.0
    if kind == "equal but for the last bits":
        order = scores.argsort(descending=True)[8:20]
        scores[order] = scores[order[4]] + torch.randint(3, (12,)) * 2.0**-23
    if kind == "far apart":
        scores = torch.exp(20 * torch.randn(width)).clamp(max=3e38)
        scores[width // 2] = float("inf")
    return scores


KINDS = (
    "random",
    "few values",
    "zeros",
    "close together",
    "equal but for the last bits",
    "far apart",
)


ROW_OPTIONS = {"SELECT": 64, "INITIAL": 1, "LOCAL": 2}


class ChoiceOfRow(NamedTuple):
    """Blocks, and whether the search left floats in the scratch behind the row, not int32."""

    got: list[int]
    want: list[int]
    searched: bool


def row_in_memory(
    scores: Tensor, own: int, first: int, num_slots: int, chunk: topk_config.QueryChunk
) -> Tensor:
    """A row as a score kernel leaves it, with maxima as the Hopper kernel leaves them.

    What that kernel does not write is poison.
    """
    row = torch.full((chunk.pitch,), float("nan"))
    if own - first < num_slots:
        return row
    scores = scores.clone()
    scores[: first + 1] = scores[own - 1 :] = -1.0
    start, stop = first // 64 * 64, -(-(own - 1) // 4) * 4
    row[start:stop] = scores[start:stop]
    if chunk.banded:
        bands = slice(start // 16, -(-stop // 16))
        row[chunk.width + chunk.candidates :][bands] = scores.view(-1, 16).amax(1)[bands]
    return row


def best_of_row(scores: Tensor, own: int, first: int, num_slots: int) -> list[int]:
    """The choice with one initial and two local blocks."""
    if own - first < num_slots:
        blocks = list(range(first, own + 1))
        return blocks + [-1] * (num_slots - len(blocks))
    order = sorted(range(first + 1, own - 1), key=lambda block: (-float(scores[block]), block))
    return sorted([first, own - 1, own, *order[: num_slots - 3]])


def blocks_of_row(
    scores: Tensor, own: int, first: int, num_slots: int, maxima: bool
) -> ChoiceOfRow:
    """What is chosen from a row, with the maxima of bands or without."""
    width = len(scores)
    plan = topk_config.TopkPlan(1, 1, 1, 1, 128, width, num_slots, 64, 2, sm90=maxima)
    chunk = topk_config.QueryChunk(0, 1, width, plan.candidates, sm90=maxima)
    blocks = torch.full((1, 1, 1, num_slots), -7, dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([[64 * first]], device=DEVICE) if first else None
    places = topk._query_positions(torch.tensor([[own * 64 + 5]], device=DEVICE), starts)
    row = row_in_memory(scores, own, first, num_slots, chunk).to(DEVICE)
    topk._launch_select(plan, chunk, row, blocks, places, **ROW_OPTIONS)
    want = best_of_row(scores, own, first, num_slots)
    searched = bool((row[width : width + plan.candidates] >= 1.0).any())
    return ChoiceOfRow(blocks.flatten().tolist(), want, searched)


@kernels
@pytest.mark.kept(
    lambda width, num_queries, documents: num_queries == 19 or (width == 1024) == documents
)
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("width", "num_slots"), [(512, 16), (1024, 4), (2048, 16)])
@pytest.mark.parametrize("num_queries", [1, 7, 19])
def test_rows_leave_one_another_alone(
    width: int,
    num_slots: int,
    num_queries: int,
    documents: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows that are searched, not searched and without scores, of two heads and batch rows.

    Of documents a CTA takes several, and of its second one none has scores.
    """
    monkeypatch.setattr(topk_config, "SELECT_MANY_ROWS", 1)
    plan = topk_config.TopkPlan(2, 2, 2, num_queries + 1, 128, width, num_slots, 64, 2, sm90=True)
    chunk = topk_config.QueryChunk(1, num_queries, width, plan.candidates, sm90=True)
    own = torch.randint(width, (2, num_queries + 1))
    own[:, 1::3] = torch.randint(2 * num_slots, own[:, 1::3].shape)
    second = slice(1 + topk_config.SELECT_QUERIES, 1 + 2 * topk_config.SELECT_QUERIES)
    own[:, second] = torch.randint(num_slots, own[:, second].shape)
    first = (torch.rand(own.shape) * own).long() if documents else torch.zeros_like(own)
    rows, want = [], []
    for batch in range(2):
        for head in range(2):
            for query in range(1, num_queries + 1):
                kind = KINDS[(batch + head + query) % len(KINDS)]
                place = (int(own[batch, query]), int(first[batch, query]), num_slots)
                scores = row_of_scores(kind, width)
                rows.append(row_in_memory(scores, *place, chunk))
                want.append(best_of_row(scores, *place))
    blocks = torch.full((2, 2, num_queries + 1, num_slots), -7, dtype=torch.int32)
    expected = blocks.clone()
    expected[:, :, 1:] = torch.tensor(want).view(2, 2, num_queries, num_slots)
    blocks = blocks.to(DEVICE)
    starts = (first * 64).to(DEVICE) if documents else None
    places = topk._query_positions((own * 64 + 63).to(DEVICE), starts)
    memory = torch.stack(rows).to(DEVICE)
    topk._launch_select(plan, chunk, memory, blocks, places, **ROW_OPTIONS)
    assert torch.equal(blocks.cpu(), expected)


@kernels
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("width", "num_slots", "own"),
    [(512, 16, 17), (1024, 16, 900), (4096, 12, 4090), (512, 64, 70), (2048, 64, 2040)],
)
def test_maxima_of_bands_lead_to_the_best(
    width: int, num_slots: int, own: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choice from scores and maxima as the Hopper kernel leaves them."""
    monkeypatch.setattr(topk_config, "BANDED_WIDTHS", (512, 16384))
    found = blocks_of_row(row_of_scores(kind, width), own, 0, num_slots, maxima=True)
    assert found.got == found.want


@kernels
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("width", "num_slots", "own", "first"),
    [(128, 16, 127, 0), (128, 4, 70, 60), (256, 16, 250, 3), (512, 16, 17, 0), (1024, 9, 1000, 0)],
)
def test_rows_without_maxima(width: int, num_slots: int, own: int, first: int, kind: str) -> None:
    found = blocks_of_row(row_of_scores(kind, width), own, first, num_slots, maxima=False)
    assert found.got == found.want


@kernels
@pytest.mark.parametrize("maxima", [False, True])
@pytest.mark.parametrize("equal", [False, True])
def test_a_row_is_searched_where_keys_do_not_decide(equal: bool, maxima: bool) -> None:
    """Scores a thousandth apart, the best of them far apart, differ in their keys."""
    scores = torch.zeros(1024) if equal else torch.arange(1024) * 389 % 1024 / 1024
    found = blocks_of_row(scores, 1000, 0, 16, maxima)
    assert found.got == found.want
    assert found.searched == equal


@kernels
@pytest.mark.parametrize("head_dim", [16, 128, 256])
def test_tensor_copies_bring_the_same_keys(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same products in the same order: the same bits."""
    case = Case(PAPER, num_queries=4, past=1500, head_dim=head_dim, dtype=torch.float16)
    q, k = inputs(case)
    lse, scores = references(case, q, k)
    copied = choice(case, q, k, lse)
    assert_best(case, copied, scores)
    monkeypatch.setattr(topk, "supports_tma", lambda device: False)
    assert torch.equal(choice(case, q, k, lse), copied)


@kernels
@pytest.mark.parametrize("kept", [0, 5, 40])
def test_equal_scores_take_the_lower_index(kept: int) -> None:
    """All keys alike but some: the lowest free blocks, exactly."""
    case = Case(num_queries=6, past=204, group=3)
    q, k = inputs(case)
    k[:, :, kept:] = 0.0
    lse, scores = references(case, q, k)
    # Where scores are equal in exact arithmetic, float64 must not tell them apart either.
    want = oracle.choose_all(scores.round(12), case.config, case.past)
    got = choice(case, q, k, lse)
    if kept == 0:
        np.testing.assert_array_equal(got.cpu().numpy(), want)
    assert_best(case, got, scores)
    assert torch.equal(got, choice(case, q, k, lse))


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_nan_scores_leave_the_forced_blocks(dtype: torch.dtype) -> None:
    case = Case(past=160, dtype=dtype)
    q, k = inputs(case)
    q[:, :, 3] = float("nan")
    k[:, :, 20] = float("nan")
    blocks = choice(case, q, k, None)
    zeros = np.zeros((1, 1, case.num_queries, case.num_blocks))
    want = oracle.choose_all(zeros, case.config, case.past)[:, :, 3]
    np.testing.assert_array_equal(blocks[:, :, 3].cpu().numpy(), want)
    oracle.choice_excess(
        blocks.cpu().numpy(), zeros, case.config, case.past
    )  # well formed everywhere


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_extreme_logits(dtype: torch.dtype) -> None:
    """Probabilities of 0 and 1, and compressed keys so large that hidden ones overflow."""
    case = Case(past=160, dtype=dtype)
    q, k = inputs(case)
    k *= 1e4
    check_lse, scores = references(case, q, k)
    for lse in (check_lse, None):
        got = choice(case, q, k, lse)
        # Errors of a logit are relative to it: compare where the winners are clear.
        excess = oracle.choice_excess(got.cpu().numpy(), scores, case.config, case.past)
        assert excess <= 0.05


@kernels
@pytest.mark.parametrize("layout", ["heads first", "last dimension strided", "expanded"])
def test_strides(layout: str) -> None:
    case = Case(kv_heads=2, batch=2, num_queries=4)
    q, k = inputs(case)
    lse, _ = references(case, q, k)
    want = choice(case, q, k, lse)
    if layout == "heads first":
        q, k = q.contiguous(), k.contiguous()
    elif layout == "last dimension strided":
        q, k = (x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k))
        lse = lse.transpose(1, 2).contiguous().transpose(1, 2)
    else:
        k = k[:, :1].expand(-1, 2, -1, -1)
        want = choice(case, q, k.contiguous(), lse)
    assert torch.equal(choice(case, q, k, lse), want)


@kernels
def test_same_choice_whatever_the_order_of_heads_and_rows() -> None:
    case = Case(batch=2, group=4, num_queries=4)
    q, k = inputs(case)
    lse, scores = references(case, q, k)
    want = choice(case, q, k, lse)
    assert_best(case, choice(case, q.flip(1), k, lse.flip(1)), scores)
    for row in range(2):
        alone = choice(
            replace(case, batch=1), q[row : row + 1], k[row : row + 1], lse[row : row + 1]
        )
        assert torch.equal(alone, want[row : row + 1])


@kernels
def test_operator_obeys_the_library_rules() -> None:
    case = Case(num_queries=6, past=84)
    q, k = inputs(case)
    lse, _ = references(case, q, k)
    positions = torch.arange(84, 90, device=DEVICE)[None]
    starts = torch.zeros(1, 6, dtype=torch.int32, device=DEVICE)
    for extra in ((lse, positions, None), (None, positions, starts)):
        arguments = (q, k, *extra, case.scale, case.num_blocks, SMALL.counts)
        torch.library.opcheck(topk.topk_operator, arguments)


@kernels
def test_compiles_into_one_graph_with_dynamic_length() -> None:
    def chosen(q: Tensor, k: Tensor, lse: Tensor) -> Tensor:
        positions = torch.arange(q.shape[2], device=q.device)[None]
        options = {"config": SMALL, "scale": 0.25, "num_blocks": -(-q.shape[2] // 16)}
        return select_topk_blocks(q, k, lse, positions, None, **options)

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(chosen, fullgraph=True, dynamic=True, backend=counter)
    for num_queries in (66, 67, 70):
        case = Case(num_queries=num_queries, past=0)
        q, k = inputs(case)
        lse, _ = references(case, q, k)
        assert torch.equal(compiled(q, k, lse), chosen(q, k, lse))
    assert counter.frame_count == 1


GOOD = Case(num_queries=32)


@kernels
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 512}, "512 is the head dim; the Triton kernels take at most 256"),
        ({"group": 65}, "65 query heads share a KV head; the Triton kernels take at most 64"),
        ({"dtype": torch.float64}, "query is torch.float64; the Triton kernels take"),
        (
            {"config": NSAConfig(4, 4, 4, 129)},
            "129 blocks are to be selected; the Triton kernels take at most 128",
        ),
    ],
)
def test_refused(change: dict[str, object], message: str) -> None:
    case = replace(GOOD, **change)
    q, k = inputs(case)
    with pytest.raises(ValueError, match=message):
        choice(case, q, k, None)


@kernels
@pytest.mark.parametrize("change", [lambda x: x.double(), lambda x: x[:, :, 1:]])
def test_refused_log_sum_exp(change) -> None:  # type: ignore[no-untyped-def]
    q, k = inputs(GOOD)
    lse, _ = references(GOOD, q, k)
    with pytest.raises(ValueError, match=r"lse must be torch.float32 .*, got "):
        choice(GOOD, q, k, change(lse))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter takes CPU tensors")
def test_refused_on_the_cpu() -> None:
    q, k = torch.zeros(1, 2, 32, 16), torch.zeros(1, 1, 7, 16)
    options = {"config": SMALL, "scale": 1.0, "num_blocks": 2}
    with pytest.raises(ValueError, match="the Triton kernels need CUDA tensors, got cpu"):
        select_topk_blocks(q, k, None, torch.arange(32)[None], None, **options)


def exact_rows(case: Case, q: Tensor, k: Tensor, rows: slice) -> np.ndarray:
    """Float64 scores of some queries, on the GPU: (B, Hkv, rows, blocks)."""
    config = case.config
    position = torch.arange(case.num_queries, device=DEVICE)[rows] + case.past
    last = torch.arange(k.shape[2], device=DEVICE) * config.compress_stride
    last += config.compress_block_size - 1
    seen = last <= position[:, None]
    grouped = q[:, :, rows].double().unflatten(1, (case.kv_heads, -1))
    logits = grouped @ k.double()[:, :, None].mT * case.scale
    p = logits.masked_fill(~seen, float("-inf")).softmax(-1).nan_to_num(nan=0.0)
    return oracle.block_scores(p.sum(2).cpu().numpy(), config, case.num_blocks, case.kv_heads)


BF16, FP16 = torch.bfloat16, torch.float16


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        Case(PAPER, 1, 4, 16, 16384, 0, head_dim=128, dtype=BF16),
        Case(PAPER, 1, 8, 4, 20001, 0, head_dim=128, dtype=BF16),
        Case(PAPER, 2, 16, 1, 8192, 0, head_dim=64, dtype=FP16),
        Case(WIDE, 1, 2, 12, 8192, 0, head_dim=192, dtype=BF16),
        Case(NARROW, 1, 2, 6, 8192, 0, head_dim=256, dtype=BF16),
        Case(PAPER, 1, 2, 4, 300_000, 0, head_dim=64, dtype=BF16),
        Case(PAPER, 3, 4, 16, 1, past=131_071, head_dim=128, dtype=BF16),
        Case(PAPER, 1, 1, 3, 700, past=9000, head_dim=80, dtype=FP16),
        Case(NSA_1B, 1, 2, 16, 16384, 0, head_dim=64, dtype=BF16),
        Case(NSA_1B, 2, 2, 16, 300, past=60_001, head_dim=64, dtype=BF16),
    ],
)
def test_long_sequences(case: Case) -> None:
    q, k = inputs(case)
    chosen = choice(case, q, k, None)
    size = min(8, case.num_queries)
    starts = torch.randint(case.num_queries - size + 1, (6,)).tolist()
    for start in {*starts, case.num_queries - size}:
        rows = slice(start, start + size)
        part = replace(case, num_queries=size, past=case.past + start)
        assert_best(part, chosen[:, :, rows], exact_rows(case, q, k, rows))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        Case(PAPER, 1, 8, 4, 8192, 0, head_dim=128, dtype=BF16),
        Case(PAPER, 1, 2, 4, 1000, past=40_001, head_dim=128, dtype=FP16),
        Case(PAPER, 2, 2, 1, 3000, past=30_000, head_dim=128, dtype=BF16),
        Case(PAPER, 1, 3, 3, 333, past=70_000, unused=5000, head_dim=128, dtype=BF16),
        Case(PAPER, 2, 2, 6, 301, past=9000, head_dim=128, dtype=FP16),
        Case(PAPER, 1, 4, 16, 4096, past=3000, head_dim=128, dtype=BF16),
        Case(PAPER, 1, 1, 32, 150, past=50_003, head_dim=128, dtype=BF16),
        Case(NSAConfig(16, 16, 64, 8), 1, 2, 4, 700, 9000, head_dim=128, dtype=BF16),
        Case(NSAConfig(num_selected_blocks=64), 1, 2, 4, 700, 50_000, head_dim=128, dtype=BF16),
        Case(NSAConfig(64, 32, 128, 20, 2, 3), 1, 1, 4, 700, 90_000, head_dim=128, dtype=FP16),
        Case(NSAConfig(num_selected_blocks=4), 2, 2, 4, 1500, 2000, 0, 128, True, BF16, 40),
    ],
)
def test_hopper_kernel(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gluon's kernel ran where the device is Hopper, and its choice is the oracle's."""
    pytest.importorskip("triton.experimental.gluon")
    from nsa_flex.fallback_kernels.topk import scores_sm90

    launched = []
    launch = scores_sm90.launch_scores
    monkeypatch.setattr(topk_config, "SM90_MIN_CTAS", 1)
    monkeypatch.setattr(
        scores_sm90, "launch_scores", lambda *args, **kw: launched.append(launch(*args, **kw))
    )
    q, k = inputs(case)
    chosen = choice(case, q, k, None)
    assert bool(launched) == (gluon_unsupported_reason(q.device) is None)
    if case.documents:
        assert_best(case, chosen, references(case, q, k)[1])
        return
    size = 16
    starts = torch.randint(case.num_queries - size + 1, (4,)).tolist()
    for start in {0, *starts, case.num_queries - size}:
        rows = slice(start, start + size)
        part = replace(case, num_queries=size, past=case.past + start, unused=0)
        assert_best(part, chosen[:, :, rows], exact_rows(case, q, k, rows))


@pytest.mark.gpu
def test_hopper_kernel_counts_nan_as_zero_and_keeps_ties_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(topk_config, "SM90_MIN_CTAS", 1)
    case = Case(PAPER, 1, 1, 4, 500, 40_000, head_dim=128, dtype=BF16)
    q, k = inputs(case)
    q[:, :, 30] = float("nan")
    k[:, :, 100:] = 0.0  # most scores are equal
    chosen = choice(case, q, k, None)
    monkeypatch.setattr(topk, "gluon_unsupported_reason", lambda device: "not asked for")
    torch.testing.assert_close(chosen, choice(case, q, k, None), rtol=0, atol=0)


@pytest.mark.gpu
def test_log_sum_exp_of_the_branch_gives_the_same() -> None:
    from nsa_flex.backends.branch import Branch
    from nsa_flex.dispatch import IMPLEMENTATIONS

    case = Case(PAPER, 1, 2, 4, 3000, 0, head_dim=128, dtype=BF16)
    q, k = inputs(case)
    rows = slice(2000, 2064)
    part = replace(case, num_queries=64, past=2000)
    scores = exact_rows(case, q, k, rows)
    for backend in ("sdpa", "fa2", "flex"):
        task = Branch(q, k, torch.randn_like(k), case.config, case.scale, need_lse=True)
        _, lse = IMPLEMENTATIONS[backend, "compressed"](task)
        assert lse is not None
        assert_best(part, choice(case, q, k, lse)[:, :, rows], scores)


@pytest.mark.large
@pytest.mark.gpu
def test_offsets_past_two_to_the_31() -> None:
    """Query of 2.2e9 elements; its last rows are what a 32-bit offset would miss."""
    case = Case(PAPER, 1, 2, 32, 140_000, 0, head_dim=256, dtype=BF16)
    q, k = inputs(case)
    assert q.numel() > 2**31
    rows = slice(case.num_queries - 8, case.num_queries)
    part = replace(case, num_queries=8, past=case.num_queries - 8)
    scores = exact_rows(case, q, k, rows)
    assert_best(part, choice(case, q, k, None)[:, :, rows], scores)


@pytest.mark.large
@pytest.mark.gpu
def test_few_blocks_of_queries_past_two_to_the_31() -> None:
    """As above, of documents, and with the heads of a group apart in memory."""
    case = Case(PAPER, 1, 2, 32, 140_000, 0, 0, 256, True, BF16, 30)
    q, k = inputs(case)
    q = q.contiguous()
    assert q.numel() > 2**31
    rows = slice(case.num_queries - 8, case.num_queries)
    part = replace(case, num_queries=8, past=case.num_queries - 8)
    _, scores = references(part, q[:, :, rows], k)
    assert_best(part, choice(case, q, k, None)[:, :, rows], scores)


@pytest.mark.gpu
def test_chunks_on_two_streams_choose_as_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager and as a CUDA graph; a chunk that read too early would see another one's scores."""
    monkeypatch.setattr(topk_config, "SM90_MIN_CTAS", 1)
    case = Case(PAPER, 1, 2, 4, 6000, 0, head_dim=128, dtype=BF16)
    q, k = inputs(case)
    want = choice(case, q, k, None)
    monkeypatch.setattr(topk_config, "SCORE_BYTES", 1 << 20)
    torch.testing.assert_close(choice(case, q, k, None), want, rtol=0, atol=0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = choice(case, q, k, None)
    for _ in range(3):
        captured.fill_(-7)
        graph.replay()
        torch.testing.assert_close(captured, want, rtol=0, atol=0)


@pytest.mark.gpu
def test_replays_as_a_cuda_graph_without_waiting_for_the_device() -> None:
    case = Case(PAPER, 1, 2, 8, 4096, 0, head_dim=128, dtype=BF16)
    q, k = inputs(case)
    choice(case, q, k, None)
    with no_synchronization():
        choice(case, q, k, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = choice(case, q, k, None)
    q.copy_(torch.randn_like(q))
    graph.replay()
    assert torch.equal(captured, choice(case, q, k, None))
