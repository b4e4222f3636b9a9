"""The kernel that stores a chunk of tokens, against the float64 oracle of φ and PyTorch's path."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from nsa_flex import decoding
from nsa_flex.cache import LayerCache
from nsa_flex.cache.columns import IncomingBatch, incoming_batch
from nsa_flex.cache.layer import advance
from nsa_flex.compression import Compression
from nsa_flex.config import BRANCHES, NSAConfig
from reference.accuracy import assert_close
from reference.interpreter import DEVICE, INTERPRETED, LOW_PRECISION, interpreted, kernels
from reference.phi import by_definition

pytest.importorskip("triton")
from nsa_flex.fallback_kernels.common.launches import intercepting_launches
from nsa_flex.fallback_kernels.decode import store_tokens as kernel
from nsa_flex.fallback_kernels.launch import plans

SMALL = NSAConfig(8, 4, 16, 4, window_size=20)
APART = NSAConfig(8, 8, 16, 4, window_size=7)  # compressed blocks do not overlap
DENSE = NSAConfig(16, 4, 16, 5, window_size=40)  # each token in four compressed blocks
ODD = NSAConfig(6, 3, 24, 4, window_size=20)  # no powers of two but l'/d
PAPER = NSAConfig()
KERNEL = "store_tokens_kernel"

test_kernels_under_the_interpreter = interpreted(__file__)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small chunks have several CTAs a head."""
    if INTERPRETED:
        monkeypatch.setattr(kernel, "TILE_ELEMENTS", 256)


@dataclass(frozen=True)
class Case:
    """Sizes of one call: `past` tokens of each row are stored, `tokens` are new."""

    config: NSAConfig = SMALL
    past: tuple[int, ...] = (21,)
    tokens: int = 37
    capacity: int = 70
    kv_heads: int = 2
    dims: tuple[int, int] = (16, 16)
    dtype: torch.dtype = torch.float32
    kind: Any = "mean"
    num_sets: int = 1


class Problem:
    """Whole rows, and a cache that holds the past; what is not stored is NaN."""

    def __init__(self, case: Case) -> None:
        self.case, batch, config = case, len(case.past), case.config
        heads = case.kv_heads * case.num_sets
        self.phi = [Compression(config, case.kv_heads, dim, case.kind) for dim in case.dims]
        for x in (x for phi in self.phi for x in phi.requires_grad_(False).parameters()):
            x += torch.randn_like(x)
        self.phi = [phi.to(DEVICE) for phi in self.phi]
        self.whole = [
            torch.randn(batch, heads, case.capacity + case.tokens, dim).to(DEVICE, case.dtype)
            for dim in case.dims
        ]
        rows = max(1, config.num_compressed_blocks(case.capacity))
        self.raw = [torch.full_like(x[:, :, : case.capacity], torch.nan) for x in self.whole]
        self.compressed = [
            x.new_full((batch, case.kv_heads, rows, x.shape[3]), torch.nan) for x in self.whole
        ]
        self.lengths = torch.tensor(case.past, dtype=torch.int32, device=DEVICE)
        for x, raw in zip(self.whole, self.raw, strict=True):
            for row, past in enumerate(case.past):
                raw[row, :, :past] = x[row, :, :past]
        self.new = [
            torch.stack([x[i, :, n : n + case.tokens] for i, n in enumerate(case.past)])
            for x in self.whole
        ]

    @property
    def args(self) -> tuple[Any, ...]:
        """Of the operator."""
        logits = [x for phi in self.phi for x in phi.parameters()]
        rest = (self.lengths, logits, True, self.case.config.counts)
        return (*self.new, *self.raw, *self.compressed, *rest)

    def check(self, compresses: bool = True) -> None:
        """Every slot and every row; those that were not to be written are as they were."""
        case, config = self.case, self.case.config
        for x, raw, found, phi in zip(
            self.whole, self.raw, self.compressed, self.phi, strict=True
        ):
            for row, past in enumerate(case.past):
                stop = min(past + case.tokens, case.capacity)
                assert torch.equal(raw[row, :, :stop], x[row, :, :stop])
                assert raw[row, :, stop:].isnan().all()
                before, after = (config.num_compressed_blocks(n) for n in (past, stop))
                after = after if compresses else before
                assert found[row, :, :before].isnan().all()
                assert found[row, :, after:].isnan().all()
                if before == after:
                    continue
                tokens = x[row : row + 1, : case.kv_heads, :stop]
                exact = by_definition(phi, tokens.cpu())[0, :, before:after]
                eager = phi(tokens)[0, :, before:after]
                here = found[row, :, before:after]
                assert_close("compressed", here, exact, eager, case.dtype)


