"""Attention over shards of sequences finds what one process finds: outputs, all gradients."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.ranks import TWO_GPUS, on_ranks
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from nsa_flex import Compression, NSAConfig, nsa_attention
from nsa_flex.compression import compress_what_is_read
from nsa_flex.config import BRANCHES, BranchName
from nsa_flex.parallel import (
    SequenceShards,
    context_parallel_attention,
    sent_bytes,
    shard_sequence,
)
from patching.tiny_models import NSA

# Sums of some hundred float64 terms of size 1 in another order.
ROUNDING = 1e-12


@dataclasses.dataclass
class Problem:
    """Whole sequences, the same on all ranks, in float64.

    chunk: tokens of each of the 2P chunks of keys; queries are `past` tokens fewer.
    """

    chunk: int = 24
    group: int = 3
    phi: Any = "mlp"
    rows: int = 2
    past_chunks: int = 0  # of l' / 2 tokens each
    offset: int | None = None  # of the first query; by default the last query is at the last key
    documents: bool = False
    own_window: bool = False
    at_once: int | None = None
    config: NSAConfig = NSA
    heads: int = 2
    dims: tuple[int, int] = (8, 6)  # of keys and of values

    def __post_init__(self) -> None:
        size = dist.get_world_size()
        torch.manual_seed(5)
        (dim, value_dim), length = self.dims, 2 * size * self.chunk
        self.queries = length - 2 * size * 4 * self.past_chunks

        def tensor(heads: int, tokens: int, width: int) -> Tensor:
            x = torch.randn(self.rows, tokens, heads, width, dtype=torch.float64)
            return x.transpose(1, 2)

        self.inputs = [
            tensor(self.heads * self.group, self.queries, dim),
            tensor(self.heads, length, dim),
            tensor(self.heads, length, value_dim),
            tensor(self.heads * self.group, self.queries, len(self.config.branches)).sigmoid(),
        ]
        if self.own_window:
            self.inputs += [
                tensor(self.heads, length, width) for width in (dim, value_dim, dim, value_dim)
            ]
        self.phis = nn.ModuleList(
            Compression(self.config, self.heads, width, self.phi, dtype=torch.float64)
            for width in (dim, value_dim)
        )
        with torch.no_grad():
            for parameter in self.phis.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
        self.grad = tensor(self.heads * self.group, self.queries, value_dim)
        self.start: Tensor | None = None
        if self.documents:
            starts = torch.tensor([0, 8, 8 * (length // 24), 8 * (length // 11)])
            first = length - self.queries if self.offset is None else self.offset
            place = first + torch.arange(self.queries)
            rank = torch.searchsorted(starts.sort().values, place, right=True) - 1
            self.start = starts.sort().values[rank].expand(self.rows, -1)

    def alone(self) -> tuple[Tensor, list[Tensor | None]]:
        """Output and gradients of inputs, then of φ, in one process; None of what is not read."""
        inputs = [x.clone().requires_grad_() for x in self.inputs]
        query, key, value, gates, *own = inputs
        source, window = (own[:2], own[2:]) if own else ((key, value), (None, None))
        compressed = compress_what_is_read(*self.phis, *source)
        output = nsa_attention(
            query,
            key,
            value,
            *compressed,
            gates,
            config=self.config,
            sliding_key=window[0],
            sliding_value=window[1],
            query_offset=self.offset,
            document_start=self.start,
        )
        return output.detach(), self.gradients(output, inputs, self.grad)

    def gradients(self, output: Tensor, inputs: list[Tensor], grad: Tensor) -> list[Tensor | None]:
        return list(
            torch.autograd.grad(
                output, [*inputs, *self.phis.parameters()], grad, allow_unused=True
            )
        )

    def sharded(self, mesh: Any, attend: Any = None) -> tuple[Tensor, list[Tensor | None]]:
        """The same of this rank's shards; of φ the sum over ranks."""
        inputs = [shard_sequence(x, mesh, 2).clone().requires_grad_() for x in self.inputs]
        query, key, value, gates, *own = inputs
        start = None if self.start is None else shard_sequence(self.start, mesh)
        output = (attend or context_parallel_attention)(
            *(query, key, value, gates, *self.phis),
            mesh=mesh,
            config=self.config,
            compressed_source=tuple(own[:2]) if own else None,
            sliding_key=own[2] if own else None,
            sliding_value=own[3] if own else None,
            query_offset=self.offset,
            document_start=start,
            kv_heads_at_once=self.at_once,
        )
        grad = shard_sequence(self.grad, mesh, 2)
        found = self.gradients(output, inputs, grad)
        for gradient in found[len(inputs) :]:
            if gradient is not None:
                dist.all_reduce(gradient)
        return output.detach(), found

    def check(self, case: str, mesh: Any, attend: Any = None) -> None:
        """That the two are equal."""
        output, gradients = self.alone()
        own, found = self.sharded(mesh, attend)
        pairs: list[Any] = [(own, shard_sequence(output, mesh, 2))]
        for place, (got, want) in enumerate(zip(found, gradients, strict=True)):
            is_input = place < len(self.inputs) and want is not None
            pairs.append((got, shard_sequence(want, mesh, 2) if is_input else want))
        for place, (got, want) in enumerate(pairs):
            if want is None:
                assert got is None, f"{case}: a gradient of what is not read, at {place}"
                continue
            assert float(want.abs().max()) > 0, f"{case}: nothing to compare at {place}"
            error = float((got - want).abs().max() / want.abs().max())
            assert error < ROUNDING, f"{case}: {error} at {place}"


