"""`selected_attention`: given blocks, on every backend, against the float64 oracle."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nsa_flex import NSAConfig, align_packed, nsa_attention, selected_attention
from nsa_flex.hot_path import ForwardBackward, count_graphs, find_syncs, find_value_reads
from nsa_flex.masks.selected import visible_blocks
from reference import oracle
from reference.accuracy import assert_close, eager_attention, gradients, leaf, to_float64

DENSE = pytest.param("dense", "cpu", id="cpu-dense")
FLEX_ON_CPU = pytest.param("flex", "cpu", id="cpu-flex")  # without gradients
ON_CUDA = [
    pytest.param(backend, "cuda", id=f"cuda-{backend}", marks=pytest.mark.gpu)
    for backend in ("triton", "flex", "dense")
]
# FlexAttention compiles anew for each of these; tests/test_backends.py has them for it.
KERNELS = pytest.mark.parametrize(("backend", "device"), [DENSE, ON_CUDA[0]])
TRAINING = pytest.mark.parametrize(("backend", "device"), [DENSE, *ON_CUDA])
EVERYWHERE = pytest.mark.parametrize(("backend", "device"), [DENSE, FLEX_ON_CPU, *ON_CUDA])


@dataclass(frozen=True)
class Case:
    """Sizes of one call; the last `queries` of `keys` tokens ask unless `offset` says others."""

    batch: int = 2
    kv_heads: int = 2
    group: int = 2
    queries: int = 50
    keys: int = 120
    dims: tuple[int, int] = (32, 16)
    block_size: int = 16
    slots: int = 4
    offset: int | tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float32

    @property
    def config(self) -> NSAConfig:
        size = self.block_size
        return NSAConfig(size, size, size, num_selected_blocks=self.slots + 3)

    def positions(self) -> np.ndarray[Any, Any]:
        """(B or 1, Sq)"""
        offset = self.keys - self.queries if self.offset is None else self.offset
        return oracle.positions(self.queries, offset)

    def query_offset(self, device: str) -> int | Tensor | None:
        if isinstance(self.offset, tuple):
            return torch.tensor(self.offset, device=device)
        return self.offset


def tensors(case: Case, device: str = "cpu", *, grad: bool = True) -> list[Tensor]:
    """Query, key and value."""
    shapes = (
        (case.batch, case.kv_heads * case.group, case.queries, case.dims[0]),
        (case.batch, case.kv_heads, case.keys, case.dims[0]),
        (case.batch, case.kv_heads, case.keys, case.dims[1]),
    )
    return [leaf(shape, case.dtype, device, grad=grad) for shape in shapes]


def random_blocks(case: Case) -> Tensor:
    """int32: any blocks in any order, once each: future ones and -1 between them, or nothing."""
    shape = (case.batch, case.kv_heads, case.queries)
    count = -(-case.keys // case.block_size) + 1
    order = torch.rand(*shape, count + case.slots).argsort(-1)[..., : case.slots]
    blocks = torch.where(order < count, order, -1).to(torch.int32)
    blocks[:, :, ::7] = -1
    return blocks


def check(
    case: Case,
    backend: str,
    device: str,
    *,
    blocks: Tensor | None = None,
    document_start: Tensor | None = None,
    inputs: list[Tensor] | None = None,
    **options: Any,
) -> None:
    """Values, log-sum-exps and, but for FlexAttention on the CPU, gradients."""
    training = (backend, device) != ("flex", "cpu")
    q, k, v = tensors(case, device, grad=training) if inputs is None else inputs
    blocks = random_blocks(case) if blocks is None else blocks
    seen = oracle.selected_mask(
        blocks.numpy(), case.keys, case.config, case.positions()[:, 0], document_start
    )
    scale = options.get("scale", case.dims[0] ** -0.5)
    sizes = {} if "config" in options else {"block_size": case.block_size}

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return selected_attention(
            *(q, k, v, blocks.to(device)),
            **sizes,
            query_offset=case.query_offset(device),
            document_start=None if document_start is None else document_start.to(device),
            backend=backend,
            return_lse=True,
            **options,
        )

    mask = torch.from_numpy(seen).to(device)
    arrays = [to_float64(x) for x in (q, k, v)]
    want, want_lse, _ = oracle.branch(*arrays, seen, scale)
    out, lse = call(q, k, v)
    assert out.dtype == case.dtype
    assert lse.dtype == torch.float32
    assert not lse.requires_grad
    eager = eager_lse = None
    if case.dtype != torch.float32:
        eager = eager_attention(q, k, v, mask, scale)
        keys = k.repeat_interleave(case.group, 1)
        scores = (q @ keys.mT * scale).masked_fill(
            ~mask.repeat_interleave(case.group, 1), float("-inf")
        )
        eager_lse = scores.logsumexp(-1)
    assert_close("output", out, want, eager, case.dtype)
    assert_close("log-sum-exp", lse, want_lse, eager_lse, case.dtype)
    blind = ~mask.any(-1).repeat_interleave(case.group, 1)
    assert (out[blind] == 0).all()
    assert (lse[blind] == float("-inf")).all()
    if not training:
        return
    grad_out = torch.randn_like(out)
    want_grads = oracle.branch_backward(*arrays, seen, scale, to_float64(grad_out))
    _, grads = gradients(lambda *x: call(*x)[0], [q, k, v], grad_out)
    eager_grads: list[Any] = [None] * 3
    if eager is not None:
        eager_grads = gradients(lambda *x: eager_attention(*x, mask, scale), [q, k, v], grad_out)[
            1
        ]
    least = 0.1 * float(grad_out.float().norm())
    for name, got, expected, plain in zip("qkv", grads, want_grads, eager_grads, strict=True):
        assert_close(f"gradient of {name}", got, expected, plain, case.dtype, least=least)
    assert (grads[0][blind] == 0).all()


@EVERYWHERE
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_block_sizes(block_size: int, backend: str, device: str) -> None:
    case = Case(block_size=block_size, keys=3 * block_size + 5, queries=2 * block_size)
    check(case, backend, device)


@KERNELS
@pytest.mark.parametrize("group", [1, 3, 4, 16])
def test_group_sizes(group: int, backend: str, device: str) -> None:
    check(Case(group=group), backend, device)


@KERNELS
@pytest.mark.parametrize("dims", [(64, 64), (80, 48), (192, 128)])
def test_head_dims(dims: tuple[int, int], backend: str, device: str) -> None:
    check(Case(dims=dims, batch=1), backend, device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("backend", "device"), [DENSE, *ON_CUDA])
def test_low_precision(dtype: torch.dtype, backend: str, device: str) -> None:
    check(Case(dtype=dtype, block_size=64, keys=300, queries=300, group=4), backend, device)


@EVERYWHERE
@pytest.mark.parametrize("offset", [0, 41])
def test_offset_the_host_knows(offset: int, backend: str, device: str) -> None:
    check(Case(offset=offset), backend, device)


@pytest.mark.parametrize(
    ("backend", "device"), [DENSE, FLEX_ON_CPU, *ON_CUDA, pytest.param("auto", "cpu")]
)
def test_offset_a_row(backend: str, device: str) -> None:
    check(Case(offset=(3, 70)), backend, device)


@given(
    batch=st.integers(1, 2),
    group=st.integers(1, 4),
    keys=st.integers(1, 90),
    slots=st.integers(1, 5),
    size=st.sampled_from([16, 32]),
    data=st.data(),
)
def test_random_sizes(
    batch: int, group: int, keys: int, slots: int, size: int, data: st.DataObject
) -> None:
    queries = data.draw(st.integers(1, keys))
    case = Case(batch, 2, group, queries, keys, block_size=size, slots=slots)
    check(case, "auto", "cpu")


@EVERYWHERE
@pytest.mark.parametrize("offset", [None, 37])
def test_documents(offset: int | None, backend: str, device: str) -> None:
    """A block of another document is not attended, wherever the queries begin."""
    case = Case(batch=1, keys=150, queries=150 if offset is None else 60, offset=offset)
    layout = align_packed(torch.tensor([0, 21, 22, 70, 112]), 112, case.config)
    first = case.positions()[0, 0]
    start = layout.start[:, first : first + case.queries]
    assert start.shape == (1, case.queries)
    assert len(start.unique()) > 2
    check(case, backend, device, document_start=start)


@EVERYWHERE
def test_a_document_that_begins_inside_a_block(backend: str, device: str) -> None:
    """The block that it shares with the document before is not attended at all."""
    case = Case(batch=1, keys=48, queries=48, slots=3)
    q, k, v = tensors(case, device, grad=False)
    blocks = torch.arange(3, dtype=torch.int32, device=device).expand(1, 2, 48, 3)
    start = torch.where(torch.arange(48) < 20, 0, 20)[None].to(device)

    def call(key: Tensor) -> Tensor:
        return selected_attention(
            q, key, v, blocks, block_size=16, document_start=start, backend=backend
        )

    before = call(k)
    assert (before[:, :, 20:32] == 0).all()  # they see block 1 alone, which begins at 16
    assert (before[:, :, 32:] != 0).any()
    changed = k.clone()
    changed[:, :, :20] += 100.0
    assert torch.equal(call(changed)[:, :, 20:], before[:, :, 20:])


@EVERYWHERE
def test_no_blocks(backend: str, device: str) -> None:
    case = Case()
    none = torch.full((case.batch, case.kv_heads, case.queries, case.slots), -1, dtype=torch.int32)
    check(case, backend, device, blocks=none)


@EVERYWHERE
def test_what_counts_as_no_block(backend: str, device: str) -> None:
    """Repeated, future, missing and impossible ones, int64, in any order."""
    case = Case(batch=1, kv_heads=1, queries=64, keys=64, slots=3)
    blocks = torch.tensor([2, 0, 1]).expand(1, 1, 64, 3)
    junk = torch.tensor([1, -1, 2, 9, 0, -5, 2**62, 3, 0])  # block 3 is the last queries' own
    junk = junk.expand(1, 1, 64, 9).clone()
    junk[junk == 3] = 2
    q, k, v = tensors(case, device, grad=False)
    results = [
        selected_attention(q, k, v, each.to(device), block_size=16, backend=backend)
        for each in (blocks, junk)
    ]
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)
    check(case, backend, device, blocks=blocks.to(torch.int32).contiguous())


@given(
    size=st.sampled_from([1, 4, 16]),
    keys=st.integers(1, 60),
    slots=st.integers(1, 6),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    data=st.data(),
)
def test_the_blocks_that_backends_get(
    size: int, keys: int, slots: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    """Ascending, each once, visible to the query, then -1; queries may leave the keys."""
    most = torch.iinfo(dtype).max // 2 + 1
    given_blocks = st.one_of(st.integers(-1, 2), st.integers(0, keys // size + 2), st.just(most))
    rows = [data.draw(st.lists(given_blocks, min_size=slots, max_size=slots)) for _ in range(3)]
    positions = [data.draw(st.integers(0, keys + size)) for _ in rows]
    start = [data.draw(st.integers(0, t)) for t in positions]
    blocks, document_start = torch.tensor(rows, dtype=dtype)[None, None], torch.tensor([start])
    config = NSAConfig(size, size, size)
    for first in (None, document_start):
        got = visible_blocks(config, blocks, torch.tensor([positions]), keys, first)
        assert got.dtype == torch.int32
        for row, t, begin, found in zip(rows, positions, start, got[0, 0].tolist(), strict=True):
            begin = 0 if first is None else begin
            want = sorted({j for j in row if begin <= j * size <= min(t, keys - 1)})
            assert found == want + [-1] * (slots - len(want))


def test_a_repeated_block_leaves_no_gap() -> None:
    blocks = torch.tensor([0, 1, 0, 2, 1])[None, None, None]
    got = visible_blocks(NSAConfig(), blocks, torch.tensor([[200]]), 201)
    assert got.flatten().tolist() == [0, 1, 2, -1, -1]


@TRAINING
def test_any_strides(backend: str, device: str) -> None:
    case = Case()
    shapes = [x.shape for x in tensors(case)]
    inputs = [
        torch.randn(*shape[:2], 2 * shape[2], shape[3], device=device)[:, :, ::2].requires_grad_()
        for shape in shapes[:2]
    ]
    batch, heads, length, dim = shapes[2]
    columns = torch.randn(batch, heads, dim, length, device=device)
    inputs.append(columns.mT.requires_grad_())
    blocks = random_blocks(case).transpose(1, 2).contiguous().transpose(1, 2)
    assert not any(x.is_contiguous() for x in (*inputs, blocks))
    check(case, backend, device, inputs=inputs, blocks=blocks)


@KERNELS
@pytest.mark.parametrize("counts", [(0, 1), (1, 2), (3, 1)])
def test_counts_of_dense_blocks_change_nothing(
    counts: tuple[int, int], backend: str, device: str
) -> None:
    initial, local = counts
    check(Case(), backend, device, num_initial_blocks=initial, num_local_blocks=local)
    config = replace(Case().config, num_initial_blocks=initial, num_local_blocks=local)
    check(Case(), backend, device, config=config, scale=0.2)


@KERNELS
def test_blocks_of_nsa_give_its_selected_branch(backend: str, device: str) -> None:
    case = Case(queries=120)
    q, k, v = tensors(case, device, grad=False)
    config = case.config
    ck, cv = (x.unfold(2, 16, 16).mean(-1) for x in (k, v))
    gates = torch.zeros(*q.shape[:3], 3, device=device)
    gates[..., 1] = 1.0
    want, aux = nsa_attention(q, k, v, ck, cv, gates, config=config, return_aux=True)
    out = selected_attention(q, k, v, aux.blocks, config=config, backend=backend)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_the_kernels_ran(backend: str) -> None:
    case = Case(queries=120)
    inputs = tensors(case, "cuda")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        selected_attention(*inputs, random_blocks(case).cuda(), block_size=16, backend=backend)
    assert "nsa_flex::selected_forward" in {event.key for event in profile.key_averages()}


@pytest.mark.gpu
def test_blocks_too_large_for_triton_run_elsewhere() -> None:
    check(Case(block_size=256, keys=600, queries=600, group=4), "auto", "cuda")


def step(backend: str) -> Any:
    def attend(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, start: Tensor | None) -> Tensor:
        return selected_attention(
            q, k, v, blocks, block_size=16, document_start=start, backend=backend
        )

    return attend


@pytest.mark.kept(lambda backend: backend == "dense")
@EVERYWHERE
def test_one_graph_compiled(backend: str, device: str) -> None:
    """Generated code gives what eager gives, at lengths that no tile divides."""
    training = (backend, device) != ("flex", "cpu")
    case = Case(queries=77, keys=77)
    inputs = tensors(case, device, grad=training)
    blocks = random_blocks(case).to(device)
    start = torch.where(torch.arange(77) < 48, 0, 48).expand(2, 77).to(device)
    out = step(backend)(*inputs, blocks, start)
    compiled = torch.compile(step(backend), fullgraph=True)(*inputs, blocks, start)
    torch.testing.assert_close(compiled, out, rtol=1e-5, atol=1e-5)
    if training:
        grad_out = torch.randn_like(out)
        want, got = (torch.autograd.grad(x, inputs, grad_out) for x in (out, compiled))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@TRAINING
def test_number_of_graphs(backend: str, device: str) -> None:
    """One of a single token, one of all other lengths."""
    batches = []
    for length in (100, 7, 16, 1, 17, 2, 64):
        case = Case(queries=length, keys=length)
        blocks, start = random_blocks(case).to(device), torch.zeros(2, length, device=device).int()
        batches.append((*tensors(case, device), blocks, start))
    assert count_graphs(step(backend), batches, dynamic=True).graphs == 2


def test_a_block_size_that_changes_compiles_anew() -> None:
    compiled = torch.compile(selected_attention, fullgraph=True, backend="aot_eager")
    for size in (16, 32, 64):
        case = Case(block_size=size)
        inputs, blocks = tensors(case, grad=False), random_blocks(case)
        got, want = (f(*inputs, blocks, block_size=size) for f in (compiled, selected_attention))
        torch.testing.assert_close(got, want)


@EVERYWHERE
def test_the_host_reads_nothing(backend: str, device: str) -> None:
    training = (backend, device) != ("flex", "cpu")
    case = Case(queries=64, keys=64)
    arguments = (*tensors(case, device, grad=training), random_blocks(case).to(device))
    start = torch.zeros(2, 64, dtype=torch.int64, device=device)
    function = ForwardBackward(step(backend)) if training else step(backend)
    assert find_syncs(function, *arguments, start) == []
    if backend == "dense":  # the others have no meta device
        assert find_value_reads(function, *arguments, start) == []


def call(change: dict[str, Any] | None = None, **options: Any) -> Tensor:
    """A sound call on the CPU with some arguments changed."""
    case = Case(queries=120)
    q, k, v = tensors(case, grad=False)
    arguments: dict[str, Any] = {"query": q, "key": k, "value": v, "blocks": random_blocks(case)}
    arguments |= {"block_size": 16} if "config" not in options else {}
    arguments |= options | (change or {})
    return selected_attention(**arguments)


REFUSALS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"query": [1]}, TypeError, "query must be a Tensor, got list"),
    ({"key": torch.zeros(2, 120, 32)}, ValueError, "key must be 4-D"),
    ({"key": torch.zeros(2, 3, 120, 32)}, ValueError, "key has 3 heads; query's 4 must be a"),
    (
        {"value": torch.zeros(2, 2, 119, 16)},
        ValueError,
        r"value has shape .*; expected \(2, 2, ",
    ),
    ({"value": torch.zeros(2, 2, 120, 0)}, ValueError, "value .* must not be empty"),
    ({"value": torch.zeros(2, 2, 120, 16).double()}, ValueError, "value is torch.float64, query"),
    (
        {"blocks": torch.zeros(2, 4, 120, 4).int()},
        ValueError,
        r"blocks has shape .*\(2, 2, 120,",
    ),
    ({"blocks": torch.zeros(2, 2, 120, 0).int()}, ValueError, r"blocks .*expected \(2, 2, 120, 1"),
    ({"blocks": torch.zeros(2, 2, 120, 4)}, ValueError, "blocks is torch.float32; it must be"),
    ({"block_size": None}, ValueError, "neither config nor block_size is given: give one"),
    ({"block_size": 48}, ValueError, "block_size=48 must be a power of two, at least 16"),
    ({"block_size": 8}, ValueError, "block_size=8 must be a power of two, at least 16"),
    ({"block_size": 16.0}, TypeError, "block_size must be an int, got float"),
    ({"config": {}}, TypeError, "config must be an NSAConfig, got dict"),
    ({"config": NSAConfig(), "block_size": 64}, ValueError, "config is given and block_size too"),
    (
        {"config": NSAConfig(), "num_local_blocks": 1},
        ValueError,
        "and num_local_blocks too",
    ),
    ({"config": NSAConfig(16, 16, 48)}, ValueError, "config.select_block_size=48 must be a power"),
    ({"num_local_blocks": 0}, ValueError, "num_local_blocks=0 must be at least 1"),
    ({"num_initial_blocks": -1}, ValueError, "num_initial_blocks=-1 must be at least 0"),
    ({"scale": 0.0}, ValueError, "scale is 0.0; it must be positive"),
    ({"query_offset": 1}, ValueError, "query_offset=1 with 120 queries leaves the 120 keys"),
    ({"query_offset": torch.zeros(3).int()}, ValueError, r"query_offset must be .*int \(2,\)"),
    ({"document_start": torch.zeros(2, 9).int()}, ValueError, r"document_start must be int \(2, "),
    ({"backend": "triton"}, ValueError, "'triton' cannot compute the selected branch: it needs a"),
    (
        {"backend": "sdpa"},
        ValueError,
        "backend 'sdpa' has no selected branch; dense, flex",
    ),
    (
        {"backend": "best"},
        ValueError,
        "backend 'best' has no selected branch; dense, flex",
    ),
    ({"backend": {"selected": "dense"}}, TypeError, "backend must be a name, got dict"),
]


@pytest.mark.parametrize(("change", "error", "message"), REFUSALS)
def test_refusals(change: dict[str, Any], error: type[Exception], message: str) -> None:
    call()
    with pytest.raises(error, match=message):
        call(change, **({"config": change["config"]} if "config" in change else {}))


def test_flex_does_not_train_on_the_cpu() -> None:
    inputs = tensors(Case())
    with pytest.raises(ValueError, match="no backward on CPU"):
        selected_attention(*inputs, random_blocks(Case()), block_size=16, backend="flex")


def test_inputs_stay_as_they_were() -> None:
    case = Case()
    inputs, blocks = tensors(case), random_blocks(case)
    before = blocks.clone()
    selected_attention(*inputs, blocks, block_size=16).sum().backward()
    assert torch.equal(blocks, before)
