"""Parallelism over tokens or heads, on two ranks: refused by its name, whenever it came."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.problem import CONFIG, new_model, whole_batch
from distributed.ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import nsa_flex
from nsa_flex.patching import hf_attention
from nsa_flex.patching.hf_attention import attention_forward

CPU = torch.device("cpu")


@contextlib.contextmanager
def sharded_sequences(*buffers: Tensor) -> Iterator[None]:
    """torch's context parallelism: inside, each of `buffers` (B, S) is this rank's shard."""
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with context_parallel(mesh, buffers=list(buffers), buffer_seq_dims=[1] * len(buffers)):
        yield


def run(model: nn.Module, ids: Tensor, **call: Any) -> Tensor:
    return model(input_ids=ids, use_cache=False, **call).logits


def torch_context_parallel() -> None:
    model, ids = new_model(CPU), whole_batch(CPU)
    with sharded_sequences(ids):
        run(model, ids)


def compiled_before_context_parallel() -> None:
    model, ids = torch.compile(new_model(CPU), backend="eager"), whole_batch(CPU)
    before = run(model, ids)
    try:
        with sharded_sequences(ids):
            run(model, ids)
    finally:
        assert torch.equal(run(model, ids), before)  # a graph, as before


def module_in_context_parallel() -> None:
    layer, x = nsa_flex.NSAAttention(32, 4, 2, config=CONFIG["cpu"]), torch.randn(1, 64, 32)
    with sharded_sequences(x):
        layer(x)


def function_in_context_parallel() -> None:
    query, key = torch.randn(1, 4, 64, 8), torch.randn(1, 2, 64, 8)
    blocks = torch.randn(1, 2, CONFIG["cpu"].num_compressed_blocks(64), 8)
    inputs = (query, key, key, blocks, blocks, torch.ones(1, 4, 64, 3))
    with sharded_sequences(torch.zeros(1, 64)):
        nsa_flex.nsa_attention(*inputs, config=CONFIG["cpu"])


def accelerate_context_parallel() -> None:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.parallelism_config import ParallelismConfig
    from distributed.recipes import shard_on_cpus

    shard_on_cpus()
    accelerator = Accelerator(
        cpu=True,
        parallelism_config=ParallelismConfig(cp_size=2),
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        ),
    )
    model = new_model(CPU)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, _ = accelerator.prepare(model, optimizer)
    ids = whole_batch(CPU)
    shards = ids.clone()
    with (
        pytest.raises(ValueError, match="inside torch's context_parallel"),
        accelerator.maybe_context_parallel(buffers=[shards], buffer_seq_dims=[1]),
    ):
        run(model, shards)
    run(model, ids)


def exchange(x: Tensor, split: int, join: int) -> Tensor:
    """All-to-all: every rank's part of dimension `split`, joined along `join`."""
    parts = [part.contiguous() for part in x.chunk(dist.get_world_size(), split)]
    received = [torch.empty_like(part) for part in parts]
    dist.all_to_all(received, parts)
    return torch.cat(received, join)


def ulysses(core: Callable[..., Any]) -> Callable[..., Any]:
    """DeepSpeed's protocol: sequences whole and heads split around an attention function."""

    def around(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        whole = (exchange(x, split=1, join=2) for x in (query, key, value))
        output, _ = core(module, *whole, None, **options)  # (B, S, heads of this rank, Dv)
        return exchange(output, split=1, join=2), None

    return around


@torch.no_grad()
def ulysses_registered() -> None:
    model, ids = new_model(CPU), whole_batch(CPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ALL_ATTENTION_FUNCTIONS, "nsa_flex", ulysses(attention_forward))
        run(model, ids.chunk(2, 1)[dist.get_rank()])


@torch.no_grad()
def ulysses_unseen() -> None:
    """Around what is registered there is nothing to see: the heads tell."""
    model, ids = new_model(CPU), whole_batch(CPU)
    around = ulysses(attention_forward)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ALL_ATTENTION_FUNCTIONS, "nsa_flex", around)
        patch.setattr(hf_attention, "attention_forward", around)
        run(model, ids.chunk(2, 1)[dist.get_rank()])


def sharded_by_plan() -> Any:
    """A model patched, then sharded by a plan that its NSA layers are not told of."""
    model = new_model(CPU)
    styles = {"colwise": ColwiseParallel(), "rowwise": RowwiseParallel()}
    plan = model.config.base_model_tp_plan.items()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(
        model.model, mesh, {name: styles[style] for name, style in plan if style in styles}
    )
    return model


def tensor_parallel() -> None:
    run(sharded_by_plan(), whole_batch(CPU))


def compiled_tensor_parallel() -> None:
    run(torch.compile(sharded_by_plan(), backend="eager"), whole_batch(CPU))


INSIDE = "inside torch's context_parallel"
OURS = r"by nsa_flex.context_parallel\(model, mesh\) and nsa_flex.shard_batch"
SPLIT = "2 query and 1 KV heads, and its layer has 4 and 2: something split heads "
TELL = r"call nsa_flex.tensor_parallel\(model, mesh\) after .* nsa_flex.sequence_parallel\(model"

# What is run, and what the error must name and advise.
CASES: dict[Callable[[], None], str] = {
    torch_context_parallel: f"{INSIDE}.* call outside it.*{OURS}",
    compiled_before_context_parallel: INSIDE,
    module_in_context_parallel: INSIDE,
    function_in_context_parallel: INSIDE,
    accelerate_context_parallel: r"ParallelismConfig\(cp_size=.* prepare the model without it.*"
    + OURS,
    ulysses_registered: r"around for 'nsa_flex', .* Ulysses .*sp_size.* run without it",
    ulysses_unseen: SPLIT + ".*" + TELL,
    tensor_parallel: SPLIT + ".*" + TELL,
    compiled_tensor_parallel: SPLIT,
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[str]]]:
    """On each rank, by case: type and text of what was raised. Processes take long to start."""
    folder = tmp_path_factory.mktemp("ranks")
    on_ranks(2, "cpu", folder, try_all, folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def try_all(_device: torch.device, folder: Path) -> None:
    found = {}
    for case in CASES:
        torch._dynamo.reset()
        try:
            case()
        except Exception as error:
            found[case.__name__] = [type(error).__name__, " ".join(str(error).split())]
        else:
            found[case.__name__] = ["nothing", ""]
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))


@pytest.mark.parametrize("case", CASES, ids=[case.__name__ for case in CASES])
def test_refused_by_name(case: Callable[[], None], outcomes: list[dict[str, list[str]]]) -> None:
    for outcome in outcomes:
        kind, text = outcome[case.__name__]
        assert kind == "ValueError", (kind, text)
        assert re.search(CASES[case], text), text
