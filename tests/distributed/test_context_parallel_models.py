"""Models whose sequences are shared out over ranks find the loss and gradients of one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.problem import (
    CONFIG,
    LENGTH,
    Result,
    assert_equal,
    gradients,
    mean_over_ranks,
    new_model,
)
from distributed.ranks import on_ranks, on_two
from distributed.recipes import COMPILERS, shard
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh

import nsa_flex
from nsa_flex.training.config import EngineSection
from nsa_flex.training.models import prepare
from patching.tiny_models import tokens

Batch = dict[str, Tensor]


def plain(device: torch.device, rows: int = 2) -> Batch:
    """Rows of no whole number of blocks."""
    torch.manual_seed(3)
    ids = tokens(rows, LENGTH[device.type] - 5).to(device)
    return {"input_ids": ids, "labels": ids}


def padded(device: torch.device) -> Batch:
    """One row is padded on the left, the other on the right; what padding predicts is no label."""
    batch = plain(device)
    mask = torch.ones_like(batch["input_ids"])
    mask[0, :11], mask[1, -9:] = 0, 0
    labels = batch["labels"].masked_fill(mask == 0, -100)
    labels[0, 11] = -100
    return {**batch, "labels": labels, "attention_mask": mask}


def packed(device: torch.device) -> Batch:
    """Documents that cross ranks, and a short one."""
    batch = plain(device)
    length = batch["input_ids"].shape[1]
    lengths = [length - 40, 3, 37]
    row = torch.cat([torch.arange(x) for x in lengths])
    return {**batch, "position_ids": torch.stack((row, torch.arange(length))).to(device)}


BATCHES: dict[str, Callable[[torch.device], Batch]] = {
    "plain": plain,
    "padded": padded,
    "packed": packed,
}


def step(model: Any, batch: Batch) -> Tensor:
    """Loss, after its backward."""
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return loss.detach()


@functools.cache
def one_process(device: torch.device, case: str, dtype: torch.dtype | None = None) -> Result:
    """Whole sequences; in float64 on the CPU."""
    place = torch.device("cpu") if dtype == torch.float64 else device
    model = new_model(device, dtype).to(place)
    batch = {name: x.to(place) for name, x in BATCHES[case](device).items()}
    return Result(step(model, batch), gradients(model))


def shares(device: torch.device, mesh: Any, case: str) -> Batch:
    """This rank's part of the batch."""
    return nsa_flex.shard_batch(mesh=mesh, config=CONFIG[device.type], **BATCHES[case](device))


def mean_of_gradients(model: Any) -> dict[str, Tensor]:
    """Over ranks, as data parallelism has them."""
    found = gradients(model)
    for gradient in found.values():
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    return found


RECIPES = [
    ("plain", False, "none", None),
    ("padded", False, "full", 1),
    ("packed", False, "selective", None),
    ("plain", True, "full", 1),
    ("packed", True, "none", None),
]


@on_two
def test_loss_and_gradients_of_one_process(device: str, tmp_path: Path) -> None:
    on_ranks(2, device, tmp_path, every_recipe)


def every_recipe(device: torch.device) -> None:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for case, compiled, kind, at_once in RECIPES:
        torch._dynamo.reset()
        counters.clear()
        model = nsa_flex.context_parallel(
            new_model(device).to(device), mesh, kv_heads_at_once=at_once
        )
        engine = EngineSection(compile=compiled, checkpointing=kind)
        prepare(model, engine, compiler=COMPILERS[device.type])
        loss = step(model, shares(device, mesh, case))
        assert (counters["stats"]["unique_graphs"] > 0) == compiled
        assert not counters["graph_break"]
        assert_equal(
            f"{case}, compiled {compiled}, recomputation {kind}",
            Result(mean_over_ranks(loss), mean_of_gradients(model)),
            one_process(device, case),
            one_process(device, case, torch.float64),
        )


@pytest.mark.exhaustive
def test_whole_models_compile(tmp_path: Path) -> None:
    on_ranks(2, "cpu", tmp_path, whole_models)


def whole_models(device: torch.device) -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = nsa_flex.context_parallel(new_model(device), mesh)
    own = shares(device, mesh, "packed")
    with torch.no_grad():
        loss = model(**own).loss
        compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)(**own).loss
    torch.testing.assert_close(compiled, loss)


