"""The Triton kernels of the sliding branch against the float64 oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from nsa_flex.config import NSAConfig
from reference import oracle
from reference.accuracy import assert_close, eager_attention, leaf, to_float64
from reference.interpreter import (
    DEVICE,
    INTERPRETED,
    LOW_PRECISION,
    kernels,
    only_outside,
    run_in_the_interpreter,
)

pytest.importorskip("triton")
from nsa_flex.fallback_kernels.sliding import config as sliding_plan
from nsa_flex.fallback_kernels.sliding import interface as sliding
from nsa_flex.fallback_kernels.sliding.config import SlidingPlan, Tiles
from nsa_flex.fallback_kernels.sliding.interface import sliding_attention

HALF = LOW_PRECISION[-1]
NAMES = ("out", "grad_query", "grad_key", "grad_value")


@only_outside
def test_kernels_under_the_interpreter(request: pytest.FixtureRequest) -> None:
    """Every test below that does not need a GPU, on the CPU."""
    run_in_the_interpreter(__file__, request.config)


@dataclass(frozen=True)
class Case:
    """Sizes of one call; see `inputs`."""

    group: int = 4
    length: int = 50
    window: int = 20
    head_dim: int = 16
    value_dim: int = 16
    kv_heads: int = 1
    batch: int = 1
    dtype: torch.dtype = HALF

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def mask(self) -> np.ndarray:
        config = NSAConfig(window_size=self.window)
        return oracle.sliding_mask(self.length, self.length, config)


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value with memory (B, S, H, D), ready for gradients."""
    query_heads = case.kv_heads * case.group
    return (
        leaf((case.batch, query_heads, case.length, case.head_dim), case.dtype, DEVICE),
        leaf((case.batch, case.kv_heads, case.length, case.head_dim), case.dtype, DEVICE),
        leaf((case.batch, case.kv_heads, case.length, case.value_dim), case.dtype, DEVICE),
    )


