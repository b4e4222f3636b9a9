"""The Triton kernels of selected attention against the float64 oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from nsa_flex.config import NSAConfig
from reference import oracle
from reference.interpreter import (
    DEVICE,
    INTERPRETED,
    LOW_PRECISION,
    interpreted,
    kernels,
    only_outside,
)
from reference.modes import no_synchronization

pytest.importorskip("triton")
from nsa_flex.fallback_kernels.common.bwd_preprocess import softmax_stats
from nsa_flex.fallback_kernels.selected import config as selected_plan
from nsa_flex.fallback_kernels.selected import interface as selected
from nsa_flex.fallback_kernels.selected.block_union import build_block_unions
from nsa_flex.fallback_kernels.selected.bwd import add_gradients
from nsa_flex.fallback_kernels.selected.config import WORK_TILE_WORDS, SelectedPlan, index_words
from nsa_flex.fallback_kernels.selected.fwd_partial import forward
from nsa_flex.fallback_kernels.selected.interface import selected_attention
from nsa_flex.fallback_kernels.selected.prepare import Selection, prepare

test_kernels_under_the_interpreter = interpreted(__file__)


@pytest.fixture(autouse=True)
def _limits(
    forget_plans: Callable[[], None],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lists alone and large tiles, unless a test asks for others; no plan of another test.

    Short sequences would mostly go by unions. The interpreter takes as long for a program
    whatever it computes: float32 has few programs there, as many rows a tile as the other dtypes.
    """
    if "with_unions" not in request.fixturenames:
        monkeypatch.setattr(selected_plan, "UNION_LIMIT", 0)
    if INTERPRETED and "small_tiles" not in request.fixturenames:
        monkeypatch.setattr(selected_plan, "FLOAT32_TILE_ROWS", selected_plan.TILE_ROWS)


@pytest.fixture
def with_unions() -> None:
    """Leaves the choice between lists and unions to the device."""


@pytest.fixture
def small_tiles() -> None:
    """Tiles of float32 as on a GPU."""


@dataclass(frozen=True)
class Case:
    """Sizes of one call; see `inputs`."""

    batch: int = 1
    kv_heads: int = 1
    group: int = 4
    num_queries: int = 21
    num_keys: int | None = None
    offset: int = 43  # so that every query has blocks to choose freely
    head_dim: int = 32
    value_dim: int = 32
    block_size: int = 16
    num_slots: int = 4
    initial: int = 1
    local: int = 2
    dtype: torch.dtype = torch.float32

    @property
    def keys(self) -> int:
        return self.num_keys or self.offset + self.num_queries

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def config(self) -> NSAConfig:
        return NSAConfig(
            compress_block_size=16,
            compress_stride=16,
            select_block_size=self.block_size,
            num_selected_blocks=max(self.num_slots, self.initial + self.local),
            num_initial_blocks=self.initial,
            num_local_blocks=self.local,
        )

    def owns(self) -> np.ndarray:
        """Own block of every query."""
        return (np.arange(self.num_queries) + self.offset) // self.block_size


def choices(case: Case, forced: bool = True) -> Tensor:
    """Random blocks (B, Hkv, Sq, n) on the CPU.

    Without `forced` any subset of the past may come, the empty one too.
    """
    rng = np.random.default_rng(torch.randint(2**31, (1,)).item())
    shape = (case.batch, case.kv_heads, case.num_queries, case.num_slots)
    blocks = np.full(shape, -1, np.int32)
    for b, h, i in np.ndindex(shape[:3]):
        own = int(case.owns()[i])
        musts = oracle.forced_blocks(i + case.offset, case.config) if forced else set()
        others = [j for j in rng.permutation(own + 1).tolist() if j not in musts]
        size = case.num_slots if forced else int(rng.integers(0, case.num_slots + 1))
        chosen = sorted([*musts, *others][:size])
        blocks[b, h, i, : len(chosen)] = chosen
    return torch.from_numpy(blocks)


def inputs(case: Case, device: str = DEVICE) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value with memory (B, S, H, D), ready for gradients."""

    def new(tokens: int, heads: int, width: int) -> Tensor:
        x = torch.randn(case.batch, tokens, heads, width, device=device, dtype=torch.float32)
        return x.to(case.dtype).transpose(1, 2).requires_grad_()

    return (
        new(case.num_queries, case.kv_heads * case.group, case.head_dim),
        new(case.keys, case.kv_heads, case.head_dim),
        new(case.keys, case.kv_heads, case.value_dim),
    )


def plan_of(case: Case, q: Tensor, k: Tensor, v: Tensor, blocks: Tensor) -> SelectedPlan:
    counts = (case.block_size, case.initial, case.local, case.offset)
    return SelectedPlan.of(q, k, v, blocks.shape[3], *counts)


def attend(
    case: Case, q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, deterministic: bool = False
) -> tuple[Tensor, Tensor]:
    return selected_attention(
        q,
        k,
        v,
        blocks.to(q.device),
        block_size=case.block_size,
        num_initial_blocks=case.initial,
        num_local_blocks=case.local,
        scale=case.scale,
        query_offset=case.offset,
        deterministic=deterministic,
    )


def eager(case: Case, q: Tensor, k: Tensor, v: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The same in plain PyTorch operations, in the inputs' dtype."""
    mask = oracle.selected_mask(blocks.numpy(), case.keys, case.config, case.offset)
    seen = torch.from_numpy(mask).to(q.device).repeat_interleave(case.group, 1)
    scores = case.scale * (q @ k.repeat_interleave(case.group, 1).transpose(-1, -2))
    scores = scores.masked_fill(~seen, float("-inf"))
    p = scores.softmax(-1).masked_fill(~seen.any(-1, keepdim=True), 0.0)
    return p @ v.repeat_interleave(case.group, 1), scores.logsumexp(-1)


NAMES = ("out", "lse", "grad_query", "grad_key", "grad_value")


def results(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor
) -> list[np.ndarray]:
    gradients = torch.autograd.grad(out, (q, k, v), grad_out)
    return [x.detach().double().cpu().numpy() for x in (out, lse, *gradients)]