@pytest.mark.exhaustive
def test_beside_fsdp_on_the_other_axis(tmp_path: Path) -> None:
    """Rows over one axis of the mesh, which shards parameters, and tokens over the other."""
    on_ranks(4, "cpu", tmp_path, fsdp_beside, [(2, 2)])


@on_two
def test_beside_fsdp_where_one_axis_is_1(device: str, tmp_path: Path) -> None:
    on_ranks(2, device, tmp_path, fsdp_beside, [(2, 1), (1, 2)])


def fsdp_beside(device: torch.device, shapes: list[tuple[int, int]]) -> None:
    for shape in shapes:
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("cp", "dp"))
        model = nsa_flex.context_parallel(new_model(device).to(device), mesh["cp"])
        shard(model, mesh)
        row = mesh["dp"].get_local_rank()
        batch = {name: x.chunk(shape[1])[row] for name, x in plain(device).items()}
        own = nsa_flex.shard_batch(mesh=mesh["cp"], config=CONFIG[device.type], **batch)
        loss = step(model, own)
        assert_equal(
            f"FSDP2 beside context parallelism, ranks {shape}",
            Result(mean_over_ranks(loss), gradients(model)),
            one_process(device, "plain"),
            one_process(device, "plain", torch.float64),
        )


def test_positions_of_other_shards_are_refused(tmp_path: Path) -> None:
    on_ranks(2, "cpu", tmp_path, guard)


@torch.no_grad()
def guard(device: torch.device) -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = nsa_flex.context_parallel(new_model(device), mesh)
    own = shares(device, mesh, "packed")
    right = model(input_ids=own["input_ids"], position_ids=own["position_ids"]).logits
    assert torch.isfinite(right).all()
    length = own["input_ids"].shape[1]
    in_turn = torch.arange(length)[None]
    wrong = [
        in_turn,  # of the shard alone: right in each chunk
        own["position_ids"].roll(3, 1),
        own["position_ids"] - 8,
        own["position_ids"] + 1,
    ]
    for position_ids in wrong:
        with pytest.raises(RuntimeError, match="position_ids of a shard break the rule"):
            model(input_ids=own["input_ids"], position_ids=position_ids)
    calls: list[tuple[dict[str, Any], str]] = [
        ({"use_cache": True}, "context_parallel takes no cache but a ShardedNSACache: pass one"),
        ({"attention_mask": torch.ones(1, length)}, "attention_mask in .* give it to nsa_flex.sh"),
        ({"cu_seq_lens_q": torch.tensor([0, length])}, "cu_seq_lens_q in nsa_flex.context_paral"),
        ({"position_ids": in_turn.expand(3, 1, -1)}, r"position_ids has shape \(3, 1, "),
        ({"input_ids": own["input_ids"][:, :-8]}, r"a shard has .* expected a multiple of 2 \*"),
    ]
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            model(**{"input_ids": own["input_ids"], **call})
    # A whole model again, with the cache that it had.
    nsa_flex.context_parallel(model, None)
    assert model(input_ids=own["input_ids"]).past_key_values is not None


def test_models_that_would_see_shards_alone_are_refused(tmp_path: Path) -> None:
    on_ranks(1, "cpu", tmp_path, refusals)


def refusals(device: torch.device) -> None:
    from patching.tiny_models import NSA, tiny_model

    mesh = init_device_mesh("cpu", (1,))
    cases: list[tuple[Any, str]] = [
        (torch.nn.Linear(2, 2), r"Linear has no NSA layers: call nsa_flex.patch\(model\) first"),
        (nsa_flex.patch(tiny_model("gemma3"), NSA), "layers.0.self_attn is not patched: with a"),
        (nsa_flex.patch(tiny_model("qwen3-next"), NSA), "stands beside recurrent layers"),
    ]
    for model, message in cases:
        with pytest.raises(ValueError, match=message):
            nsa_flex.context_parallel(model, mesh)
        layers = [x for x in model.modules() if hasattr(type(x), "shards")]
        assert all(layer.shards is None for layer in layers)
    with pytest.raises(ValueError, match="kv_heads_at_once=3 must be a divisor of the 2 KV heads"):
        nsa_flex.context_parallel(new_model(device), mesh, kv_heads_at_once=3)
    layer = nsa_flex.context_parallel(new_model(device), mesh).model.layers[0].self_attn.nsa
    x = torch.zeros(1, 2, 32, 8)
    with pytest.raises(ValueError, match="takes no cache but a ShardedCache: leave"):
        layer(torch.zeros(1, 32, 32), x, x, x, cache=layer.new_cache())
    rows = nsa_flex.patching.packed_rows(nsa_flex.align_positions(torch.arange(32)[None], NSA))
    with pytest.raises(ValueError, match="rows move tokens, and this rank has a shard of them"):
        layer(torch.zeros(1, 32, 32), x, x, x, rows=rows)