def check(case: Case) -> None:
    problem = Problem(case)
    kernel.store(*problem.args)
    problem.check()


@kernels
@pytest.mark.parametrize(
    ("tokens", "past"),
    [
        (1, (0, 6, 7, 11, 69)),
        (3, (0, 5, 21, 66)),
        (7, (0, 1, 8)),
        (17, (4, 3, 7, 8, 50)),
        (40, (0, 30, 29)),
        (32, (16,)),
    ],
)
@pytest.mark.parametrize("kind", ["mean", "weighted"])
def test_chunks_of_any_length_anywhere(tokens: int, past: tuple[int, ...], kind: Any) -> None:
    """Rows of their own lengths; some complete no block, some begin or end inside of one."""
    check(Case(past=past, tokens=tokens, kind=kind))


@kernels
@pytest.mark.parametrize("config", [APART, DENSE, ODD, PAPER])
@pytest.mark.parametrize("kind", ["mean", "weighted"])
def test_configs(config: NSAConfig, kind: Any) -> None:
    check(Case(config, past=(0, 13, 33), tokens=71, capacity=110, kv_heads=1, kind=kind))


@kernels
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (24, 256)])
def test_head_dims(dims: tuple[int, int]) -> None:
    case = Case(past=(5,), tokens=19, capacity=30, dims=dims, dtype=LOW_PRECISION[-1])
    check(case)


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, *LOW_PRECISION])
@pytest.mark.parametrize("kind", ["mean", "weighted"])
def test_dtypes(dtype: torch.dtype, kind: Any) -> None:
    check(Case(dtype=dtype, dims=(32, 24), kind=kind))


@kernels
def test_what_does_not_fit_is_left_out() -> None:
    check(Case(past=(0, 60, 68, 70), tokens=20))


@kernels
@pytest.mark.parametrize("tokens", [1, 6])
@pytest.mark.parametrize("kind", ["mean", "weighted"])
def test_what_lies_before_a_part_or_behind_it_is_left_out(kind: Any, tokens: int) -> None:
    """As of a `ShardedCache`: tokens 32 to 67 of rows, whose lengths count from token 32."""
    past = (0, 27, 29, 31, 32, 40, 63, 65, 67, 68, 90)
    problem = Problem(Case(past=past, tokens=tokens, capacity=96, kind=kind))
    raw = [x[:, :, 32:68].clone() for x in problem.raw]
    compressed = [x[:, :, 8:16].clone() for x in problem.compressed]
    rest = (problem.lengths - 32, *problem.args[7:])
    kernel.store(*problem.new, *raw, *compressed, *rest)
    kernel.store(*problem.args)
    for found, whole in zip((*raw, *compressed), (*problem.raw, *problem.compressed), strict=True):
        first = 32 if found.shape[2] == 36 else 8
        want = whole[:, :, first : first + found.shape[2]]
        torch.testing.assert_close(found, want, equal_nan=True)
    assert not compressed[0].isnan().all()


@kernels
def test_a_cache_shorter_than_a_block() -> None:
    check(Case(PAPER, past=(0, 3), tokens=9, capacity=20))


@kernels
@pytest.mark.parametrize("kind", ["mean", "weighted"])
def test_separate_keys_of_each_branch(kind: Any) -> None:
    """All are stored, those of the first branch compressed."""
    check(Case(past=(9, 2), kind=kind, num_sets=3))


@kernels
def test_compressed_values_that_nobody_reads_have_one_row() -> None:
    """As of a cache without a compressed branch: they may be written, into that row."""
    problem = Problem(Case(replace(SMALL, branches=("selected", "sliding")), past=(21, 7)))
    beside = problem.compressed[1]
    problem.compressed[1] = beside[:, :, 1:2]
    kernel.store(*problem.args)
    assert beside[:, :, 0].isnan().all()
    assert beside[:, :, 2:].isnan().all()
    for each in (problem.whole, problem.raw, problem.compressed, problem.phi):
        each.pop()
    problem.check()


@kernels
@pytest.mark.parametrize("past", [(0,), (21, 7)])
def test_tokens_alone(past: tuple[int, ...]) -> None:
    problem = Problem(Case(past=past))
    *args, logits, _, counts = problem.args
    kernel.store(*args, logits, False, counts)
    problem.check(compresses=False)