def wanted(
    case: Case, q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, grad_out: Tensor
) -> list[np.ndarray]:
    """The oracle's output, log-sum-exp and gradients."""
    mask = oracle.selected_mask(blocks.numpy(), case.keys, case.config, case.offset)
    arrays = [x.detach().double().cpu().numpy() for x in (q, k, v)]
    out, lse, _ = oracle.branch(*arrays, mask, case.scale)
    upstream = grad_out.double().cpu().numpy()
    return [out, lse, *oracle.branch_backward(*arrays, mask, case.scale, upstream)]


def distances(got: list[np.ndarray], want: list[np.ndarray]) -> dict[str, float]:
    return {name: oracle.relative_error(a, b) for name, a, b in zip(NAMES, got, want, strict=True)}


def check(case: Case, blocks: Tensor, deterministic: bool = False) -> None:
    """Values and gradients against the oracle, by the error rule of the project."""
    q, k, v = inputs(case)
    out, lse = attend(case, q, k, v, blocks, deterministic)
    grad_out = torch.randn(out.shape, device=out.device).to(out.dtype)
    want = wanted(case, q, k, v, blocks, grad_out)
    errors = distances(results(q, k, v, out, lse, grad_out), want)
    if case.dtype == torch.float32:
        allowed = dict.fromkeys(NAMES, 1e-5)
    else:
        plain = results(q, k, v, *eager(case, q, k, v, blocks), grad_out)
        # Eager's softmax leaves rows without keys NaN before they are zeroed: not its error.
        allowed = {name: 2 * error for name, error in distances(plain, want).items()}
    assert out.dtype == case.dtype
    assert lse.dtype == torch.float32
    for name in NAMES:
        assert errors[name] <= allowed[name], f"{name}: {errors[name]} > {allowed[name]} {case}"


@kernels
@pytest.mark.kept(lambda group: group in (1, 3, 16))
@pytest.mark.parametrize("group", [1, 2, 3, 4, 6, 8, 12, 16, 32])
def test_group_sizes(group: int) -> None:
    case = Case(group=group)
    check(case, choices(case))


@kernels
@pytest.mark.parametrize(("head_dim", "value_dim"), [(16, 8), (80, 80), (96, 64), (192, 128)])
def test_head_dims(head_dim: int, value_dim: int) -> None:
    case = Case(head_dim=head_dim, value_dim=value_dim)
    check(case, choices(case))


@kernels
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_block_sizes(block_size: int) -> None:
    """Five blocks, the last of them partial."""
    tokens = block_size + 3
    case = Case(block_size=block_size, num_queries=tokens, offset=3 * block_size, group=2)
    check(case, choices(case))


@kernels
@pytest.mark.parametrize("dtype", LOW_PRECISION)
@pytest.mark.parametrize("group", [1, 4])
def test_low_precision(dtype: torch.dtype, group: int, with_unions: None) -> None:
    case = Case(dtype=dtype, group=group, kv_heads=2)
    check(case, choices(case))


@kernels
@pytest.mark.parametrize("dtype", LOW_PRECISION)
@pytest.mark.parametrize(("block_size", "head_dim"), [(16, 64), (128, 128)])
def test_low_precision_at_the_sizes_of_checkpoints(
    dtype: torch.dtype, block_size: int, head_dim: int
) -> None:
    """NSA-1B's and MiniMax-M3's: 16 query heads a KV head, 16 blocks, the own alone forced."""
    case = Case(
        group=16, num_queries=12, offset=17 * block_size + 5, head_dim=head_dim,
        value_dim=head_dim, block_size=block_size, num_slots=16, initial=0, local=1, dtype=dtype,
    )  # fmt: skip
    check(case, choices(case))


@kernels
@pytest.mark.parametrize(("initial", "local", "num_slots"), [(0, 1, 1), (2, 1, 4), (1, 3, 5)])
def test_counts_of_forced_blocks(initial: int, local: int, num_slots: int) -> None:
    case = Case(initial=initial, local=local, num_slots=num_slots, num_queries=30)
    check(case, choices(case))


@kernels
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.kept(lambda group, deterministic: group == 2 and deterministic)
@pytest.mark.parametrize(("group", "num_slots"), [(1, 65), (16, 96), (2, 128)])
def test_many_slots(group: int, num_slots: int, deterministic: bool, with_unions: None) -> None:
    """InfLLM-V2's 96 blocks, and all 128 of a document that it attends densely."""
    offset = 16 * num_slots + 40 * (num_slots < 128) - 13
    case = Case(
        group=group, num_slots=num_slots, local=33, num_queries=13, offset=offset, head_dim=16,
        value_dim=16,
    )  # fmt: skip
    check(case, choices(case), deterministic)


@kernels
def test_more_forced_blocks_than_dense_candidates() -> None:
    case = Case(initial=9, local=10, num_slots=21, num_queries=30, offset=305, group=1)
    check(case, choices(case))


@kernels
@pytest.mark.parametrize("deterministic", [False, True])
def test_any_subset_may_be_chosen(deterministic: bool, small_tiles: None) -> None:
    """Forced blocks may be missing, and so may all: only `blocks` decides."""
    case = Case(batch=2, num_queries=30, group=2)
    blocks = choices(case, forced=False)
    blocks[:, :, 10:20] = -1
    check(case, blocks, deterministic)


@kernels
def test_no_blocks_at_all(with_unions: None) -> None:
    case = Case()
    q, k, v = inputs(case)
    blocks = torch.full((1, 1, case.num_queries, case.num_slots), -1, dtype=torch.int32)
    out, lse = attend(case, q, k, v, blocks)
    out.sum().backward()
    assert (out == 0).all()
    assert (lse == float("-inf")).all()
    for x in (q, k, v):
        assert x.grad is not None
        assert (x.grad == 0).all()


def filled(case: Case, first: np.ndarray) -> Tensor:
    """Per query the block `first` (-1: none), and nothing else."""
    blocks = torch.full(
        (case.batch, case.kv_heads, case.num_queries, case.num_slots), -1, dtype=torch.int32
    )
    blocks[..., 0] = torch.from_numpy(first.astype(np.int32))
    return blocks


