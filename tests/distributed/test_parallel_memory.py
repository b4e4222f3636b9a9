"""The closed forms of memory on several ranks are what is there; the page's tables are theirs."""

from __future__ import annotations

import dataclasses
import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.problem import CONFIG
from distributed.ranks import TWO_GPUS, on_ranks
from distributed.recipes import shard
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

import nsa_flex
from nsa_flex import Compression, NSAConfig
from nsa_flex.auditing.batches import batches_of
from nsa_flex.auditing.measuring import peak_bytes
from nsa_flex.parallel import (
    SequenceShards,
    ShardedCache,
    attention,
    context_parallel_attention,
)
from nsa_flex.parallel.memory import (
    LLAMA_8B,
    ModelSizes,
    cache_bytes,
    gathered_bytes,
    longest_row,
    training_memory,
)
from nsa_flex.training.config import EngineSection
from nsa_flex.training.models import prepare
from patching.tiny_models import NSA

TINY = ModelSizes(3, 32, 48, 64, 4, 2, 8)
GIB = 2**30


def model_of(sizes: ModelSizes, config: NSAConfig) -> Any:
    options = {
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_query_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
    }
    dense = LlamaForCausalLM(LlamaConfig(vocab_size=sizes.vocab_size, **options))
    assert sum(x.numel() for x in dense.parameters()) == sizes.parameters
    return nsa_flex.patch(dense, config)


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("max_length", [96, 100])
def test_a_cache(num_ranks: int, max_length: int) -> None:
    for config in (NSA, with_branches(NSA, "selected", "sliding"), with_branches(NSA, "sliding")):
        phis = [Compression(config, 2, 8, dtype=torch.bfloat16) for _ in range(2)]
        shards = SequenceShards("none", num_ranks - 1, num_ranks)  # filling sends nothing
        cache = ShardedCache(*phis, shards, max_length=max_length)
        tensor = torch.zeros(2, 2, 10, 8, dtype=torch.bfloat16)
        cache.fill(tensor, tensor)
        expected = cache_bytes(max_length, num_ranks, TINY, config=config, batch_size=2)
        assert TINY.num_layers * cache.memory() == expected


def with_branches(config: NSAConfig, *branches: Any) -> NSAConfig:
    return dataclasses.replace(config, branches=branches)


def test_training(tmp_path: Path) -> None:
    on_ranks(2, "cpu", tmp_path, measure_configs)


def measure_configs(device: torch.device) -> None:
    measure(CONFIG["cpu"])
    measure(with_branches(CONFIG["cpu"], "compressed", "sliding"))


class Gathered(TorchDispatchMode):
    """Bytes of what all-gathers of tokens give; those of parameters are another operator."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func._schema.name == "_c10d_functional::all_gather_into_tensor":
            self.bytes += found.nbytes
        return found


def measure(config: NSAConfig) -> None:
    """Shards, the inputs that recomputation keeps, and what layers gather, to the byte."""
    mesh = init_device_mesh("cpu", (2,))
    model = nsa_flex.context_parallel(model_of(TINY, config), mesh)
    prepare(model, EngineSection(compile=False, checkpointing="full"))
    shard(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    inputs: list[weakref.ref[Tensor]] = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0])))
    ids = torch.arange(64)[None]
    batch = nsa_flex.shard_batch(ids, mesh, config, labels=ids)
    with Gathered() as gathered:
        loss = model(**batch, use_cache=False).loss
    kept = sum(x.nbytes for each in inputs if (x := each()) is not None)
    loss.backward()
    optimizer.step()

    expected = training_memory(64, 2, TINY, config=config)
    dense = {name: x for name, x in model.named_parameters() if ".nsa." not in name}
    assert sum(local(x) for x in dense.values()) == expected.weights
    assert sum(local(x.grad) for x in dense.values()) == expected.gradients
    states = [optimizer.state[x] for x in dense.values()]
    moments = sum(local(x["exp_avg"]) + local(x["exp_avg_sq"]) for x in states)
    assert moments == expected.optimizer
    assert kept == 2 * expected.kept  # in float32 here
    each = gathered_bytes(64, 2, TINY, config=config, dtype=torch.float32)
    assert gathered.bytes == TINY.num_layers * each


def local(x: Any) -> int:
    return int(x.to_local().nbytes)


class Played(torch.autograd.Function):
    """Attention that makes its output and its gradients, keeps its inputs, and nothing else."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(query, *others)
        return torch.empty_like(query)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors)