@kernels
def test_new_tokens_are_rounded_to_the_dtype_of_the_cache() -> None:
    """And rounded so they are compressed."""
    problem = Problem(Case(dtype=torch.float16, kind="weighted"))
    noise = [x.float() * (1 + 2**-14) for x in problem.new]
    assert all(torch.equal(x.half(), new) for x, new in zip(noise, problem.new, strict=True))
    kernel.store(*noise, *problem.args[2:])
    problem.check()


@kernels
@pytest.mark.parametrize("kind", ["mean", "weighted"])
@pytest.mark.parametrize("branches", [("selected",), ("sliding",)], ids="+".join)
def test_values_that_no_branch_reads_take_one_row(branches: Any, kind: Any) -> None:
    problem = Problem(Case(replace(SMALL, branches=branches), past=(21, 0), kind=kind))
    key, value = problem.compressed
    problem.compressed = [key[:, :, :0] if branches == ("sliding",) else key, value[:, :, 1:2]]
    *tensors, logits, _, counts = problem.args
    kernel.store(*tensors, logits, branches != ("sliding",), counts)
    assert value[:, :, 0].isnan().all()
    assert value[:, :, 2:].isnan().all()
    problem.compressed = [key, torch.full_like(value, torch.nan)]
    if branches == ("sliding",):
        return problem.check(compresses=False)
    problem.whole, problem.raw, problem.compressed, problem.phi = (
        x[:1] for x in (problem.whole, problem.raw, problem.compressed, problem.phi)
    )
    return problem.check()


