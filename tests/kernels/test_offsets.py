"""Queries at offsets, an int or one a batch row on the device, with documents and without.

The kernels of every branch and of the top-k selection against the float64 oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nsa_flex.backends.branch import Branch
from nsa_flex.config import NSAConfig
from reference import oracle
from reference.accuracy import assert_close, eager_attention, leaf, to_float64
from reference.interpreter import DEVICE, INTERPRETED, LOW_PRECISION, interpreted, kernels
from reference.modes import no_synchronization

pytest.importorskip("triton")
from nsa_flex.backends import triton as backend
from nsa_flex.fallback_kernels.selected import config as selected_plan
from nsa_flex.fallback_kernels.selected import interface as selected
from nsa_flex.fallback_kernels.selected.config import WORK_TILE_WORDS, SelectedPlan, index_words
from nsa_flex.fallback_kernels.topk.interface import select_topk_blocks

CONFIG = NSAConfig(
    compress_block_size=16,
    compress_stride=8,
    select_block_size=16,
    num_selected_blocks=4,
    window_size=20,
)
ROUNDING = 1e-5  # of float32 scores

test_kernels_under_the_interpreter = interpreted(__file__)


@pytest.fixture(autouse=True)
def _few_programs(
    forget_plans: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As many rows a tile in float32 as in other dtypes: the interpreter is slow by the CTA."""
    if INTERPRETED:
        monkeypatch.setattr(selected_plan, "FLOAT32_TILE_ROWS", selected_plan.TILE_ROWS)


@dataclass(frozen=True)
class Case:
    """Sizes of one call, and where the queries and their documents are."""

    queries: int
    keys: int
    offset: int | tuple[int, ...]  # one a batch row: the kernels get a tensor
    starts: np.ndarray | None = None  # (B, Sq)
    batch: int = 2
    kv_heads: int = 2
    group: int = 2
    dim: int = 32
    dtype: torch.dtype = torch.float32

    @property
    def scale(self) -> float:
        return self.dim**-0.5

    def branch(self, q: Tensor, k: Tensor, v: Tensor, blocks: Tensor | None = None) -> Branch:
        offsets = torch.tensor(self.offset, device=q.device).expand(self.batch)
        starts = None
        if self.starts is not None:
            starts = torch.from_numpy(self.starts).int().to(q.device)
        known = self.offset if isinstance(self.offset, int) else None
        return Branch(q, k, v, CONFIG, self.scale, offsets, known, starts, blocks, True)

    def leaf(self, heads: int, tokens: int) -> Tensor:
        return leaf((self.batch, heads, tokens, self.dim), self.dtype, DEVICE)