@kernels
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("pattern", ["same", "one", "disjoint"])
def test_adversarial_choices(pattern: str, deterministic: bool) -> None:
    """Lists as long, as unequal and as short as they get."""
    num_queries = 140 if pattern == "one" else 60  # more than an item holds
    case = Case(num_queries=num_queries, initial=0, local=1, group=2, num_slots=3)
    own = case.owns()
    if pattern == "one":  # every query that may picks block 1
        blocks = filled(case, np.where(own >= 1, 1, -1))
    elif pattern == "disjoint":  # neighbours share no block
        blocks = filled(case, np.arange(case.num_queries) % (own + 1))
    else:  # every query picks 0, 2 and 4 if it may
        blocks = torch.stack([filled(case, np.where(own >= j, j, -1))[..., 0] for j in (0, 2, 4)])
        blocks = blocks.movedim(0, -1).contiguous()
    check(case, blocks, deterministic)


def stretches(case: Case) -> Tensor:
    """Free choices by quarters of the queries or by tiles: the same, all others, none, any."""
    quarter = max(case.num_queries // 4, min(64, case.num_queries // 2) if case.group == 1 else 1)
    blocks = choices(case, forced=False)
    blocks[:, :, : 3 * quarter] = -1
    blocks[:, :, :quarter, :2] = torch.tensor([3, 1], dtype=torch.int32)
    free = torch.from_numpy(case.owns()) - case.local - case.initial + 1
    different = case.initial + torch.arange(case.num_queries) % free
    blocks[:, :, quarter : 2 * quarter, 0] = different[quarter : 2 * quarter].int()
    return blocks


def union_of(case: Case, blocks: Tensor, queries: range) -> dict[int, set[int]]:
    """The blocks before the own one that some queries chose, and the places of those queries."""
    union: dict[int, set[int]] = {}
    for place, query in enumerate(queries):
        for block in blocks[query].tolist() if 0 <= query < case.num_queries else []:
            if 0 <= block < case.owns()[query]:
                union.setdefault(block, set()).add(place)
    return union


@kernels
@pytest.mark.kept(lambda case: case.group != 16)
@pytest.mark.parametrize(
    "case",
    [
        Case(group=1, num_queries=100, offset=400, block_size=32),
        Case(group=1, num_queries=128, offset=448, block_size=64, dtype=torch.float16),
        Case(group=3, num_queries=64, offset=133),
        Case(group=16, num_queries=20, offset=140, dtype=torch.float16),
        Case(group=32, num_queries=12, offset=100),
    ],
)
def test_union_tiles(case: Case, with_unions: None) -> None:
    """Tiles of both kinds; where the device made a union, it is the union."""
    blocks = stretches(case)
    check(case, blocks)
    plan = plan_of(case, *inputs(case), blocks)
    unions = build_block_unions(plan, blocks.to(DEVICE))
    sizes = unions.sizes.reshape(case.batch * case.kv_heads, -1).tolist()
    united = 0
    for head, tile in np.ndindex(len(sizes), len(sizes[0])):
        first = plan.base + tile * plan.combine_tokens - case.offset
        want = union_of(case, blocks[0, head], range(first, first + plan.combine_tokens))
        size, row = sizes[head][tile], head * len(sizes[0]) + tile
        if size < 0:
            continue
        united += 1
        assert unions.blocks[row, :size].tolist() == sorted(want)
        for block, words in zip(sorted(want), unions.masks[row].tolist(), strict=False):
            bits = {32 * w + b for w, word in enumerate(words) for b in range(32) if word >> b & 1}
            assert bits == want[block]
    assert united > 0
    if plan.combine_tokens >= 16:
        assert any(size < 0 for row in sizes for size in row)


def alike(case: Case, one: list[int], other: list[int]) -> bool:
    """Whether two queries of a tile share a quarter of what the other chose, forced apart."""
    count = len(other)
    shared = len(set(one) & set(other))
    return 4 * shared >= count + 3 * min(count, case.initial + case.local)


@kernels
@pytest.mark.kept(lambda group, num_slots: (group, num_slots) in ((1, 32), (16, 16)))
@pytest.mark.parametrize(
    ("heads", "group", "num_slots", "num_queries"),
    [(2, 1, 16, 150), (1, 1, 32, 150), (2, 3, 10, 100), (2, 4, 16, 100), (2, 16, 16, 33)],
)
def test_which_tiles_go_by_unions(
    heads: int, group: int, num_slots: int, num_queries: int, with_unions: None
) -> None:
    """All those that cost no more than their budget, if the queries compared first are alike."""
    case = Case(
        1, heads, group, num_queries, None, 9000, 16, 16, 64, num_slots, dtype=torch.bfloat16
    )
    blocks = torch.full((1, heads, num_queries, num_slots), -1, dtype=torch.int32)
    plan = plan_of(case, *inputs(case), blocks)
    tokens, limit = plan.combine_tokens, selected_plan.UNION_LIMIT
    firsts = range(plan.base - case.offset, plan.base - case.offset + plan.span, tokens)
    tiles = [(head, range(first, first + tokens)) for head in range(heads) for first in firsts]
    inside = [[x for x in tile if 0 <= x < num_queries] for _, tile in tiles]
    rng = np.random.default_rng(torch.randint(2**31, (1,)).item())
    most = limit * num_slots // 4
    for number, (head, _) in enumerate(tiles):
        # The union has about as many blocks as it may, half of the choices the same. Each head has
        # a tile of the least union, and one where no query chooses what the next does.
        place = number % len(firsts)
        disjoint = place == len(firsts) // 2
        size = num_slots if place == 0 else int(rng.integers(most - 10, most + 6))
        pool = rng.permutation(130)[: 130 if disjoint else size]
        same = 0 if disjoint else num_slots // 2
        for query in inside[number]:
            pool[same:] = np.roll(pool, num_slots) if disjoint else rng.permutation(pool[same:])
            chosen = np.sort(pool[: rng.integers(num_slots - 2, num_slots + 1)])
            blocks[0, head, query, : len(chosen)] = torch.from_numpy(chosen)
    sizes = build_block_unions(plan, blocks.to(DEVICE)).sizes.tolist()
    united = 0
    for (head, tile), some, size in zip(tiles, inside, sizes, strict=True):
        chosen = [[x for x in row.tolist() if x >= 0] for row in blocks[0, head]]
        union = union_of(case, blocks[0, head], tile)
        free = sum(x >= case.initial for query in some for x in chosen[query])
        cost = 4 * len(some) * (len(union) - (case.initial + case.local - 1))
        worth = cost <= limit * free
        if tokens > 4:
            ends = [min(max(tile[x], 0), num_queries - 1) for x in (tokens // 2, -1)]
            worth = worth and alike(case, chosen[ends[0]], chosen[ends[1]])
        assert size == (len(union) if worth else -1)
        united += worth
    assert 0 < united < len(sizes)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[SelectedPlan]:
    """Plans of the calls whose unions the kernel for Hopper took."""
    from nsa_flex.fallback_kernels.selected import fwd_union_sm90

    taken: list[SelectedPlan] = []
    launch = fwd_union_sm90.launch

    def spy(selection: Selection, *results: Tensor) -> None:
        taken.append(selection.plan)
        launch(selection, *results)

    monkeypatch.setattr(fwd_union_sm90, "launch", spy)
    return taken


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("group", "head_dim", "value_dim", "dtype"),
    [(4, 128, 128, torch.bfloat16), (3, 80, 96, torch.float16), (1, 64, 128, torch.bfloat16)],
)
def test_unions_on_hopper(
    group: int,
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    with_unions: None,
    launches: list[SelectedPlan],
) -> None:
    """Tiles of 64 rows and 16 bits go by the kernel for Hopper, there and only there."""
    case = Case(2, 2, group, 150, 533, 333, head_dim, value_dim, 64, 8, dtype=dtype)
    blocks = stretches(case)
    check(case, blocks)
    on_hopper = torch.cuda.get_device_capability()[0] == 9
    assert len(launches) == on_hopper
    q, k, v = (x.detach() for x in inputs(case))
    out, lse = attend(case, q, k, v, blocks)
    k[:, :, 483:] = v[:, :, 483:] = float("nan")  # nobody sees them
    for a, b in zip(attend(case, q, k, v, blocks), (out, lse), strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", LOW_PRECISION)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 6, 8, 12, 16, 32])
def test_partial_results_on_hopper(
    group: int,
    dtype: torch.dtype,
    forget_plans: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tiles of 64 rows of 128 numbers go by the kernel for Hopper, there and only there."""
    case = Case(2, 2, group, 150, 533, 333, 128, 128, 64, 8, dtype=dtype)
    blocks = choices(case, forced=group != 8)
    check(case, blocks)
    q, k, v = (x.detach() for x in inputs(case))
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        want = attend(case, q, k, v, blocks)
    on_hopper = torch.cuda.get_device_capability()[0] == 9
    launched = {"selected_fwd_partial_kernel", "selected_fwd_partial_sm90_kernel"} & {
        x.name for x in trace.events()
    }
    assert launched == {
        "selected_fwd_partial_sm90_kernel" if on_hopper else "selected_fwd_partial_kernel"
    }
    k[:, :, 483:] = v[:, :, 483:] = float("nan")  # nobody sees them
    for wide in (False, True):
        monkeypatch.setattr(SelectedPlan, "int64_offsets", wide)
        forget_plans()
        for a, b in zip(attend(case, q, k, v, blocks), want, strict=True):
            assert torch.equal(a, b)


@only_outside
def test_kernels_for_hopper_want_vectors_of_16_bytes() -> None:
    """Queries that begin elsewhere go by the other kernels."""
    pytest.importorskip("triton.experimental.gluon")
    from nsa_flex.fallback_kernels.fused import fwd_epilogue_sm90 as epilogue_sm90
    from nsa_flex.fallback_kernels.selected import fwd_partial_sm90

    case = Case(1, 2, 4, 64, None, 448, 128, 128, 64, 8, dtype=torch.bfloat16)
    q, k, v = (x.detach() for x in inputs(case, "cpu"))
    plan = plan_of(case, q, k, v, choices(case))
    moved = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.transpose(1, 2).shape)
    moved = moved.transpose(1, 2)
    for query, taken in ((q, True), (moved, False)):
        assert (fwd_partial_sm90.unsupported_reason(plan, query) is None) == taken
        assert (epilogue_sm90.unsupported_reason(plan, query, k, v) is None) == taken


def check_forward(case: Case, blocks: Tensor, factor: float) -> float:
    """Output and log-sum-exp of queries times `factor` against the oracle, by the error rule.

    Returns by how much, in bits, probabilities relative to the own block's highest exceed 1 most.
    """
    q, k, v = (x.detach() for x in inputs(case))
    out, lse = attend(case, q * factor, k, v, blocks)
    mask = oracle.selected_mask(blocks.numpy(), case.keys, case.config, case.offset)
    arrays = [x.double().cpu().numpy() for x in (q * factor, k, v)]
    want, want_lse, _ = oracle.branch(*arrays, mask, case.scale)
    plain, _ = eager(case, q * factor, k, v, blocks)
    got, plain = (x.double().cpu().numpy() for x in (out, plain))
    assert oracle.relative_error(got, want) <= 2 * oracle.relative_error(plain, want)
    np.testing.assert_allclose(lse.cpu().numpy(), want_lse, rtol=1e-5, atol=1e-4)
    own = mask & (np.arange(case.keys) // case.block_size == case.owns()[:, None])
    _, own_lse, _ = oracle.branch(*arrays, own, case.scale)
    some = np.isfinite(own_lse)
    return float((want_lse[some] - own_lse[some]).max() / np.log(2))


@pytest.mark.gpu
@pytest.mark.parametrize("factor", [30.0, 1e-3])
def test_partial_results_of_any_size(factor: float) -> None:
    """Probabilities that are all or nothing, and all alike."""
    case = Case(1, 2, 4, 150, None, 333, 128, 128, 64, 8, dtype=torch.bfloat16)
    check_forward(case, choices(case), factor)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", LOW_PRECISION)
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize(("factor", "own"), [(1.0, True), (1.0, False), (30.0, True)])
def test_unions_of_any_size(
    factor: float,
    own: bool,
    group: int,
    dtype: torch.dtype,
    with_unions: None,
    launches: list[SelectedPlan],
) -> None:
    """Tops of the own block serve, unless others are far higher or half the queries lack it."""
    case = Case(1, 2, group, 150, None, 333, 128, 128, 64, 8, dtype=dtype)
    blocks = choices(case)
    if not own:
        half = blocks[:, :, ::2]
        half[half == torch.from_numpy(case.owns())[::2, None]] = -1
    higher = check_forward(case, blocks, factor)
    assert (higher > 70) == (factor > 1)
    assert len(launches) == (torch.cuda.get_device_capability()[0] == 9)
    plan = plan_of(case, *inputs(case), blocks)
    assert bool((build_block_unions(plan, blocks.to(DEVICE)).sizes >= 0).all())


@kernels
@pytest.mark.parametrize("num_queries", [1, 2, 16, 17])
def test_short_sequences(num_queries: int) -> None:
    case = Case(num_queries=num_queries, offset=0, batch=2)
    q, k, v = inputs(case)
    blocks = choices(case)
    out, lse = attend(case, q, k, v, blocks)
    grad_out = torch.randn_like(out)
    want = wanted(case, q, k, v, blocks, grad_out)
    for name, a, b in zip(NAMES, results(q, k, v, out, lse, grad_out), want, strict=True):
        # A softmax over one key has a gradient of 0: no relative error there.
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=name)


@kernels
@pytest.mark.parametrize("shape", [(0, 1, 4, 8), (1, 1, 0, 8)])
def test_empty_inputs(shape: tuple[int, int, int, int]) -> None:
    x = torch.zeros(shape, device=DEVICE, requires_grad=True)
    blocks = torch.zeros((*shape[:3], 2), dtype=torch.int32, device=DEVICE)
    case = Case(head_dim=shape[3], offset=0)
    out, lse = attend(case, x, x, x, blocks)
    out.sum().backward()
    assert out.shape == shape
    assert lse.shape == shape[:3]


@kernels
@pytest.mark.kept(lambda batch, group: (batch, group) in ((2, 1), (1, 6)))
@pytest.mark.parametrize(
    ("batch", "num_queries", "group"),
    [(1, 75, 1), (2, 45, 1), (3, 10, 1), (1, 75, 6), (2, 45, 6)],
)
def test_windows(
    monkeypatch: pytest.MonkeyPatch, batch: int, num_queries: int, group: int
) -> None:
    """Memory for 32 queries: several windows a KV head, or heads of two rows in a window."""
    case = Case(batch=batch, num_queries=num_queries, offset=19, kv_heads=2, group=group)
    row_bytes = 4 * case.num_slots * case.head_dim * case.kv_heads * case.group
    monkeypatch.setattr(selected_plan, "PARTIAL_BYTES", 32 * row_bytes)
    monkeypatch.setattr(selected_plan, "MIN_CHUNK_TOKENS", 16)
    check(case, choices(case), deterministic=batch == 2)


@pytest.mark.gpu
def test_windows_on_two_streams_give_what_one_window_gives(
    forget_plans: Callable[[], None], monkeypatch: pytest.MonkeyPatch, with_unions: None
) -> None:
    """Eager and as a CUDA graph; a window that began too early would see another's results."""
    case = Case(1, 4, 8, 9000, None, 0, 128, 128, 64, 16, 1, 2, torch.bfloat16)
    q, k, v = inputs(case)
    blocks = random_choices(case)
    grad_out = torch.randn_like(q)

    def out_and_gradients() -> list[Tensor]:
        out, lse = attend(case, q, k, v, blocks)
        return [out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), grad_out)]

    want = out_and_gradients()
    monkeypatch.setattr(selected_plan, "PARTIAL_BYTES", 1 << 24)
    forget_plans()
    plan = SelectedPlan.of(q, k, v, blocks.shape[3], case.block_size, case.initial, case.local, 0)
    assert plan.num_streams == 2
    assert plan.num_chunks > 16

    def check_against_one_window(found: list[Tensor]) -> None:
        out, lse, dq, dk, dv = found
        for name, x, y in zip(NAMES, (out, lse, dq), want, strict=False):
            assert torch.equal(x, y), name
        for name, x, y in zip(NAMES[3:], (dk, dv), want[3:], strict=True):  # atomics
            assert (x - y).float().norm() <= 2**-8 * y.float().norm(), name

    for _ in range(3):
        check_against_one_window(out_and_gradients())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = out_and_gradients()
    for _ in range(3):
        for x in captured:
            x.fill_(float("nan"))
        graph.replay()
        check_against_one_window(captured)


@kernels
def test_sizes_of_unions_reach_past_the_last_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows are equal: the last may end behind the queries, and the merge reads there."""
    case = Case(num_queries=75, offset=0, group=1)
    monkeypatch.setattr(selected_plan, "CHUNK_ROWS", 32)
    monkeypatch.setattr(selected_plan, "MIN_CHUNK_TOKENS", 32)
    blocks = choices(case).to(DEVICE)
    plan = plan_of(case, *inputs(case), blocks)
    tiles = plan.chunks_per_head * plan.chunk_tokens // plan.combine_tokens
    sizes = build_block_unions(plan, blocks).sizes
    assert tiles > len(sizes)
    assert sizes.untyped_storage().nbytes() >= tiles * sizes.element_size()


@kernels
@pytest.mark.parametrize("offset", [64, 77])
def test_query_offset(offset: int, with_unions: None) -> None:
    """Chunked prefill; keys after the last query may hold anything."""
    case = Case(num_queries=23, offset=offset, num_keys=offset + 23 + 20)
    check(case, choices(case), deterministic=offset == 64)
    q, k, v = inputs(case)
    blocks = choices(case)
    out, _ = attend(case, q, k, v, blocks)
    with torch.no_grad():
        k[:, :, offset + 23 :] = float("nan")
        v[:, :, offset + 23 :] = float("nan")
    again, _ = attend(case, q, k, v, blocks)
    assert torch.equal(out, again)


@kernels
def test_wide_offsets_give_the_same(
    forget_plans: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(kv_heads=2, num_queries=13)
    q, k, v = inputs(case)
    blocks = choices(case)
    narrow = attend(case, q, k, v, blocks, deterministic=True)
    narrow_gradients = torch.autograd.grad(narrow[0].sum(), (q, k, v))
    monkeypatch.setattr(selected_plan.SelectedPlan, "int64_offsets", True)
    forget_plans()
    wide = attend(case, q, k, v, blocks, deterministic=True)
    wide_gradients = torch.autograd.grad(wide[0].sum(), (q, k, v))
    for a, b in zip((*narrow, *narrow_gradients), (*wide, *wide_gradients), strict=True):
        assert torch.equal(a, b)


@kernels
@pytest.mark.parametrize("layout", ["heads first", "last dimension strided", "expanded"])
def test_strides(layout: str) -> None:
    case = Case(kv_heads=2, batch=2, num_queries=9)
    q, k, v = (x.detach() for x in inputs(case))
    blocks = choices(case)
    want = attend(case, q, k, v, blocks)
    if layout == "heads first":
        q, k, v = (x.contiguous() for x in (q, k, v))
    elif layout == "last dimension strided":
        q, k, v = (x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v))
    else:
        k = k[:, :1].expand(-1, 2, -1, -1)
        want = attend(case, q, k.contiguous(), v, blocks)
    got = attend(case, q, k, v, blocks)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@kernels
def test_blocks_after_the_query_count_as_none(with_unions: None) -> None:
    case = Case()
    q, k, v = inputs(case)
    blocks = filled(case, case.owns())
    want, _ = attend(case, q, k, v, blocks)
    blocks[..., 1] = 1 + torch.from_numpy(case.owns().astype(np.int32))
    blocks[..., 2] = 10**6
    got, _ = attend(case, q, k, v, blocks)
    assert torch.equal(got, want)


@kernels
def test_gradient_of_the_log_sum_exp() -> None:
    case = Case(kv_heads=2, num_queries=13)
    q, k, v = inputs(case)
    blocks = choices(case)
    out, lse = attend(case, q, k, v, blocks)
    eager_out, eager_lse = eager(case, q, k, v, blocks)
    grads = (torch.randn_like(out), torch.randn_like(lse))
    got = torch.autograd.grad((out, lse), (q, k, v), grads)
    want = torch.autograd.grad((eager_out, eager_lse), (q, k, v), grads)
    only = torch.autograd.grad(attend(case, q, k, v, blocks)[1], (q, k), grads[1])
    only_want = torch.autograd.grad(eager(case, q, k, v, blocks)[1], (q, k), grads[1])
    for a, b in zip((*got, *only), (*want, *only_want), strict=True):
        assert oracle.relative_error(a.cpu().numpy(), b.cpu().numpy()) < 1e-5


@kernels
def test_repeated_runs_give_equal_bits() -> None:
    case = Case(batch=2, group=2, dtype=torch.float16)
    q, k, v = inputs(case)
    blocks = choices(case)
    grad_out = torch.randn_like(q)
    first = results(q, k, v, *attend(case, q, k, v, blocks, True), grad_out)
    second = results(q, k, v, *attend(case, q, k, v, blocks, True), grad_out)
    for a, b in zip(first, second, strict=True):
        assert np.array_equal(a, b)
    atomic = results(q, k, v, *attend(case, q, k, v, blocks, False), grad_out)
    for a, b in zip(first[:2], atomic[:2], strict=True):
        assert np.array_equal(a, b)
    for name, a, b in zip(NAMES, atomic, first, strict=True):
        # Only the order of float32 sums may differ, and where dQ's partial sums are rounded.
        assert oracle.relative_error(a, b) < 1e-3, name


@kernels
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_added_to_others(deterministic: bool) -> None:
    """The launchers alone: delta from outside, the forward's index, a sum."""
    case = Case(batch=2, kv_heads=2, num_queries=13)
    q, k, v = (x.detach() for x in inputs(case))
    blocks = choices(case, forced=False)
    on_device = blocks.to(DEVICE)
    plan = plan_of(case, q, k, v, on_device)
    words = index_words(q, v, on_device, case.block_size, case.offset)
    storage = torch.empty(words, dtype=torch.int32, device=DEVICE)
    out, lse = forward(prepare(plan, q, k, v, on_device, case.scale, storage=storage))
    grad_out = torch.randn_like(out)
    grad_out[:, :, :9] = 0
    delta = (out * grad_out).sum(-1).transpose(1, 2).contiguous().transpose(1, 2)
    added = torch.randn_like(q)
    total = added.clone()
    of_keys = add_gradients(
        plan,
        q,
        k,
        v,
        on_device,
        softmax_stats(lse, delta),
        grad_out,
        case.scale,
        deterministic=deterministic,
        index=storage,
        grad_query=total,
        initial_local=True,
    )
    want = wanted(case, q, k, v, blocks, grad_out)[2:]
    want[0] = want[0] + added.double().cpu().numpy()
    tokens = min(k.shape[2], of_keys[0].shape[1])
    got = [total, *(x[:, :tokens].transpose(1, 2) for x in of_keys)]
    for name, a, b in zip(NAMES[2:], got, want, strict=True):
        assert oracle.relative_error(a.double().cpu().numpy(), b) < 1e-5, name


@kernels
def test_the_index_fits_whatever_is_predicted_of_it() -> None:
    """`index_words` is a bound for many shapes, short and long windows, one row and more."""
    for batch, kv_heads, num_queries, offset, group, num_slots in (
        (1, 1, 1, 0, 1, 1),
        (3, 2, 700, 5, 1, 16),
        (1, 4, 65536, 0, 16, 16),
        (2, 8, 20001, 77, 4, 64),
        (7, 1, 1000, 0, 64, 3),
        (1, 2, 2**20, 0, 16, 16),
    ):
        shape = (batch, kv_heads * group, num_queries, 128)
        q = torch.empty(shape, device="meta", dtype=torch.bfloat16)
        k = torch.empty((batch, kv_heads, offset + num_queries, 128), device="meta")
        blocks = torch.empty((batch, kv_heads, num_queries, num_slots), device="meta")
        plan = SelectedPlan.of(q, k, k, blocks.shape[3], 64, 1, 2, offset)
        items = plan.num_chunks * plan.work_tiles_per_chunk(plan.work_tile_tokens)
        needed = blocks.numel() + batch * kv_heads * num_queries + WORK_TILE_WORDS * items
        assert needed <= index_words(q, k, blocks, 64, offset)


@kernels
def test_operators_obey_the_library_rules() -> None:
    case = Case(num_queries=3, offset=18, group=1)
    q, k, v = inputs(case)
    blocks = choices(case).to(DEVICE)
    options = (case.block_size, case.initial, case.local, case.scale, case.offset, True)
    for keep_index in (False, True):
        forward_arguments = (q, k, v, blocks, *options, keep_index)
        torch.library.opcheck(selected.selected_forward, forward_arguments)
        results = selected.selected_forward(*forward_arguments)
        out, lse, index = (x.detach() for x in results)
        tensors = (q.detach(), k.detach(), v.detach(), blocks, index, out, lse)
        arguments = (*tensors, torch.randn_like(out), None, *options)
        torch.library.opcheck(selected.selected_backward, arguments)


@kernels
def test_compiles_into_one_graph_with_dynamic_length() -> None:
    def loss(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor) -> Tensor:
        out, lse = attend(Case(offset=18), 2 * q, k, v, blocks, deterministic=True)
        return (out * out).sum() + lse.sum()

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=counter)
    for num_queries in (5, 7, 9):
        case = Case(num_queries=num_queries, offset=18, group=1)
        tensors = inputs(case)
        blocks = choices(case).to(DEVICE)
        want = torch.autograd.grad(loss(*tensors, blocks), tensors)
        got = torch.autograd.grad(compiled(*tensors, blocks), tensors)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)
    assert counter.frame_count == 1