WIDE_HALO = dataclasses.replace(NSA, compress_stride=2)
SELECTED = dataclasses.replace(NSA, branches=("selected",))
NOT_SELECTED = dataclasses.replace(NSA, branches=("compressed", "sliding"))
SLIDING = dataclasses.replace(NSA, branches=("sliding",))
COMPRESSED = dataclasses.replace(NSA, branches=("compressed",))
ONE_KEY, TWO_KEYS = (dataclasses.replace(NSA, window_size=w) for w in (1, 2))
NO_HALO = dataclasses.replace(NSA, compress_stride=8)

CASES: dict[str, dict[str, Any]] = {
    "G 3, mlp": {},
    "G 1, weighted, packed": {"group": 1, "phi": "weighted", "documents": True},
    "G 4, linear, one head at once": {"group": 4, "phi": "linear", "at_once": 1},
    "mean, one block a chunk": {"phi": "mean", "chunk": 8, "at_once": 2},
    "weighted, after a past": {"phi": "weighted", "past_chunks": 1},
    "packed after a past": {"past_chunks": 3, "documents": True, "rows": 1},
    "at an offset, before other keys": {"past_chunks": 4, "offset": 13, "at_once": 1},
    "packed at an offset": {"past_chunks": 3, "offset": 29, "documents": True, "rows": 1},
    "window of its own": {"own_window": True, "documents": True, "at_once": 1},
    "window of its own over chunks": {"own_window": True, "chunk": 8, "group": 1},
    "window of its own, of two keys": {"own_window": True, "config": TWO_KEYS, "rows": 1},
    "window of its own after a past": {"own_window": True, "past_chunks": 1, "documents": True},
    "halo of three strides": {"config": WIDE_HALO, "chunk": 40},
    "the selected branch alone": {"config": SELECTED, "phi": "mean"},
    "no halo": {"config": NO_HALO, "phi": "linear"},
    "not selected": {"config": NOT_SELECTED, "documents": True, "at_once": 1},
    "not selected, window of its own": {"config": NOT_SELECTED, "own_window": True, "chunk": 8},
    "not selected, after a past": {"config": NOT_SELECTED, "past_chunks": 3, "offset": 29},
    "sliding alone": {"config": SLIDING, "at_once": 1, "phi": "mean"},
    "sliding alone, of its own": {"config": SLIDING, "own_window": True, "phi": "mean"},
    "sliding alone, after a past": {"config": SLIDING, "past_chunks": 1, "phi": "mean"},
    "compressed alone": {"config": COMPRESSED, "at_once": 1},
    "selected alone, beside a window": {"config": SELECTED, "own_window": True, "phi": "mean"},
}


