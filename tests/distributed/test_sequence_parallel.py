"""Ulysses: tokens exchanged for heads around attention, by DeepSpeed's protocol, on two ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.problem import (
    Result,
    assert_equal,
    gradients,
    new_model,
    one_process,
    whole_batch,
)
from distributed.ranks import TWO_GPUS, on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import nsa_flex
from nsa_flex.parallel import exchanged_bytes
from nsa_flex.training import read_rows
from patching.tiny_models import NSA, moved, relative_error, tiny_model, tokens

LIMIT = 1e-10
LENGTH = 80


def patched(family: str = "llama", phi: str = "mlp", heads: int = 4) -> Any:
    """Float64, the same on all ranks; two KV heads."""
    torch.manual_seed(5)
    dense = tiny_model(family, hidden_size=48, num_attention_heads=heads).train()
    return moved(nsa_flex.patch(dense, replace(NSA, compression=phi)), scale=0.1).train()


def exchange(x: Tensor, mesh: DeviceMesh, split: int, join: int) -> Tensor:
    """All-to-all: every rank's part of dimension `split`, joined along `join`."""
    parts = DTensor.from_local(x.contiguous(), mesh, [Shard(join)], run_check=False)
    return parts.redistribute(placements=[Shard(split)]).to_local()


@contextmanager
def ulysses(mesh: DeviceMesh, *, in_eval: bool = True) -> Iterator[None]:
    """What `UlyssesSPAttentionHF.register_with_transformers` puts around a registered function.

    Queries, keys and values are exchanged; the mask is dropped and position_ids are gathered. In
    eval mode it may do nothing.
    """
    core: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS["nsa_flex"]

    def around(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        if not module.training and not in_eval:
            return core(module, query, key, value, _mask, **options)
        places = DTensor.from_local(options["position_ids"], mesh, [Shard(1)], run_check=False)
        options["position_ids"] = places.full_tensor()
        whole = (exchange(x, mesh, split=1, join=2) for x in (query, key, value))
        output, _ = core(module, *whole, None, **options)  # (B, S, heads of this rank, Dv)
        return exchange(output, mesh, split=1, join=2).flatten(2), None

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ALL_ATTENTION_FUNCTIONS, "nsa_flex", around)
        yield


def batch(kind: str) -> dict[str, Tensor]:
    """Two rows: whole, padded on either side, or of documents that cross ranks."""
    torch.manual_seed(6)
    ids = tokens(2, LENGTH)
    call = {"input_ids": ids}
    if kind == "padded":
        mask = torch.ones_like(ids)
        mask[0, :11], mask[1, -9:] = 0, 0
        call["attention_mask"] = mask
    elif kind == "packed":
        row = torch.cat([torch.arange(x) for x in (33, 3, LENGTH - 36)])
        call["position_ids"] = torch.stack((row, torch.arange(LENGTH)))
    elif kind == "placed":
        call["position_ids"] = torch.arange(LENGTH)[None]
    return call


def targets(call: dict[str, Tensor]) -> Tensor:
    """Of each token the next; padding and the last have none."""
    ids = call["input_ids"]
    ids = ids.masked_fill(call.get("attention_mask", torch.ones_like(ids)) == 0, -100)
    return F.pad(ids[:, 1:], (0, 1), value=-100)


def total_loss(model: Any, call: dict[str, Tensor], labels: Tensor) -> Tensor:
    logits = model(**call, use_cache=False).logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


CASES = [
    ("llama", "mlp", 4, "whole"),
    ("llama", "weighted", 2, "packed"),
    ("qwen2", "linear", 6, "padded"),
    ("qwen3", "mean", 8, "placed"),
    ("qwen3", "mlp", 6, "packed"),
]


def test_loss_and_gradients_of_one_process(tmp_path: Path) -> None:
    on_ranks(2, "cpu", tmp_path, every_case)