def test_the_layer(tmp_path: Path) -> None:
    on_ranks(2, "cpu", tmp_path, layers)


def layers(device: torch.device) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for separate in (False, True):
        for cu_seqlens in (None, torch.tensor([0, 24, 72, 96])):
            torch.manual_seed(4)
            layer = nsa_flex.NSAAttention(
                32, 4, 2, config=CONFIG["cpu"], separate_branch_kv=separate, dtype=torch.float64
            )
            for parameter in layer.parameters():
                torch.nn.init.normal_(parameter, std=0.2)
            x = torch.randn(1, 96, 32, dtype=torch.float64, requires_grad=True)
            grad = torch.randn(1, 96, 32, dtype=torch.float64)
            inputs = [x, *layer.parameters()]
            output = layer(x, cu_seqlens=cu_seqlens)
            expected = torch.autograd.grad(output, inputs, grad)
            nsa_flex.context_parallel(layer, mesh, kv_heads_at_once=1)
            own = layer(nsa_flex.shard_sequence(x, mesh), cu_seqlens=cu_seqlens)
            assert relative(own, nsa_flex.shard_sequence(output, mesh)) < 1e-12
            found = torch.autograd.grad(own, inputs, nsa_flex.shard_sequence(grad, mesh))
            for got, want in zip(found, expected, strict=True):
                dist.all_reduce(got)
                assert relative(got, want) < 1e-12
    options: dict[str, Any] = {"attention_mask": torch.ones(1, 96), "return_aux": True}
    for name, value in {**options, "cache": layer.new_cache()}.items():
        with pytest.raises(ValueError, match=f"{name} in nsa_flex.context_parallel is not supp"):
            layer(x, **{name: value})
    with pytest.raises(RuntimeError, match="documents must begin at multiples of select_block"):
        layer(nsa_flex.shard_sequence(x, mesh), cu_seqlens=torch.tensor([0, 23, 96]))
    for bounds in ([8, 96], [0, 48], [0, 64, 32, 96], [0, 192]):
        with pytest.raises(RuntimeError, match="cu_seqlens must begin with 0, never descend"):
            layer(nsa_flex.shard_sequence(x, mesh), cu_seqlens=torch.tensor(bounds))
    with pytest.raises(ValueError, match="cu_seqlens must be a 1-D integer tensor"):
        layer(nsa_flex.shard_sequence(x, mesh), cu_seqlens=torch.tensor([0.0, 96.0]))
    bounded = {"cu_seqlens": torch.tensor([0, 96]), "max_document_length": 8}
    with pytest.raises(RuntimeError, match="document that is longer than max_document_length"):
        layer(nsa_flex.shard_sequence(x, mesh), **bounded)
    with pytest.raises(ValueError, match="max_document_length=8 was given without cu_seqlens"):
        layer(nsa_flex.shard_sequence(x, mesh), max_document_length=8)


def relative(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over that of `expected`."""
    return float((found - expected).norm() / expected.norm())


def test_batches_refused(tmp_path: Path) -> None:
    on_ranks(1, "cpu", tmp_path, batch_refusals)


def batch_refusals(device: torch.device) -> None:
    mesh, ids = init_device_mesh("cpu", (1,)), tokens(2, 20)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"max_documents": 3}, "max_documents=3 was given without position_ids"),
        ({"position_ids": torch.zeros(2, 20)}, "position_ids must be integers"),
        (
            {"attention_mask": torch.ones(2, 20), "position_ids": ids},
            "attention_mask and position_ids were both given: pass one",
        ),
        ({"labels": ids[:1]}, r"labels has shape \(1, 20\); expected that of input_ids, \(2, 20"),
        ({"cu_seqlens": torch.tensor([0, 20])}, "cu_seqlens describe one row, got 2"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            nsa_flex.shard_batch(ids, mesh, CONFIG["cpu"], **call)
    for others in (ids[0], ids[None], ids[:, :0]):
        with pytest.raises(ValueError, match=r"input_ids must be \(B, S\), got"):
            nsa_flex.shard_batch(others, mesh, CONFIG["cpu"])