@pytest.mark.kept(lambda world: world == 2)
@pytest.mark.parametrize("world", [2, 4])
def test_shards_find_what_one_process_finds(world: int, tmp_path: Path) -> None:
    on_ranks(world, "cpu", tmp_path, every_case)


def every_case(device: torch.device) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for case, options in CASES.items():
        problem = Problem(**options)
        problem.check(case, mesh)


@pytest.mark.exhaustive
def test_compiled_without_a_graph_break(tmp_path: Path) -> None:
    on_ranks(2, "cpu", tmp_path, compiled)


@pytest.mark.exhaustive
def test_a_window_of_its_own_compiled(tmp_path: Path) -> None:
    on_ranks(2, "cpu", tmp_path, compiled, {"own_window": True})


@pytest.mark.exhaustive
def test_without_a_selected_branch_compiled(tmp_path: Path) -> None:
    on_ranks(2, "cpu", tmp_path, compiled, {"config": NOT_SELECTED})


def compiled(device: torch.device, options: dict[str, Any] | None = None) -> None:
    """One graph for all lengths; what AOT autograd makes of it is compared with whole models."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    attend = torch.compile(
        context_parallel_attention, backend="eager", fullgraph=True, dynamic=True
    )
    for chunk in (24, 32):
        problem = Problem(chunk=chunk, group=1, phi="weighted", **(options or {}))
        problem.check(f"chunk {chunk}", mesh, attend)
    assert counters["stats"]["unique_graphs"] == 1


def test_gradients_in_half_precision(tmp_path: Path) -> None:
    on_ranks(2, "cpu", tmp_path, half_precision)


def half_precision(device: torch.device) -> None:
    """Those of keys and values err at most twice as much as one process's."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    every_block = dataclasses.replace(NSA, num_selected_blocks=16)  # no choice hangs on rounding
    for options in (
        {"config": every_block, "group": 8},
        {"config": every_block, "own_window": True, "chunk": 8},
        {"config": dataclasses.replace(NOT_SELECTED, window_size=20), "group": 8},
        {"config": SLIDING, "phi": "mean", "chunk": 8},
    ):
        problem = Problem(**options)
        found: list[list[Any]] = []
        for dtype in (torch.bfloat16, torch.float64):
            problem.inputs = [x.bfloat16().to(dtype) for x in problem.inputs]
            problem.grad, problem.phis = problem.grad.to(dtype), problem.phis.bfloat16().to(dtype)
            found.append(problem.alone()[1])
            if dtype == torch.bfloat16:
                found.append(problem.sharded(mesh)[1])
        keys = (1, 2, *range(4, len(problem.inputs)))  # and values, of all branches
        for plain, own, exact in ([x[i] for x in found] for i in keys):
            if exact is None:
                continue
            plain, exact = (shard_sequence(x, mesh, 2) for x in (plain, exact))
            assert own.dtype == torch.bfloat16
            assert (own - exact).norm() <= 2 * (plain - exact).norm(), options