def attend(case: Case, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return sliding_attention(q, k, v, window_size=case.window, scale=case.scale)


def results(case: Case, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> list[Tensor]:
    """Output, gradients and, last, the log-sum-exp."""
    out, lse = attend(case, q, k, v)
    assert out.dtype == case.dtype
    assert lse.dtype == torch.float32
    return [out, *torch.autograd.grad(out, (q, k, v), grad_out), lse]


def wanted(case: Case, q: Tensor, k: Tensor, v: Tensor, upstream: np.ndarray) -> list[np.ndarray]:
    """The oracle's, in the order of `results`."""
    arrays = [to_float64(x) for x in (q, k, v)]
    out, lse, _ = oracle.branch(*arrays, case.mask(), case.scale)
    return [out, *oracle.branch_backward(*arrays, case.mask(), case.scale, upstream), lse]


def eager(case: Case, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> list[Tensor]:
    mask = torch.from_numpy(case.mask()).to(q.device)
    out = eager_attention(q, k, v, mask, case.scale)
    return [out, *torch.autograd.grad(out, (q, k, v), grad_out)]


def hold(case: Case, got: list[Tensor], want: list[np.ndarray], plain: list[Tensor]) -> None:
    """By the error rule; `plain` is what eager PyTorch gets."""
    # A gradient of q or k is a difference of terms of dO's size: 0 where a query sees one key.
    for name, ours, exact, theirs in zip(NAMES, got, want, plain, strict=False):
        least = case.scale * np.sqrt(exact.size) if name in NAMES[1:3] else 0.0
        assert_close(name, ours, exact, theirs, case.dtype, least=least)


def check(case: Case) -> None:
    """Values and gradients against the oracle."""
    q, k, v = inputs(case)
    grad_out = torch.randn(*q.shape[:3], case.value_dim).to(q)
    got = results(case, q, k, v, grad_out)
    want = wanted(case, q, k, v, to_float64(grad_out))
    hold(case, got, want, eager(case, q, k, v, grad_out))
    # The logits are float32 sums of D products of numbers around 1, times 1 / sqrt(D).
    np.testing.assert_allclose(to_float64(got[-1]), want[-1], rtol=1e-5, atol=1e-5)


@kernels
@pytest.mark.kept(lambda group, size: (group, size) in ((3, 8), (1, 64)))
@pytest.mark.parametrize("group", [1, 3, 4, 16])
@pytest.mark.parametrize("size", [8, 64])
def test_documents(group: int, size: int) -> None:
    """Packed documents are computed as if alone, from values to gradients, lse included."""
    case = Case(group=group, length=300, window=90, kv_heads=2, batch=2)
    last = 300 // size
    edges = np.array([[1, 2, last // 2, last], [0, 1, 1, last]]) * size  # empty, short, long ones
    token = np.arange(case.length)
    starts = np.stack(
        [np.r_[0, row][np.searchsorted(row, token, side="right")] for row in edges]
    ).astype(np.int32)
    q, k, v = inputs(case)
    grad_out = torch.randn(*q.shape[:3], case.value_dim).to(q)
    given = torch.from_numpy(starts).to(DEVICE)
    out, lse = sliding_attention(
        q, k, v, window_size=case.window, scale=case.scale, document_start=given
    )
    got = [out, *torch.autograd.grad(out, (q, k, v), grad_out, retain_graph=True)]
    again = torch.autograd.grad(out, (q, k, v), grad_out)
    assert all(torch.equal(a, b) for a, b in zip(again, got[1:], strict=True))
    config = NSAConfig(select_block_size=size, compress_block_size=8, compress_stride=8)
    config = replace(config, window_size=case.window)
    mask = oracle.sliding_mask(case.length, case.length, config, 0, starts)
    arrays = [to_float64(x) for x in (q, k, v)]
    want, want_lse, _ = oracle.branch(*arrays, mask, case.scale)
    upstream = to_float64(grad_out)
    exact = [want, *oracle.branch_backward(*arrays, mask, case.scale, upstream)]
    plain = eager_attention(q, k, v, torch.from_numpy(mask).to(q.device), case.scale)
    hold(case, got, exact, [plain, *torch.autograd.grad(plain, (q, k, v), grad_out)])
    np.testing.assert_allclose(to_float64(lse), want_lse, rtol=1e-5, atol=1e-5)


@kernels
def test_bad_document_starts_are_refused() -> None:
    q, k, v = inputs(Case())
    start = torch.zeros(1, 49, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match=r"document_start is torch.int32 \(1, 49\); it must be"):
        sliding_attention(q, k, v, window_size=9, scale=1.0, document_start=start)


@kernels
@pytest.mark.parametrize(("group", "length"), [(1, 100), (3, 50), (16, 19), (80, 5)])
def test_groups(group: int, length: int) -> None:
    """80 heads are two tiles of rows, the second mostly empty."""
    check(Case(group=group, length=length, window=length // 2 + 1))


@kernels
@pytest.mark.kept(lambda window: window in (1, 17, 64, 89, 10**12))
@pytest.mark.parametrize("window", [1, 16, 17, 64, 65, 89, 90, 10**12])
def test_windows(window: int) -> None:
    check(Case(group=1, length=90, window=window))


@kernels
@pytest.mark.parametrize("length", [1, 2, 16, 64, 65])
def test_lengths(length: int) -> None:
    # Few rows err by chance, ours and eager's alike: a batch makes enough of them to compare.
    check(Case(length=length, window=30, group=2, batch=max(1, 64 // length)))


@kernels
@pytest.mark.parametrize(("head_dim", "value_dim"), [(8, 8), (32, 64), (80, 40), (5, 3)])
def test_head_dims(head_dim: int, value_dim: int) -> None:
    """Rows of 5 and 3 elements are nothing for the copy engine."""
    check(Case(head_dim=head_dim, value_dim=value_dim, length=40))


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, *LOW_PRECISION], ids=str)
@pytest.mark.parametrize("group", [2, 24])
def test_dtypes(dtype: torch.dtype, group: int) -> None:
    """24 heads are two tiles of rows of float32."""
    check(Case(group=group, batch=2, length=48 // group, window=14, dtype=dtype, head_dim=32))


@kernels
def test_without_the_copy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliding_plan, "supports_tma", lambda device: False)
    check(Case(group=1, length=90, window=70, kv_heads=2, head_dim=24))


SMALL_TILES = [Tiles(16, 16, 4, 1), Tiles(32, 16, 4, 2), Tiles(16, 64, 4, 2)]


@kernels
@pytest.mark.parametrize("tiles", SMALL_TILES, ids=str)
def test_tiles_of_devices_with_less_shared_memory(
    monkeypatch: pytest.MonkeyPatch, tiles: Tiles
) -> None:
    """Several tiles on the diagonal, queries wider than keys and the reverse."""
    for name in ("forward_tiles", "dq_tiles", "dkdv_tiles"):
        monkeypatch.setattr(SlidingPlan, name, lambda plan: tiles)
    check(Case(group=1, length=70, window=37))
    check(Case(group=6, length=15, window=7))


@pytest.mark.parametrize("kilobytes", [64, 99, 163, 227])
@pytest.mark.parametrize("dim", [32, 128, 256])
def test_tiles_fit_the_device(kilobytes: int, dim: int) -> None:
    """What stays and one of what streams past, of the smallest tiles at least."""
    plan = SlidingPlan(1, 4, 1, 4096, dim, dim, 2, kilobytes << 10)
    for tiles in (plan.forward_tiles(), plan.dq_tiles(), plan.dkdv_tiles()):
        held, streamed = sorted((tiles.block_m, tiles.block_n))
        assert (held + tiles.stages * streamed) * 2 * plan.row_width // 2 <= kilobytes << 10
        assert min(tiles.block_m, tiles.block_n) >= 16


@kernels
@pytest.mark.parametrize("layout", ["heads first", "last dimension strided", "expanded", "odd"])
def test_strides(layout: str) -> None:
    case = Case(kv_heads=2, batch=2, group=2, length=30)
    q, k, v = (x.detach() for x in inputs(case))
    if layout == "heads first":
        strange = [x.contiguous() for x in (q, k, v)]
    elif layout == "last dimension strided":
        strange = [x.mT.contiguous().mT for x in (q, k, v)]
    elif layout == "expanded":
        k, v = (x[:, :1].expand(-1, 2, -1, -1) for x in (k, v))
        strange = [q, k, v]
        k, v = k.contiguous(), v.contiguous()
    else:  # rows that start anywhere
        strange = [torch.nn.functional.pad(x, (1, 2))[..., 1:-2] for x in (q, k, v)]
    grad_out = torch.randn_like(q)
    upstream = grad_out if layout == "odd" else grad_out.contiguous()
    want = results(case, *(x.requires_grad_() for x in (q, k, v)), grad_out)
    got = results(case, *(x.detach().requires_grad_() for x in strange), upstream)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@kernels
def test_later_tokens_change_nothing() -> None:
    case = Case()
    q, k, v = (x.detach() for x in inputs(case))
    before, _ = attend(case, q, k, v)
    for x in (q, k, v):
        x[:, :, 37:] = torch.randn_like(x[:, :, 37:])
    after, _ = attend(case, q, k, v)
    assert torch.equal(before[:, :, :37], after[:, :, :37])
    assert not torch.equal(before[:, :, 37:], after[:, :, 37:])


@kernels
def test_gradient_of_the_log_sum_exp() -> None:
    case = Case(dtype=torch.float32, length=30)
    q, k, v = inputs(case)
    out, lse = attend(case, q, k, v)
    grads = (torch.randn_like(out), torch.randn_like(lse))
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    group = case.group
    keys, values = (x.repeat_interleave(group, 1) for x in exact[1:])
    seen = torch.from_numpy(case.mask()).to(q.device)
    scores = (case.scale * exact[0] @ keys.mT).masked_fill(~seen, float("-inf"))
    exact_pair = (scores.softmax(-1) @ values, scores.logsumexp(-1))
    got = torch.autograd.grad((out, lse), (q, k, v), grads)
    want = torch.autograd.grad(exact_pair, exact, [x.double() for x in grads])
    for name, a, b in zip(NAMES[1:], got, want, strict=True):
        assert_close(name, a, to_float64(b), None, torch.float32)
    only = torch.autograd.grad(attend(case, q, k, v)[1].sum(), (q, k, v))
    assert not only[2].any()


@kernels
def test_repeated_runs_give_equal_bits() -> None:
    case = Case(batch=2, kv_heads=2)
    q, k, v = inputs(case)
    grad_out = torch.randn_like(q)
    first, second = (results(case, q, k, v, grad_out) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@kernels
@pytest.mark.parametrize("shape", [(0, 2, 4, 8), (1, 2, 0, 8)])
def test_empty_inputs(shape: tuple[int, int, int, int]) -> None:
    x = torch.zeros(shape, device=DEVICE, requires_grad=True)
    out, lse = attend(Case(head_dim=8), x, x, x)
    out.sum().backward()
    assert out.shape == shape
    assert lse.shape == shape[:3]


@kernels
def test_operators_obey_the_library_rules() -> None:
    case = Case(length=20, kv_heads=2)
    q, k, v = inputs(case)
    start = torch.arange(20, dtype=torch.int32, device=DEVICE)[None] // 8 * 8
    options = (case.window, case.scale)
    for document_start in (None, start):
        torch.library.opcheck(sliding.forward, (q, k, v, document_start, *options))
    out, lse = (x.detach() for x in sliding.forward(q, k, v, None, *options))
    q, k, v = (x.detach() for x in (q, k, v))
    grads = torch.randn_like(out), torch.randn_like(lse)
    for document_start in (None, start):
        arguments = (q, k, v, out, lse, *grads, document_start, *options)
        torch.library.opcheck(sliding.backward, arguments)


@kernels
def test_another_document_may_be_large() -> None:
    """Nothing of it reaches a document that shares its tiles, whatever becomes of its own rows."""
    case = Case(group=2, length=64, window=64)
    q, k, v = inputs(case)
    start = torch.arange(64, dtype=torch.int32, device=DEVICE)[None] // 32 * 32

    def run(key: Tensor, value: Tensor) -> list[Tensor]:
        out, lse = sliding_attention(
            q, key, value, window_size=64, scale=case.scale, document_start=start
        )
        rows = out[:, :, 32:], lse[:, :, 32:]
        gradients = torch.autograd.grad(sum(x.sum() for x in rows), (q, key, value))
        return [*rows, *(x[:, :, 32:] for x in gradients)]

    first = (torch.arange(64, device=DEVICE) < 32)[:, None]
    large = torch.finfo(case.dtype).max
    key, value = (x.detach().clone().masked_fill(first, large).requires_grad_() for x in (k, v))
    for plain, found in zip(run(k, v), run(key, value), strict=True):
        assert torch.equal(plain, found)


@kernels
def test_compiles_into_one_graph_with_dynamic_length() -> None:
    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = attend(Case(group=1), 2 * q, k, v)
        return (out * out).sum() + lse.sum()

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=counter)
    for length in (33, 20, 41):
        tensors = inputs(Case(group=1, length=length, dtype=torch.float32))
        want = torch.autograd.grad(loss(*tensors), tensors)
        got = torch.autograd.grad(compiled(*tensors), tensors)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)
    assert counter.frame_count == 1


@kernels
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q[0], k, v), "query has shape .* it must have 4 dimensions"),
        (lambda q, k, v: (q, k.float(), v), "key is torch.float32, query .* they must agree"),
        (lambda q, k, v: (q.double(), k.double(), v.double()), "query is torch.float64; the Tri"),
        (lambda q, k, v: (q, k[..., :8], v), "key has shape .* it must be "),
        (lambda q, k, v: (q, k, v[:, :, :8]), "value has shape .* it must be "),
        (lambda q, k, v: (q[:, :3], k, v), "key has 2 heads; query's 3 must be a multiple of it"),
        (lambda q, k, v: (q, k, v.repeat(1, 1, 1, 17)), "head dims are 16 .* 272 .* 1 to 256"),
        (lambda q, k, v: (q, k, v.to("meta")), "value is on meta, query on "),
    ],
)
def test_refused_tensors(change: Callable[..., tuple[Tensor, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attend(Case(), *change(*inputs(Case(kv_heads=2, group=2))))


@kernels
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window_size": 0, "scale": 1.0}, "window_size is 0; a query sees at least its own key"),
        ({"window_size": 1, "scale": 0.0}, "scale is 0.0; it must be positive"),
    ],
)
def test_refused_options(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sliding_attention(*inputs(Case()), **options)  # type: ignore[arg-type]


@pytest.mark.skipif(INTERPRETED, reason="the interpreter takes CPU tensors")
def test_refused_on_the_cpu() -> None:
    x = torch.zeros(1, 1, 4, 16)
    with pytest.raises(ValueError, match="the Triton kernels need CUDA tensors, got cpu"):
        attend(Case(), x, x, x)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        Case(16, 700, 512, 128, 128),
        Case(8, 700, 300, 128, 128, kv_heads=2, dtype=torch.float16),
        Case(4, 601, 200, 64, 64, batch=2),
        Case(3, 601, 200, 96, 96),
        Case(2, 500, 130, 192, 128, kv_heads=2),
        Case(1, 401, 129, 256, 256, kv_heads=3),
        Case(4, 401, 100, 128, 128, dtype=torch.float32),
    ],
    ids=str,
)
def test_sizes_of_models(case: Case) -> None:
    check(case)


@pytest.mark.gpu
def test_under_a_cuda_graph() -> None:
    case = Case(16, 300, 128, 128, 128)
    q, k, v = inputs(case)
    grad_out = torch.randn_like(q)
    results(case, q, k, v, grad_out)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = results(case, q, k, v, grad_out)
    with torch.no_grad():
        for x in (q, k, v, grad_out):
            x.copy_(torch.randn_like(x))
    graph.replay()
    for a, b in zip(got, results(case, q, k, v, grad_out), strict=True):
        assert torch.equal(a, b)


@pytest.mark.large
@pytest.mark.gpu
def test_offsets_past_two_to_the_31() -> None:
    """64 heads of 128 over 2^18 tokens and some: the last rows, and gradients of the last keys."""
    case = Case(16, 2**18 + 5, 512, 128, 128, kv_heads=4)
    tail = 600

    def normal(heads: int) -> Tensor:
        x = torch.randn(1, case.length, heads, 128, dtype=case.dtype, device="cuda")
        return x.transpose(1, 2)

    q, k, v = (normal(heads).requires_grad_() for heads in (64, 4, 4))
    grad_out = normal(64)
    grad_out[:, :, :-5] = 0
    got = results(case, q, k, v, grad_out)
    short = Case(16, tail, 512, 128, 128, kv_heads=4)
    ends = [x.detach()[:, :, -tail:].requires_grad_() for x in (q, k, v)]
    want = results(short, *ends, grad_out[:, :, -tail:])
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(to_float64(a[:, :, -5:]), to_float64(b[:, :, -5:]), atol=2**-7)