@pytest.fixture
def eight_ranks() -> Iterator[int]:
    """This process is the fourth of 8; no others are there, and collectives send nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    yield 8
    dist.destroy_process_group()


GATHERING = NSAConfig(16, 16, branches=("selected", "sliding"), window_size=33)
SHARD, NUM_HEADS, DIM = 1024, 4, 32


def attend_shards(
    at_once: int | None, device: str = "cpu", *, own_window: bool = False
) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """A call of the core, and its inputs, to which a window's own keys and values may belong."""
    phis = [Compression(GATHERING, NUM_HEADS, DIM, device=device) for _ in range(2)]
    inputs = [
        torch.randn(1, SHARD, NUM_HEADS, width, dtype=torch.bfloat16, device=device)
        for width in (DIM, DIM, DIM, 2, *[DIM] * (2 * own_window))
    ]

    def attend(*tensors: Tensor) -> Tensor:
        return context_parallel_attention(
            *(*tensors[:4], phis[0], phis[1]),
            mesh=dist.group.WORLD,
            config=GATHERING,
            sliding_key=tensors[4] if own_window else None,
            sliding_value=tensors[5] if own_window else None,
            kv_heads_at_once=at_once,
        )

    return attend, [x.transpose(1, 2).requires_grad_() for x in inputs]