GOOD = Case(num_queries=32, offset=0)


@kernels
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 48}, "block_size is 48; the Triton kernels take (16, 32, 64, 128)"),
        ({"offset": 1}, "query_offset=1 with 32 queries must lie within 32 keys"),
        ({"local": 0}, "num_local_blocks=0 at least 1"),
    ],
)
def test_refused_options(change: dict[str, int], message: str) -> None:
    q, k, v = inputs(GOOD)
    blocks = choices(GOOD)
    with pytest.raises(ValueError, match="^.*" + message.replace("(", r"\(").replace(")", r"\)")):
        attend(replace(GOOD, **change), q, k, v, blocks)


@kernels
@pytest.mark.parametrize(
    ("position", "change", "message"),
    [
        (0, lambda x: x.double(), "query is torch.float64; the Triton kernels take"),
        (0, lambda x: x[0], "query has shape .* it must have 4 dimensions"),
        (1, lambda x: x.half(), "key is torch.float16, query torch.float32; they must agree"),
        (1, lambda x: x[..., :8], "key has shape .* it must be "),
        (2, lambda x: x[:, :, :8], "value has shape .* it must be "),
        (0, lambda x: x[:, :, :8], "blocks has shape .* it must be "),
        (3, lambda x: x.long(), "blocks is torch.int64; it must be torch.int32"),
        (3, lambda x: x.repeat(1, 1, 1, 40), "blocks offers 160 blocks a query; at most 128"),
        (3, lambda x: x.to("meta"), "blocks is on meta, query on "),
    ],
)
def test_refused_tensors(position: int, change, message: str) -> None:  # type: ignore[no-untyped-def]
    tensors = [*inputs(GOOD), choices(GOOD).to(DEVICE)]
    tensors[position] = change(tensors[position])
    with pytest.raises(ValueError, match=message):
        attend(GOOD, *tensors) if position < 3 else selected_attention(
            *tensors,
            block_size=16,
            num_initial_blocks=1,
            num_local_blocks=2,
            scale=1.0,
        )