class CountedBytes(TorchDispatchMode):
    """What collectives take from this rank, in a ring: a gathered shard goes P - 1 times on."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered = self.scattered = 0
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, size = func._schema.name, dist.get_world_size()
        if "c10d" in name:
            self.names.append(name.removeprefix("_c10d_functional::"))
        if name == "_c10d_functional::all_gather_into_tensor":
            self.gathered += args[0].nbytes * (size - 1)
        elif name == "_c10d_functional::reduce_scatter_tensor":
            self.scattered += args[0].nbytes // size * (size - 1)
        elif "c10d" in name and "wait_tensor" not in name:
            raise AssertionError(f"{name} is not counted")
        return func(*args, **(kwargs or {}))


def test_bytes_are_those_of_the_closed_form(tmp_path: Path) -> None:
    on_ranks(2, "cpu", tmp_path, count_bytes)


def count_bytes(device: torch.device) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        for options in (
            {"at_once": 1},
            {"own_window": True},
            {"own_window": True, "chunk": 8},
            {"own_window": True, "past_chunks": 1},
            {"own_window": True, "config": ONE_KEY},
            {"config": NO_HALO, "rows": 1},
            {"config": SELECTED, "phi": "mean"},
            {"config": SELECTED, "phi": "mean", "own_window": True},
            {"config": NOT_SELECTED, "own_window": True, "at_once": 1},
            {"config": NOT_SELECTED, "past_chunks": 1},
            {"config": SLIDING, "phi": "mean"},
            {"config": SLIDING, "phi": "mean", "own_window": True},
            {"config": COMPRESSED},
        ):
            problem = Problem(**options)
            branches = problem.config.branches
            inputs = [shard_sequence(x, mesh, 2).to(dtype) for x in problem.inputs]
            query, key, value, gates, *own = [x.requires_grad_() for x in inputs]
            with CountedBytes() as counted:
                output = context_parallel_attention(
                    *(query, key, value, gates, *problem.phis),
                    mesh=mesh,
                    config=problem.config,
                    compressed_source=tuple(own[:2]) if own else None,
                    sliding_key=own[2] if own else None,
                    sliding_value=own[3] if own else None,
                    kv_heads_at_once=problem.at_once,
                )
                output.sum().backward()
            expected = sent_bytes(
                problem.inputs[1].shape[2],
                *(dist.get_world_size(), problem.heads, 8),
                config=problem.config,
                value_head_dim=6,
                batch_size=problem.rows,
                dtype=dtype,
                separate_branch_kv=problem.own_window,
                num_queries=problem.queries,
            )
            assert (counted.gathered, counted.scattered) == expected, (dtype, options)
            if "selected" not in branches and not problem.past_chunks:
                # On one of two ranks: halos, compressed keys and values, the ends of two chunks.
                tokens = 2 * ("sliding" in branches) * (problem.config.window_size - 1)
                tokens += ("compressed" in branches) * (2 * problem.chunk // 4 + 2 * 4)
                each = problem.rows * problem.heads * sum(problem.dims) * dtype.itemsize
                assert counted.gathered == each * tokens


def test_the_table_of_the_page() -> None:
    page = Path(__file__).parents[2] / "docs" / "guide" / "many-gpus.md"
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| (\S+) \| (\S+) \|$", page.read_text(), re.M)
    assert len(rows) == 4
    for heads, tokens, ranks, *told in rows:
        found = sent_bytes(int(tokens), int(ranks), int(heads), 128, config=NSAConfig())
        assert told == [f"{x / 1e9:.2f}" for x in found]


def test_one_rank_alone(alone: dist.ProcessGroup) -> None:
    Problem(documents=True).check("one rank", alone)
    Problem(documents=True, own_window=True).check("one rank, a window of its own", alone)


def test_where_the_window_alone_is_trained_no_other_keys_are_reduced(
    alone: dist.ProcessGroup,
) -> None:
    """Nobody would wait for such a sum, whose memory is then never given back."""
    problem = Problem(own_window=True)
    query, key, value, gates, *own = problem.inputs
    window = [x.requires_grad_() for x in own[2:]]
    with CountedBytes() as counted:
        output = context_parallel_attention(
            *(query, key, value, gates, *problem.phis.requires_grad_(False)),
            mesh=alone,
            config=problem.config,
            sliding_key=window[0],
            sliding_value=window[1],
        )
        sent = counted.names.copy()
        torch.autograd.grad(output, window, problem.grad)
    # Once more than on a GPU, where nobody waits before a result is wanted.
    assert sent.count("wait_tensor") == 2 * sent.count("all_gather_into_tensor")
    assert counted.names[len(sent) :] == ["reduce_scatter_tensor", "wait_tensor", "wait_tensor"]


def test_gradients_of_gathered_tensors_add_up_in_float32(alone: dist.ProcessGroup) -> None:
    """Each of the small ones is lost beside 1 in bfloat16; together they are not."""
    x = torch.randn(1, 2, 6, 4).bfloat16().requires_grad_()
    shards = SequenceShards.of(alone)
    ends = (6, 5, 6, 6)
    found = shards.send(x, x * 2).arrived_until(*ends)
    for (first, second), end in zip(found, ends, strict=True):
        assert torch.equal(first, x[:, :, :end])
        assert torch.equal(second, 2 * x[:, :, :end])
    weights = (1, 2**-9, 2**-9, 2**-9)
    total = sum(float(w) * y[0].sum() for w, y in zip(weights, found, strict=True))
    (grad,) = torch.autograd.grad(total, x, retain_graph=True)
    assert (grad[:, :, :5] == 1 + 2**-7).all()
    assert (grad[:, :, 5] == 1).all()  # 1 + 2 ** -8 is rounded to the even one
    (unused,) = torch.autograd.grad(found[1][1].sum(), x)
    assert (unused[:, :, :5] == 2).all()
    assert (unused[:, :, 5] == 0).all()


@pytest.mark.gpu
@TWO_GPUS
@pytest.mark.parametrize(
    ("group", "own_window"),
    [
        pytest.param(4, False, id="4"),
        pytest.param(16, False, id="16"),
        pytest.param(16, True, id="16, window of its own"),
    ],
)
def test_the_fused_core_runs_each_chunk(group: int, own_window: bool, tmp_path: Path) -> None:
    on_ranks(2, "cuda", tmp_path, long_rows, group, own_window)


@pytest.mark.gpu
@TWO_GPUS
def test_without_a_selected_branch_on_two_gpus(tmp_path: Path) -> None:
    on_ranks(2, "cuda", tmp_path, long_rows, 16, False, NOT_SELECTED.branches)


def long_rows(
    device: torch.device,
    group: int,
    own_window: bool,
    branches: tuple[BranchName, ...] = BRANCHES,
) -> None:
    """Long enough for cuDNN; against one GPU, whose sums have another order."""
    config, tokens = NSAConfig(compression="mean", branches=branches), 4 * 9216
    shards = SequenceShards.of(dist.group.WORLD)
    torch.manual_seed(3)
    gates = (2 * group, len(branches))
    sizes = [(2 * group, 128), (2, 128), (2, 128), gates, *[(2, 128)] * 2 * own_window]
    whole = [
        torch.randn(1, tokens, *size, device=device, dtype=torch.bfloat16).transpose(1, 2)
        for size in (*sizes, sizes[0])
    ]
    for x in whole:  # the same on both
        dist.broadcast(x.transpose(1, 2), 0)
    *inputs, grad = whole
    phis = [Compression(config, 2, 128, device=device) for _ in range(2)]
    leaves = [x.detach().requires_grad_() for x in inputs]
    compressed = [phi(x) for phi, x in zip(phis, leaves[1:3], strict=True)]
    names = ("sliding_key", "sliding_value")
    window = dict(zip(names, leaves[4:], strict=False))
    out = nsa_attention(*leaves[:3], *compressed, leaves[3], config=config, **window)
    wanted = [out, *torch.autograd.grad(out, leaves, grad)]
    own = [shards.shard(x.detach(), 2).requires_grad_() for x in inputs]
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        window = dict(zip(names, own[4:], strict=False))
        out = context_parallel_attention(*own[:4], *phis, mesh=shards, config=config, **window)
        found = [out, *torch.autograd.grad(out, own, shards.shard(grad, 2))]
    events = [event.name for event in trace.events()]
    if config.has("selected"):
        assert events.count("nsa_flex::core_forward") == 2
        assert "compressed_past_bwd_kernel" in events
        assert "gated_sum_fwd_kernel" not in events
    for got, want in zip(found, wanted, strict=True):
        want = shards.shard(want.detach(), 2).double()
        assert (got.double() - want).norm() <= 2**-6 * want.norm()


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"key": torch.zeros(1, 2, 24, 8), "value": torch.zeros(1, 2, 24, 8)},
        r"a shard has 24 tokens; expected a multiple of 2 \* select_block_size = 16: pad "
        r"sequences at their end to a multiple of 2 \* 1 ranks \* 8 = 16 tokens, as "
        "nsa_flex.shard_batch does",
    ),
    (
        {"query": torch.zeros(1, 4, 31, 8), "gates": torch.zeros(1, 4, 31, 3)},
        "query has 31 tokens; expected two chunks, an even number",
    ),
    ({"query": torch.zeros(1, 3, 32, 8)}, "key has 2 heads; query's 3 must be a multiple of it"),
    ({"query": torch.zeros(4, 32, 8)}, r"query and key must be 4-D \(B, H, T, D\), got \(4, 32"),
    ({"kv_heads_at_once": 3}, "kv_heads_at_once=3 must be a divisor of the 2 KV heads"),
    ({"kv_heads_at_once": 0}, "kv_heads_at_once=0 must be a divisor"),
    (
        {"sliding_key": torch.zeros(1, 2, 32, 8)},
        "sliding_key and sliding_value must be given together",
    ),
    (
        {"sliding_key": torch.zeros(1, 2, 32, 8), "sliding_value": torch.zeros(1, 2, 16, 8)},
        r"sliding_value has shape \(1, 2, 16, 8\); expected \(1, 2, 32, 8\), that of value",
    ),
]


@pytest.mark.parametrize(("changed", "message"), REFUSED)
def test_refused(changed: dict[str, Any], message: str, alone: dist.ProcessGroup) -> None:
    x = torch.zeros(1, 2, 32, 8)
    call = {
        "query": torch.zeros(1, 4, 32, 8),
        "key": x,
        "value": x,
        "gates": torch.zeros(1, 4, 32, 3),
        "compress_key": Compression(NSA, 2, 8),
        "compress_value": Compression(NSA, 2, 8),
    }
    with pytest.raises(ValueError, match=message):
        context_parallel_attention(**{**call, **changed}, mesh=alone, config=NSA)


def test_meshes_refused(alone: dist.ProcessGroup) -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "cp"))
    with pytest.raises(ValueError, match=r"mesh has 2 dimensions \('dp', 'cp'\); expected the on"):
        SequenceShards.of(mesh)
    assert SequenceShards.of(mesh["cp"]).size == 1
    with pytest.raises(TypeError, match="mesh is a str; it must be a DeviceMesh or a Process"):
        SequenceShards.of("cp")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the sequence has 7 tokens; 1 ranks need a multiple of"):
        shard_sequence(torch.zeros(1, 7), alone)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("tokens", "offset", "message"),
    [
        (16, 40, "query_offset=40 with 32 queries leaves the 64 keys of all ranks"),
        (32, -1, "query_offset=-1 with 64 queries leaves the 64 keys of all ranks"),
        (48, None, "query_offset=-32 with 96 queries leaves the 64 keys of all ranks"),
    ],
)
def test_queries_outside_are_refused_on_every_rank(
    tokens: int, offset: int | None, message: str, rank: int
) -> None:
    """Before anything is sent: a rank whose own queries lie inside would wait for the others."""
    key = torch.zeros(1, 2, 32, 8)
    with pytest.raises(ValueError, match=message):
        context_parallel_attention(
            torch.zeros(1, 4, tokens, 8),
            *(key, key, torch.zeros(1, 4, tokens, 3), *(Compression(NSA, 2, 8) for _ in range(2))),
            mesh=SequenceShards("", rank, 2),
            config=NSA,
            query_offset=offset,
        )