@kernels
@pytest.mark.parametrize("layout", ["tokens first", "slice of a longer cache", "strided inputs"])
def test_strides(layout: str) -> None:
    problem = Problem(Case(past=(21, 3), kind="weighted"))

    def tokens_first(x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    if layout == "tokens first":
        problem.new = [tokens_first(x) for x in problem.new]
        problem.raw = [tokens_first(x) for x in problem.raw]
        problem.compressed = [tokens_first(x) for x in problem.compressed]
    elif layout == "strided inputs":
        problem.new = [x.repeat_interleave(2, 3)[..., ::2] for x in problem.new]
    else:
        problem.raw = [torch.cat([x, x], 2)[:, :, : x.shape[2]] for x in problem.raw]
        problem.new = [torch.cat([x, x], 3)[..., : x.shape[3]] for x in problem.new]
    kernel.store(*problem.args)
    problem.check()


@kernels
@pytest.mark.parametrize("kind", ["mean", "weighted"])
def test_chunks_share_a_plan(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever they begin; the rows that they build are those of all tokens at once."""
    monkeypatch.setattr(plans, "DEVICES", {"cuda", "cpu"})
    case = Case(past=(0,), tokens=70, kind=kind)
    problem = Problem(case)
    kept = kernel.store_tokens._init_fn.plans  # type: ignore[attr-defined]
    recorded, replayed = kept.recorded, kept.replayed
    for start in range(0, 70, 10):
        problem.lengths.fill_(start)
        new = [x[:, :, start : start + 10] for x in problem.new]
        with torch.no_grad():
            kernel.store_tokens._init_fn(*new, *problem.args[2:])
    problem.check()
    assert (kept.recorded - recorded, kept.replayed - replayed) == (1, 5)
    assert not kept.problems


@kernels
def test_the_operator_obeys_the_library_rules() -> None:
    for kind in ("mean", "weighted"):
        problem = Problem(Case(kind=kind))
        for x in (*problem.raw, *problem.compressed):
            x.nan_to_num_(0.0)  # comparisons of copies take NaN for a change
        torch.library.opcheck(kernel.store_tokens, problem.args)


@kernels
def test_compiles_into_one_graph_for_all_offsets() -> None:
    problem = Problem(Case(past=(0,), tokens=70))

    def chunk(new_key: Tensor, new_value: Tensor) -> None:
        kernel.store(new_key, new_value, *problem.args[2:])
        problem.lengths.add_(35)

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(chunk, fullgraph=True, backend=counter)
    with torch.no_grad():
        for start in (0, 35):
            compiled(*(x[:, :, start : start + 35] for x in problem.new))
    problem.check()
    assert counter.frame_count == 1


REFUSED: list[tuple[int, Callable[[Tensor], Tensor], str]] = [
    (0, lambda x: x[:, :1], r"new_key has shape \(1, 1, 37, 16\); expected \(1, 2, 37, 16\)"),
    (0, lambda x: x[:, :, 1:], r"new_value has shape \(1, 2, 37, 16\); expected \(1, 2, 36, 16\)"),
    (0, lambda x: x.double(), "new tokens are torch.float64"),
    (2, lambda x: x[:, :, :, ::2], "has shape"),
    (4, lambda x: x[:, :, 1:], "compressed_"),
    (6, lambda x: x.long(), "lengths must be torch.int32"),
]


@kernels
@pytest.mark.parametrize(("place", "change", "message"), REFUSED)
def test_refused(place: int, change: Callable[[Tensor], Tensor], message: str) -> None:
    problem = Problem(Case())
    args = list(problem.args)
    args[place] = change(args[place])
    with pytest.raises(ValueError, match=message):
        kernel.store(*args)
    assert problem.raw[0][:, :, 21:].isnan().all()


def test_not_on_the_cpu() -> None:
    x = torch.zeros(1, 1, 4, 16)
    stored = decoding.Stored(x, x, x, x, torch.zeros(1, dtype=torch.int32))
    phi = Compression(SMALL, 1, 16, "mean")
    new = decoding.New(x, x, (phi, phi))
    assert decoding.store_unsupported_reason(new, stored) == (
        "the kernel that stores needs a CUDA device, got cpu"
    )
    assert decoding.store_by_kernel(new, stored) == (False, False)


# A layer's cache, by the kernel and by PyTorch's operations.


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Within: launches of this thread by kernel."""
    seen: Counter[str] = Counter()

    def note(jitted: Any, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen[jitted.fn.__name__] += 1
        return jitted.run(*args, grid=grid, warmup=False, **kwargs)

    with intercepting_launches(note):
        yield seen


def filled(
    monkeypatch: pytest.MonkeyPatch,
    by_kernel: bool,
    phi: tuple[Compression, Compression],
    tokens: list[Tensor],
    chunks: list[int],
    real: Tensor | None,
    **options: Any,
) -> tuple[LayerCache, int]:
    """A cache that took the chunks, and how often the kernel ran."""

    def reason(new: decoding.New, stored: decoding.Stored) -> str | None:
        return kernel.unsupported_reason(new.key, new.value, stored.key) if by_kernel else "no"

    with monkeypatch.context() as patch, torch.no_grad(), counting() as seen:
        patch.setattr(decoding, "store_unsupported_reason", reason)
        cache, start = LayerCache(*phi, **options), 0
        for count in chunks:
            stop = start + count
            incoming = IncomingBatch(count)
            if real is not None:
                incoming = incoming_batch(real[:, start:stop])
            cache.expect(incoming)
            cache.update(*(x[:, :, start:stop] for x in tokens))
            assert cache.pending is None
            advance([cache], incoming)
            start = stop
    return cache, seen[KERNEL]


@kernels
@pytest.mark.kept(lambda kind, static, padded: (kind in ("mean", "linear")) == (static == padded))
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(
    ("kind", "num_sets"), [("mean", 1), ("weighted", 3), ("linear", 3), ("mlp", 1)]
)
def test_a_cache_holds_what_it_did(
    kind: Any, num_sets: int, static: bool, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by PyTorch's operations: tokens to the bit, compressed rows but for rounding."""
    chunks, dims = [40, 17, 33], (16, 24)
    phi = tuple(Compression(SMALL, 2, dim, kind).to(DEVICE) for dim in dims)
    tokens = [torch.randn(3, 2 * num_sets, sum(chunks), dim).to(DEVICE) for dim in dims]
    real = None
    if padded:
        real = torch.arange(sum(chunks)) >= torch.tensor([[0], [13], [45]])
        real = real.to(DEVICE)
    options = {"max_length": sum(chunks) if static else None, "num_sets": num_sets}
    case = (phi, tokens, chunks, real)
    want, none = filled(monkeypatch, False, *case, **options)
    found, ran = filled(monkeypatch, True, *case, **options)
    assert (none, ran) == (0, len(chunks))
    assert torch.equal(found.lengths, want.lengths)
    for row, length in enumerate(found.lengths.tolist()):
        blocks = SMALL.num_compressed_blocks(length)
        ends = (length, length, blocks, blocks)
        for x, y, end in zip(found.buffers.tensors, want.buffers.tensors, ends, strict=True):
            torch.testing.assert_close(x[row, :, :end], y[row, :, :end])
    for x, y in zip(found.buffers.tensors[:2], want.buffers.tensors[:2], strict=True):
        assert torch.equal(x[:, :, : sum(chunks)], y[:, :, : sum(chunks)])


@kernels
def test_logits_that_take_gradients_are_left_to_operations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = Problem(Case(kind="weighted"))
    monkeypatch.setattr(decoding, "store_unsupported_reason", lambda new, stored: None)
    new = decoding.New(*problem.new, tuple(phi.requires_grad_(True) for phi in problem.phi))
    stored = decoding.Stored(*problem.raw, *problem.compressed, problem.lengths)
    assert decoding.store_by_kernel(new, stored) == (True, False)
    with torch.no_grad():
        assert decoding.store_by_kernel(new, stored) == (True, True)
    problem.check()


@pytest.mark.gpu
@pytest.mark.parametrize("branches", [BRANCHES, ("selected",)], ids="+".join)
@pytest.mark.parametrize("kind", ["mean", "weighted", "linear", "mlp"])
def test_a_chunk_on_cuda_takes_the_kernel(kind: Any, branches: Any) -> None:
    """Nothing told it to; for mean and weighted it launches nothing else."""
    config = replace(PAPER, branches=branches)
    phi = [Compression(config, 2, 128, kind).to("cuda", torch.bfloat16) for _ in range(2)]
    cache = LayerCache(*phi, max_length=4096)
    x = torch.randn(1, 2, 4096, 128, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        cache.update(x[:, :, :1024], x[:, :, :1024])
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            cache._store(cache._new(x[:, :, 1024:3000], x[:, :, 1024:3000], 1024))
            torch.cuda.synchronize()
        rows = [phi[0](x)[:, :, :186], phi[1](x)[:, :, :186]]
    names = {each.key: each.count for each in seen.key_averages() if each.self_device_time_total}
    assert names[KERNEL] == 1
    if kind in ("mean", "weighted"):
        assert not {name for name in names if "elementwise" in name or "reduce" in name}
    assert torch.equal(cache.buffers.key[:, :, :3000], x[:, :, :3000])
    assert cache.buffers.compressed_value.shape[2] == (255 if branches == BRANCHES else 1)
    number = 2 if branches == BRANCHES else 1
    for found, want in zip(cache.buffers.tensors[2:][:number], rows, strict=False):
        assert (found[:, :, :186] - want).norm() < 2**-7 * want.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["mean", "weighted"])
@pytest.mark.parametrize("heads", [4, 8])
def test_long_chunks(kind: Any, heads: int) -> None:
    """Of 4096 tokens, as a prefill has them, in the paper's sizes; tokens first."""
    phi = [Compression(PAPER, heads, 128, kind).to("cuda", torch.bfloat16) for _ in range(2)]
    for x in (x for each in phi for x in each.requires_grad_(False).parameters()):
        x.normal_()
    cache = LayerCache(*phi, max_length=16384)
    x = torch.randn(2, 16384, heads, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    with torch.no_grad():
        for start in range(0, 16384, 4096):
            new = x[:, :, start : start + 4096]
            cache.update(new, -new)
        want = [phi[0](x.float()), phi[1](-x.float())]
    assert torch.equal(cache.buffers.key, x)
    assert torch.equal(cache.buffers.value, -x)
    for found, rows in zip(cache.buffers.tensors[2:], want, strict=True):
        torch.testing.assert_close(found.float(), rows, rtol=2**-8, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.large
def test_caches_of_more_than_two_to_the_31_elements() -> None:
    """Tokens first: a token is further than 2**31 elements from the first."""
    heads, dim, chunk = 32, 128, 100
    capacity = 2**31 // (heads * dim) + 2 * chunk
    past, half = capacity - chunk - 3, {"device": "cuda", "dtype": torch.bfloat16}
    raw = [torch.zeros(1, capacity, heads, n, **half).transpose(1, 2) for n in (dim, 16)]
    rows = PAPER.num_compressed_blocks(capacity)
    compressed = [torch.zeros(1, heads, rows, n, **half) for n in (dim, 16)]
    new = [torch.randn(1, heads, chunk, n, **half) for n in (dim, 16)]
    before = [torch.randn(1, heads, 40, n, **half) for n in (dim, 16)]
    for x, tokens in zip(raw, before, strict=True):
        x[:, :, past - 40 : past] = tokens
    lengths = torch.tensor([past], dtype=torch.int32, device="cuda")
    with torch.no_grad():
        kernel.store(*new, *raw, *compressed, lengths, [], True, PAPER.counts)
    first, stop = (PAPER.num_compressed_blocks(n) for n in (past, past + chunk))
    for x, tokens, found in zip(raw, new, compressed, strict=True):
        assert torch.equal(x[:, :, past : past + chunk], tokens)
        assert not x[:, :, past + chunk :].any()
        assert not found[:, :, :first].any()
        assert not found[:, :, stop:].any()
        for block in range(first, stop):
            here = slice(16 * block, 16 * block + 32)
            want = x[:, :, here].float().mean(2)
            torch.testing.assert_close(found[:, :, block].float(), want, rtol=2**-8, atol=1e-6)