@kernels
def test_refuses_blocks_that_do_not_fit_shared_memory() -> None:
    case = Case(num_queries=4, head_dim=256, value_dim=256, block_size=128)
    q, k, v = inputs(case)
    message = "block_size=128 with head dims 256 and 256 in torch.float32 needs .* the device has"
    with pytest.raises(ValueError, match=message):
        attend(case, q, k, v, choices(case))


@kernels
@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ((6, 4), "key has 4 heads; query's 6 must be a multiple of it"),
        ((65, 1), "65 query heads share a KV head; at most 64 can"),
    ],
)
def test_refused_head_counts(heads: tuple[int, int], message: str) -> None:
    q = torch.randn(1, heads[0], 16, 16, device=DEVICE)
    k = torch.randn(1, heads[1], 16, 16, device=DEVICE)
    blocks = torch.zeros(1, heads[1], 16, 1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match=message):
        attend(Case(offset=0), q, k, k, blocks)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter takes CPU tensors")
def test_refused_on_the_cpu() -> None:
    q, k, v = inputs(GOOD, "cpu")
    with pytest.raises(ValueError, match="the Triton kernels need CUDA tensors, got cpu"):
        attend(GOOD, q, k, v, choices(GOOD))


def random_choices(case: Case) -> Tensor:
    """Forced blocks and the best of random scores (B, Hkv, Sq, n), built on the GPU by rows."""
    num_blocks = -(-case.keys // case.block_size)
    block = torch.arange(num_blocks, device=DEVICE)
    parts = []
    for _ in range(case.batch * case.kv_heads):
        for start in range(0, case.num_queries, 8192):
            stop = min(start + 8192, case.num_queries)
            own = torch.arange(start, stop, device=DEVICE)[:, None] // case.block_size
            age = own - block
            scores = torch.rand(stop - start, num_blocks, device=DEVICE)
            scores = torch.where((age < case.local) | (block < case.initial), 2.0, scores)
            scores = torch.where(age < 0, -1.0, scores)
            best = scores.topk(min(case.num_slots, num_blocks))
            chosen = torch.where(best.values < 0, num_blocks, best.indices).sort().values
            parts.append(torch.where(chosen == num_blocks, -1, chosen).int())
    return torch.cat(parts).reshape(case.batch, case.kv_heads, case.num_queries, -1)


def sampled_rows(case: Case) -> list[int]:
    last = case.num_queries - 1
    rows = torch.randint(last, (24,)).tolist()
    return [*rows, 0, 1, case.block_size - 1, case.block_size, last - case.block_size, last]


@pytest.mark.large
@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        Case(1, 4, 16, 16384, None, 0, 128, 128, 64, 16, 1, 2, torch.bfloat16),
        Case(1, 8, 4, 20001, None, 0, 128, 128, 64, 16, 1, 2, torch.bfloat16),
        Case(2, 16, 1, 8192, None, 0, 64, 64, 32, 16, 1, 2, torch.float16),
        Case(1, 2, 12, 8192, None, 0, 192, 128, 64, 16, 1, 2, torch.bfloat16),
        Case(1, 2, 6, 8192, None, 0, 256, 256, 128, 8, 1, 1, torch.bfloat16),
        Case(1, 1, 3, 8192, None, 0, 96, 80, 16, 64, 2, 3, torch.bfloat16),
    ],
)
def test_long_sequences(case: Case, with_unions: None) -> None:
    """Output of sampled queries, and gradients that only those queries cause."""
    q, k, v = inputs(case)
    blocks = random_choices(case)
    out, lse = attend(case, q, k, v, blocks)
    rows = torch.tensor(sorted(set(sampled_rows(case))), device=DEVICE)
    grad_out = torch.zeros_like(out)
    grad_out[:, :, rows] = torch.randn_like(grad_out[:, :, rows])
    got = torch.autograd.grad(out, (q, k, v), grad_out)
    mask = _seen_by(case, blocks, rows)
    exact = [x.detach()[:, :, rows].double() if x is q else x.detach().double() for x in (q, k, v)]
    want_out, want_lse, want = _reference(case, exact, mask, grad_out[:, :, rows].double())
    plain = [x.to(case.dtype) for x in exact]
    plain_out, _, plain_grads = _reference(case, plain, mask, grad_out[:, :, rows])
    assert (lse[:, :, rows].double() - want_lse).abs().max() < 1e-3
    pairs = [(out[:, :, rows], plain_out, want_out), (got[0][:, :, rows], plain_grads[0], want[0])]
    pairs += list(zip(got[1:], plain_grads[1:], want[1:], strict=True))
    for ours, theirs, exactly in pairs:
        error = _distance(ours, exactly)
        assert error <= 2 * _distance(theirs, exactly), (case, error)