def document_starts(rng: np.random.Generator, case: Case) -> np.ndarray:
    """Documents of random lengths, each from a multiple of the block size on."""
    size = CONFIG.select_block_size
    starts = np.zeros((case.batch, case.queries), np.int64)
    position = np.broadcast_to(oracle.positions(case.queries, case.offset), starts.shape)
    for row in range(case.batch):
        edges = np.flatnonzero(rng.random(-(-case.keys // size)) < 0.3) * size
        edges = np.concatenate([[0], edges])
        starts[row] = edges[np.searchsorted(edges, position[row], side="right") - 1]
    return starts


def check_branch(
    name: str, case: Case, q: Tensor, kv: tuple[Tensor, Tensor], mask: np.ndarray, blocks: Tensor
) -> Tensor:
    """Values and gradients of one branch; returns its log-sum-exp."""
    run = getattr(backend, name)
    out, lse = run(case.branch(q, *kv, blocks if name == "selected" else None))
    grad_out = torch.randn_like(out)
    got = [out, *torch.autograd.grad(out, (q, *kv), grad_out)]
    arrays = [to_float64(x) for x in (q, *kv)]
    want_out, want_lse, _ = oracle.branch(*arrays, mask, case.scale)
    want = [
        want_out,
        *oracle.branch_backward(*arrays, mask, case.scale, to_float64(grad_out)),
    ]
    plain: list[Tensor | None] = [None] * 4
    if case.dtype != torch.float32:
        eager = eager_attention(q, *kv, torch.from_numpy(mask).to(DEVICE), case.scale)
        plain = [eager, *torch.autograd.grad(eager, (q, *kv), grad_out)]
    least = 0.1 * float(grad_out.float().norm())
    parts = ("output", "gradient of q", "gradient of k", "gradient of v")
    for part, ours, exact, theirs in zip(parts, got, want, plain, strict=True):
        bound = 0.0 if part == "output" else least
        assert_close(f"{name}: {part}", ours, exact, theirs, case.dtype, least=bound)
    assert_close(f"{name}: log-sum-exp", lse, want_lse, None, torch.float32)
    return lse


def check(case: Case) -> None:
    """All branches and the selection between them; float32, where a wrong key shows best."""
    q = case.leaf(case.kv_heads * case.group, case.queries)
    k, v = (case.leaf(case.kv_heads, case.keys) for _ in range(2))
    count = max(1, CONFIG.num_compressed_blocks(case.keys))
    ck, cv = (case.leaf(case.kv_heads, count) for _ in range(2))
    sizes = (case.queries, case.keys)
    where = (CONFIG, case.offset, case.starts)

    mask = oracle.compressed_mask(*sizes, count, *where)
    nothing = torch.empty(0)
    lse = check_branch("compressed", case, q, (ck, cv), mask, nothing)
    p = oracle.branch(*(to_float64(x) for x in (q, ck, cv)), mask, case.scale)[2]
    num_blocks = CONFIG.num_select_blocks(case.keys)
    scores = oracle.block_scores(p, CONFIG, num_blocks, case.kv_heads)
    task = case.branch(q, k, v)
    positions = torch.arange(case.queries, device=DEVICE, dtype=torch.int32)
    assert task.offset is not None
    blocks = select_topk_blocks(
        *(q, ck, lse.detach(), positions + task.offset.int()[:, None], task.document_start),
        config=CONFIG,
        scale=case.scale,
        num_blocks=num_blocks,
    )
    assert oracle.choice_excess(blocks.cpu().numpy(), scores, *where) <= ROUNDING
    mask = oracle.selected_mask(blocks.cpu().numpy(), case.keys, *where)
    check_branch("selected", case, q, (k, v), mask, blocks)
    check_branch("sliding", case, q, (k, v), oracle.sliding_mask(*sizes, *where), nothing)


@kernels
@settings(max_examples=3 if INTERPRETED else 30, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    queries=st.integers(1, 50),
    others=st.integers(0, 100),
    batch=st.integers(1, 2),
    a_row=st.booleans(),
    documents=st.booleans(),
    unions=st.booleans(),
)
def test_any_offsets_and_packings(
    seed: int, queries: int, others: int, batch: int, a_row: bool, documents: bool, unions: bool
) -> None:
    rng = np.random.default_rng(seed)
    places = tuple(int(x) for x in rng.integers(0, others + 1, batch))
    case = Case(queries, queries + others, places if a_row else places[0], batch=batch)
    if documents:
        case = Case(*(queries, case.keys, case.offset), document_starts(rng, case), batch)
    with pytest.MonkeyPatch.context() as patch:
        if not unions:
            patch.setattr(selected_plan, "UNION_LIMIT", 0)
        selected_plan._kept.cache_clear()
        check(case)
    selected_plan._kept.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("group", "dtype"),
    [*((4, each) for each in LOW_PRECISION), (1, LOW_PRECISION[0]), (16, LOW_PRECISION[-1])],
)
@pytest.mark.parametrize("documents", [False, True])
def test_the_kernels_for_hopper(dtype: torch.dtype, group: int, documents: bool) -> None:
    """D 128 and blocks of 64 keys go to them: the selected branch alone, random blocks."""
    config = NSAConfig()
    case = Case(700, 2000, (0, 1, 1300), batch=3, group=group, dim=128, dtype=dtype)
    rng = np.random.default_rng(3)
    starts = None
    if documents:
        position = oracle.positions(case.queries, case.offset)
        starts = position // 960 * 960  # 15 blocks: it begins in the midst of any tile
    shape = (case.batch, case.kv_heads, case.queries, config.num_select_blocks(case.keys))
    blocks = torch.from_numpy(
        oracle.choose_all(rng.random(shape), config, case.offset, starts)
    ).int()
    mask = oracle.selected_mask(blocks.numpy(), case.keys, config, case.offset, starts)
    q = case.leaf(case.kv_heads * group, case.queries)
    k, v = (case.leaf(case.kv_heads, case.keys) for _ in range(2))
    offsets = torch.tensor(case.offset, device=DEVICE)
    seen = torch.from_numpy(mask).to(DEVICE)
    for limit in (0, selected_plan.UNION_LIMIT):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(selected_plan, "UNION_LIMIT", limit)
            selected_plan._kept.cache_clear()
            out, _ = attend(q, k, v, blocks.to(DEVICE), offsets, config)
            grad_out = torch.randn_like(out)
            got = [out, *torch.autograd.grad(out, (q, k, v), grad_out)]
        arrays = [to_float64(x) for x in (q, k, v)]
        want = [oracle.branch(*arrays, mask, case.scale)[0]]
        want += oracle.branch_backward(*arrays, mask, case.scale, to_float64(grad_out))
        plain = eager_attention(q, k, v, seen, case.scale)
        eager = [plain, *torch.autograd.grad(plain, (q, k, v), grad_out)]
        for name, ours, exact, theirs in zip("oqkv", got, want, eager, strict=True):
            assert_close(name, ours, exact, theirs, dtype)
    selected_plan._kept.cache_clear()


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    query_offset: int | Tensor,
    config: NSAConfig = CONFIG,
    *,
    deterministic: bool = True,
) -> tuple[Tensor, Tensor]:
    """The selected branch alone."""
    return selected.selected_attention(
        *(q, k, v, blocks),
        block_size=config.select_block_size,
        num_initial_blocks=config.num_initial_blocks,
        num_local_blocks=config.num_local_blocks,
        scale=q.shape[-1] ** -0.5,
        query_offset=query_offset,
        deterministic=deterministic,
    )


def problem(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value and random blocks."""
    scores = np.random.default_rng(1).random(
        (case.batch, case.kv_heads, case.queries, CONFIG.num_select_blocks(case.keys))
    )
    blocks = torch.from_numpy(oracle.choose_all(scores, CONFIG, case.offset)).int().to(DEVICE)
    q = case.leaf(case.kv_heads * case.group, case.queries)
    return q, case.leaf(case.kv_heads, case.keys), case.leaf(case.kv_heads, case.keys), blocks


@kernels
@pytest.mark.parametrize(("dtype", "deterministic"), [(torch.int32, False), (torch.int64, True)])
def test_an_offset_a_row_gives_what_the_row_alone_gives(
    dtype: torch.dtype, deterministic: bool
) -> None:
    case = Case(21, 90, (0, 43, 69), batch=3, kv_heads=1)
    q, k, v, blocks = problem(case)
    grad_out = torch.randn_like(q)
    offsets = torch.tensor(case.offset, device=DEVICE, dtype=dtype)
    together = attend(q, k, v, blocks, offsets, deterministic=deterministic)
    gradients = torch.autograd.grad(together[0], (q, k, v), grad_out)
    for row, offset in enumerate(case.offset):
        own = slice(row, row + 1)
        tensors = [x[own].detach().requires_grad_() for x in (q, k, v)]
        alone = attend(*tensors, blocks[own], offset, deterministic=deterministic)
        of_row = torch.autograd.grad(alone[0], tensors, grad_out[own])
        for x, y in zip((*together, *gradients), (*alone, *of_row), strict=True):
            torch.testing.assert_close(x[own], y, rtol=1e-5, atol=1e-5)


@kernels
@pytest.mark.parametrize("limit", [0, 13])
def test_keys_after_the_last_query_may_hold_anything(
    limit: int, monkeypatch: pytest.MonkeyPatch, forget_plans: Callable[[], None]
) -> None:
    """A cache that is not yet full: of each row other keys are the last."""
    monkeypatch.setattr(selected_plan, "UNION_LIMIT", limit)
    forget_plans()
    case = Case(21, 110, (0, 43, 69), batch=3, kv_heads=1)
    q, k, v, blocks = problem(case)
    count = CONFIG.num_compressed_blocks(case.keys)
    ck, cv = (case.leaf(case.kv_heads, count) for _ in range(2))
    last = torch.tensor(case.offset, device=DEVICE)[:, None, None, None] + case.queries
    after = torch.arange(case.keys, device=DEVICE)[:, None] >= last
    ends = torch.arange(count, device=DEVICE) * CONFIG.compress_stride
    unfinished = (ends + CONFIG.compress_block_size)[:, None] > last
    grad_out = torch.randn_like(q)

    def run(name: str, keys: Tensor, values: Tensor) -> list[Tensor]:
        task = case.branch(q, keys, values, blocks if name == "selected" else None)
        out, _ = getattr(backend, name)(task)
        return [out, *torch.autograd.grad(out, (q, keys, values), grad_out)]

    for name, keys, values, hidden in (
        ("compressed", ck, cv, unfinished),
        ("selected", k, v, after),
        ("sliding", k, v, after),
    ):
        filled = [
            x.detach().masked_fill(hidden, float("nan")).requires_grad_() for x in (keys, values)
        ]
        for x, y in zip(run(name, *filled), run(name, keys, values), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@kernels
def test_an_offset_outside_of_the_keys_reads_nothing_outside() -> None:
    case = Case(21, 90, (0, 69), batch=2)
    q, k, v, blocks = problem(case)
    want, _ = attend(q, k, v, blocks, torch.tensor(case.offset, device=DEVICE))
    got, _ = attend(q, k, v, blocks, torch.tensor((-(10**6), 10**6), device=DEVICE))
    assert torch.equal(got, want)


@kernels
@pytest.mark.exhaustive
def test_operators_obey_the_library_rules() -> None:
    case = Case(3, 40, (18, 0), group=1)
    q, k, v, blocks = problem(case)
    offsets = torch.tensor(case.offset, device=DEVICE, dtype=torch.int32)
    offsets = offsets[:, None].expand(-1, case.kv_heads).contiguous()
    options = (16, 1, 2, case.scale, 0, True)
    for keep_index in (False, True):
        arguments = (q, k, v, blocks, *options, keep_index, offsets)
        torch.library.opcheck(selected.selected_forward, arguments)
        results = selected.selected_forward(*arguments)
        out, lse, index = (x.detach() for x in results)
        tensors = (q.detach(), k.detach(), v.detach(), blocks, index, out, lse)
        of_backward = (*tensors, torch.randn_like(out), None, *options, offsets)
        torch.library.opcheck(selected.selected_backward, of_backward)


@kernels
def test_one_graph_for_any_offset() -> None:
    def loss(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, offsets: Tensor) -> Tensor:
        out, lse = attend(2 * q, k, v, blocks, offsets)
        return (out * out).sum() + lse.sum()

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    for offset in ((0, 1), (30, 18), (37, 0)):
        case = Case(3, 40, offset, group=1)
        *tensors, blocks = problem(case)
        offsets = torch.tensor(offset, device=DEVICE)
        want = torch.autograd.grad(loss(*tensors, blocks, offsets), tensors)
        got = torch.autograd.grad(compiled(*tensors, blocks, offsets), tensors)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)
    assert counter.frame_count == 1


@kernels
def test_the_index_fits_whatever_is_predicted_of_it(forget_plans: Callable[[], None]) -> None:
    for batch, kv_heads, num_queries, num_keys, group, slots in (
        (1, 1, 1, 1, 1, 1),
        (3, 2, 700, 1001, 1, 16),
        (2, 4, 4096, 65536, 16, 16),
        (2, 8, 20001, 20001, 4, 64),
        (7, 1, 1000, 9000, 64, 3),
    ):
        shape = (batch, kv_heads * group, num_queries, 128)
        q = torch.empty(shape, device="meta", dtype=torch.bfloat16)
        k = torch.empty((batch, kv_heads, num_keys, 128), device="meta")
        blocks = torch.empty((batch, kv_heads, num_queries, slots), device="meta")
        plan = SelectedPlan.of(q, k, k, blocks.shape[3], 64, 1, 2, 0, offset_tensor=True)
        tiles = plan.num_chunks * plan.work_tiles_per_chunk(plan.work_tile_tokens)
        needed = blocks.numel() + batch * kv_heads * num_queries + WORK_TILE_WORDS * tiles
        assert needed <= index_words(q, k, blocks, 64, num_keys - num_queries)


@kernels
@pytest.mark.parametrize(("heads", "kv_heads"), [(64, 4), (32, 8)])
def test_an_offset_within_a_block_makes_no_more_chunks(
    heads: int, kv_heads: int, forget_plans: Callable[[], None]
) -> None:
    forget_plans()
    q = torch.empty((1, heads, 4096, 128), device="meta", dtype=torch.bfloat16)
    k = torch.empty((1, kv_heads, 65536, 128), device="meta")
    blocks = torch.empty((1, kv_heads, 4096, 16), device="meta")
    aligned, *others = (
        SelectedPlan.of(
            *(q, k, k, blocks.shape[3], 64, 1, 2, offset),
            differentiable=False,
            offset_tensor=on_device,
        )
        for offset, on_device in ((61440, False), (61439, False), (0, True))
    )
    for plan in others:
        assert plan.num_chunks == aligned.num_chunks


@kernels
@pytest.mark.parametrize(
    ("offset", "queries", "message"),
    [
        (torch.zeros(2), 21, r"int or int \(2,\), got torch.float32 \(2,\)"),
        (torch.zeros(3, dtype=torch.int64), 21, r"int or int \(2,\), got torch.int64 \(3,\)"),
        (torch.zeros(2, dtype=torch.int64), 91, "query has 91 tokens, key only 90"),
    ],
)
def test_refused_offsets(offset: Tensor, queries: int, message: str) -> None:
    q = torch.zeros(2, 4, queries, 16, device=DEVICE)
    k = torch.zeros(2, 2, 90, 16, device=DEVICE)
    blocks = torch.zeros(2, 2, queries, 4, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match=message):
        attend(q, k, k, blocks, offset.to(DEVICE))


@pytest.mark.gpu
def test_replays_as_a_cuda_graph_with_other_offsets() -> None:
    """The host waits for nothing, and a captured call takes the offsets of the replay."""
    case = Case(700, 4000, (0, 3300), dim=64, dtype=torch.bfloat16)
    q, k, v, blocks = problem(case)
    offsets = torch.tensor(case.offset, device=DEVICE)
    grad_out = torch.randn_like(q)

    def step() -> tuple[Tensor, ...]:
        out, _ = attend(q, k, v, blocks, offsets)
        return (out, *torch.autograd.grad(out, (q, k, v), grad_out))

    step()
    with no_synchronization():
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    offsets.copy_(torch.tensor((1234, 77)))
    blocks.copy_(problem(Case(700, 4000, (1234, 77)))[3])
    graph.replay()
    for a, b in zip(captured, step(), strict=True):
        assert torch.equal(a, b)