def every_case(_device: torch.device) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for case in CASES:
        call = batch(case[-1])
        labels = targets(call)
        model = patched(*case[:3])
        loss = total_loss(model, call, labels)
        loss.backward()
        expected = Result(loss.detach(), gradients(model))

        model = nsa_flex.sequence_parallel(patched(*case[:3]), mesh.get_group())
        own = {name: x.chunk(2, 1)[dist.get_rank()] for name, x in call.items()}
        with ulysses(mesh):
            loss = total_loss(model, own, labels.chunk(2, 1)[dist.get_rank()])
            loss.backward()
        assert_sums_equal(case, Result(loss.detach(), gradients(model)), expected)


def assert_sums_equal(case: object, own: Result, expected: Result) -> None:
    """The ranks' losses and gradients, which are summed in place, are those of one process."""
    for x in (own.loss, *own.gradients.values()):
        dist.all_reduce(x)
    assert relative_error(own.loss, expected.loss) < LIMIT, case
    for name, want in expected.gradients.items():
        error = (own.gradients[name] - want).norm() / want.norm().clamp_min(1e-6)
        assert error < LIMIT, f"{case}: gradient of {name} is off by {error}"


@pytest.mark.gpu
@TWO_GPUS
def test_loss_and_gradients_on_two_gpus(tmp_path: Path) -> None:
    on_ranks(2, "cuda", tmp_path, like_one_process)


def like_one_process(device: torch.device) -> None:
    """As far from float64 as one process is, in the device's dtype."""
    mesh, call = init_device_mesh(device.type, (2,)), {"input_ids": whole_batch(device)}
    labels = targets(call)
    model = nsa_flex.sequence_parallel(new_model(device).to(device), mesh.get_group())
    with ulysses(mesh):
        own = {name: x.chunk(2, 1)[dist.get_rank()] for name, x in call.items()}
        loss = total_loss(model, own, labels.chunk(2, 1)[dist.get_rank()])
        loss = loss / (labels != -100).sum()
        loss.backward()
    found = Result(loss.detach(), gradients(model))
    for x in (found.loss, *found.gradients.values()):
        dist.all_reduce(x)
    exact = one_process(device, torch.float64)
    assert_equal("Ulysses", found, one_process(device), exact)