def _distance(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b).norm() / b.norm()).item()


def _seen_by(case: Case, blocks: Tensor, rows: Tensor) -> Tensor:
    """(B, Hq, rows, Sk): keys that the sampled queries see."""
    key = torch.arange(case.keys, device=DEVICE)
    chosen = blocks[:, :, rows]
    seen = torch.stack(
        [(chosen[:, :, i, :, None] == key // case.block_size).any(-2) for i in range(len(rows))], 2
    )
    seen &= key <= rows[:, None]
    return seen.repeat_interleave(case.group, 1)


def _reference(
    case: Case, tensors: list[Tensor], mask: Tensor, grad_out: Tensor
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    q, k, v = (x.detach().requires_grad_() for x in tensors)
    scores = case.scale * (q @ k.repeat_interleave(case.group, 1).transpose(-1, -2))
    scores = scores.masked_fill(~mask, float("-inf"))
    out = scores.softmax(-1) @ v.repeat_interleave(case.group, 1)
    return out, scores.logsumexp(-1), torch.autograd.grad(out, (q, k, v), grad_out)


@pytest.mark.large
@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        Case(1, 2, 32, 140_000, None, 0, 256, 16, 64, 4, 1, 1, torch.bfloat16),
        Case(1, 2, 64, 131_100, None, 0, 128, 128, 64, 4, 1, 1, torch.bfloat16),
    ],
    ids=["D256", "D128"],
)
def test_offsets_past_two_to_the_31(case: Case, with_unions: None) -> None:
    """Query of 2.1e9 elements or more; its last rows are what a 32-bit offset would miss."""
    q, k, v = (x.detach() for x in inputs(case))
    assert q.numel() > 2**31
    blocks = random_choices(case)
    out, _ = attend(case, q, k, v, blocks)
    rows = torch.arange(case.num_queries - 8, case.num_queries, device=DEVICE)
    of_one = replace(case, kv_heads=1)
    for head in range(case.kv_heads):  # one at a time: the reference repeats its keys
        own, heads = slice(head, head + 1), slice(head * case.group, (head + 1) * case.group)
        exact = [q[:, heads, rows].double(), k[:, own].double(), v[:, own].double()]
        upstream = torch.zeros_like(out[:, heads, rows]).double()
        want, _, _ = _reference(of_one, exact, _seen_by(of_one, blocks[:, own], rows), upstream)
        assert _distance(out[:, heads, rows], want) < 1e-2, head


@pytest.mark.gpu
def test_replays_as_a_cuda_graph_without_waiting_for_the_device(with_unions: None) -> None:
    case = Case(1, 2, 8, 4096, None, 0, 128, 128, 64, 16, 1, 2, torch.bfloat16)
    q, k, v = inputs(case)
    blocks = random_choices(case)
    grad_out = torch.randn_like(q)

    def step() -> tuple[Tensor, ...]:
        out, _ = attend(case, q, k, v, blocks, deterministic=True)
        return (out, *torch.autograd.grad(out, (q, k, v), grad_out))

    step()
    with no_synchronization():
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        q.copy_(torch.randn_like(q))
    blocks.copy_(random_choices(case))
    graph.replay()
    for a, b in zip(captured, step(), strict=True):
        assert torch.equal(a, b)