@pytest.fixture
def no_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention is played and nothing is compressed: keys and values alone are gathered."""
    monkeypatch.setattr(attention, "nsa_attention", played)
    monkeypatch.setattr(attention, "_compress", lambda *_: [])


def played(query: Tensor, key: Tensor, value: Tensor, *rest: Tensor, **options: Any) -> Tensor:
    own = [options[name] for name in ("sliding_key", "sliding_value")]
    return Played.apply(query, key, value, rest[-1], *(x for x in own if x is not None))


@pytest.mark.parametrize("at_once", [None, 2, 1])
def test_gathered_parts_at_the_peak(
    at_once: int | None, eight_ranks: int, no_arithmetic: None
) -> None:
    """Of n parts two are there without gradients: one in order, and what comes or came.

    With them the backward of the last part is the peak: the n - 1 others, its gradients of both
    chunks, and their sums in float32.
    """
    attend, inputs = attend_shards(at_once)
    batch = batches_of(tuple(inputs))[0]
    num_parts = 1 if at_once is None else NUM_HEADS // at_once
    shard = inputs[1].nbytes + inputs[2].nbytes
    part = eight_ranks * shard / num_parts
    queries, small = inputs[0].nbytes, part / 100  # gates

    peak = peak_bytes(attend, batch, train=False)
    assert 2 * part <= peak <= 2 * part + shard / num_parts + queries + small

    peak = peak_bytes(attend, batch, train=True)
    both = 1 + 1 / (2 * eight_ranks)  # both chunks see one chunk more than the whole
    base = (num_parts - 1 + both + 2) * part
    # The output, its gradient and the queries'; what the sum leaves of this rank's, in float32.
    assert base <= peak <= base + 3 * queries + 2 * shard / num_parts + small


@pytest.mark.parametrize("at_once", [None, 1])
def test_keys_of_the_window_are_not_gathered(
    at_once: int | None, eight_ranks: int, no_arithmetic: None
) -> None:
    """A rank holds its shard of them twice more, and the ends of all chunks, half a shard here; in
    the backward one part's gradients as attention makes them, of whole rows.

    Gathered, they were as many as the other keys and values, and so were their sums in float32.
    """
    peaks = {}
    for own_window in (False, True):
        attend, inputs = attend_shards(at_once, own_window=own_window)
        batch = batches_of(tuple(inputs))[0]
        peaks[own_window] = [peak_bytes(attend, batch, train=train) for train in (False, True)]
    shard = inputs[1].nbytes + inputs[2].nbytes
    assert 2 * eight_ranks * (GATHERING.window_size - 1) == SHARD / 2
    more, trained = (b - a for a, b in zip(*peaks.values(), strict=True))
    assert 1 < more / shard < 3
    num_parts = 1 if at_once is None else NUM_HEADS // at_once
    of_both_chunks = (eight_ranks + 1 / 2) / num_parts
    assert of_both_chunks - 0.1 < trained / shard < of_both_chunks + 2


def test_without_a_selected_branch_a_layer_needs_no_less_memory() -> None:
    """It gathers less, and attention is given rows as long."""
    config = NSAConfig()
    apart = with_branches(config, "compressed", "sliding")
    assert gathered_bytes(2**16, 4, LLAMA_8B, config=apart) < gathered_bytes(
        2**16, 4, LLAMA_8B, config=config
    )
    assert training_memory(2**16, 4, LLAMA_8B, config=apart) == training_memory(
        2**16, 4, LLAMA_8B, config=config
    )


def test_parts_of_the_total() -> None:
    found = training_memory(2**16, 4, LLAMA_8B, config=NSAConfig())
    parts = dataclasses.asdict(found)
    assert found.total == sum(parts.values()) - found.gathered - found.work
    fewer = dataclasses.replace(found, logits=0)
    assert fewer.total == sum(parts.values()) - found.logits
    assert longest_row(10 * GIB, 2, LLAMA_8B, config=NSAConfig()) == 0


def test_the_tables_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "guide" / "many-gpus.md").read_text()
    rows = re.findall(r"^\| (\d+) \S 80 GB \| (\d+) \| (\d+) \| (\d+) \|$", page, re.M)
    assert [int(row[0]) for row in rows] == [2, 4, 8, 16, 32]
    config, room = NSAConfig(), 72 * GIB
    for ranks, row, batch, longest in rows:
        number = int(ranks)
        assert int(row) == longest_row(room, number, LLAMA_8B, config=config)
        free = room - 2 * LLAMA_8B.parameters
        each = cache_bytes(2**17, number, LLAMA_8B, config=config)
        assert int(batch) == free // each
        tokens = free // (cache_bytes(2**20, number, LLAMA_8B, config=config) / 2**20)
        assert int(longest) == tokens // 2**17 * 2**17


@pytest.mark.gpu
@TWO_GPUS
def test_the_peak_on_two_gpus(tmp_path: Path) -> None:
    on_ranks(2, "cuda", tmp_path, measure_peak)


def measure_peak(device: torch.device) -> None:
    """The formula is within a third of what the allocator saw."""
    sizes, config, length = ModelSizes(4, 1024, 2816, 8192, 8, 2, 128), NSAConfig(), 2**16
    mesh = init_device_mesh("cuda", (2,))
    model = nsa_flex.context_parallel(model_of(sizes, config).to(device), mesh)
    prepare(model, EngineSection(compile=True, checkpointing="full"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    ids = torch.randint(8192, (1, length), device=device)
    batch = nsa_flex.shard_batch(ids, mesh, config, labels=ids)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        model(**batch, use_cache=False).loss.backward()
        peak = torch.cuda.max_memory_allocated()
        optimizer.step()
        optimizer.zero_grad()
    expected = training_memory(length, 2, sizes, config=config).total
    assert 0.67 < peak / expected < 1.5, (peak, expected, dist.get_rank())


@pytest.mark.gpu
@TWO_GPUS
def test_the_allocator_gives_gathered_memory_again(tmp_path: Path) -> None:
    on_ranks(2, "cuda", tmp_path, attend_again)


def attend_again(device: torch.device) -> None:
    """Steps like the first two ask the driver for no memory."""
    attend, inputs = attend_shards(1, "cuda")
    segments = []
    for _ in range(5):
        torch.autograd.grad(attend(*inputs).sum(), inputs)
        segments.append(torch.cuda.memory_stats()["segment.all.allocated"])
    assert segments[1] == segments[-1], segments