class CountedBytes(TorchDispatchMode):
    """What exchanges of numbers take from this rank: of its tensor all parts but one.

    Gloo has no all-to-all that DTensors would use: they gather, and keep a part.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "all_gather" in func._schema.name and args[0].is_floating_point():
            self.sent += args[0].nbytes * (dist.get_world_size() - 1) // dist.get_world_size()
        return func(*args, **(kwargs or {}))


def test_bytes_are_those_of_the_closed_form(tmp_path: Path) -> None:
    on_ranks(2, "cpu", tmp_path, count_bytes)


def count_bytes(_device: torch.device) -> None:
    mesh, call = init_device_mesh("cpu", (2,)), batch("packed")
    model = nsa_flex.sequence_parallel(patched(), mesh)
    own = {name: x.chunk(2, 1)[dist.get_rank()] for name, x in call.items()}
    with ulysses(mesh):
        with CountedBytes() as forward:
            output = model(**own, use_cache=False).logits
        with CountedBytes() as backward:
            output.sum().backward()
    layers, width = model.model.layers, model.model.layers[0].self_attn.head_dim
    expected = exchanged_bytes(
        *(LENGTH, 2, 4, 2, width), config=NSA, batch_size=2, dtype=torch.float64
    )
    assert (forward.sent, backward.sent) == tuple(len(layers) * x for x in expected)


def test_eval_mode(tmp_path: Path) -> None:
    on_ranks(2, "cpu", tmp_path, evaluates)


@torch.no_grad()
def evaluates(_device: torch.device) -> None:
    mesh, ids = init_device_mesh("cpu", (2,)), batch("whole")["input_ids"]
    model = patched().eval()
    expected = model(ids, use_cache=False).logits
    own = ids.chunk(2, 1)[dist.get_rank()]
    nsa_flex.sequence_parallel(model, mesh, in_eval=True)
    with ulysses(mesh):
        found = model(own, use_cache=False).logits
    assert relative_error(found, expected.chunk(2, 1)[dist.get_rank()]) < LIMIT
    # Whole sequences on each rank, as accelerate has it.
    nsa_flex.sequence_parallel(model, mesh)
    with ulysses(mesh, in_eval=False):
        assert torch.equal(model(ids, use_cache=False).logits, expected)
        with pytest.raises(ValueError, match=r"call nsa_flex.sequence_parallel\(model, group\)"):
            nsa_flex.sequence_parallel(model, None)(ids)


def test_ranks_probe_together(tmp_path: Path) -> None:
    """Rank 0 alone writes, and the exchange of tokens for heads needs both."""
    on_ranks(2, "cpu", tmp_path, probes, tmp_path / "run")
    assert len(read_rows(tmp_path / "run", "gates")) == 2  # layers


def probes(_device: torch.device, run: Path) -> None:
    mesh, ids = init_device_mesh("cpu", (2,)), batch("whole")["input_ids"]
    model = nsa_flex.sequence_parallel(patched().eval(), mesh, in_eval=True)
    own = ids.chunk(2, 1)[dist.get_rank()]
    with ulysses(mesh), nsa_flex.telemetry(model, run, probe=own):
        pass


def test_refused_by_name(tmp_path: Path) -> None:
    on_ranks(2, "cpu", tmp_path, refusals)


def refusals(_device: torch.device) -> None:
    mesh = init_device_mesh("cpu", (2,))
    two = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "sp"))
    one_head = nsa_flex.patch(tiny_model(num_key_value_heads=1), NSA)
    some = nsa_flex.patch(tiny_model(), NSA, filter_fn=lambda _, name: "layers.1" in name)
    cases: list[tuple[Any, Any, type[Exception], str]] = [
        (patched(), 2, TypeError, "mesh is a int; it must be a DeviceMesh or a ProcessGroup"),
        (patched(), two, ValueError, r"mesh has 2 dimensions .* shares heads, mesh\[name\]"),
        (tiny_model(), mesh, ValueError, r"no NSA layers: call nsa_flex.patch\(model\) first"),
        (
            one_head,
            mesh,
            ValueError,
            r"layers.0.self_attn has 1 KV heads \(and 4 query heads\), and Ulysses sequence "
            "parallelism over 2 ranks needs a multiple of 2: .* use at most 1 ranks",
        ),
        (some, mesh, ValueError, "layers.0.self_attn is not a patched attention module"),
    ]
    for model, given, kind, message in cases:
        with pytest.raises(kind, match=message):
            nsa_flex.sequence_parallel(model, given)
        layers = [each for each in model.modules() if isinstance(each, nsa_flex.patching.NSALayer)]
        assert all(layer.head_shards is None for layer in layers)
    model = nsa_flex.sequence_parallel(patched(), mesh)
    ids = batch("whole")["input_ids"][:, :40]
    with pytest.raises(ValueError, match="nothing exchanges tokens for heads around 'nsa_flex'"):
        model(ids, use_cache=False)
    calls: list[tuple[dict[str, Any], str]] = [
        ({"use_cache": True}, "a cache in nsa_flex.sequence_parallel is not supported: pass use_"),
        ({"cu_seq_lens_q": torch.tensor([0, 40])}, "cu_seq_lens_q in nsa_flex.sequence_parallel"),
    ]
    with ulysses(mesh):
        for call, message in calls:
            with pytest.raises(ValueError, match=message):
                model(ids, **call)
    with ulysses(mesh, in_eval=False):
        model.eval()
        nsa_flex.sequence_parallel(model, mesh, in_eval=True)
        with pytest.raises(ValueError, match="4 query and 2 KV heads, and its layer has 2 and 1"):
            model(ids, use_cache=False)
