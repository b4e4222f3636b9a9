"""Heads split over ranks: loss, gradients and generated tokens are those of one process."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from distributed import problem
from distributed.problem import (
    Result,
    assert_equal,
    gradients,
    new_model,
    one_process,
    whole,
    whole_batch,
)
from distributed.ranks import on_ranks, on_two
from distributed.recipes import COMPILERS, shard
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import nsa_flex
from nsa_flex.training.config import EngineSection
from nsa_flex.training.models import prepare
from patching.test_minicpm import SALA, built, ids_of
from patching.tiny_models import NSA, moved, relative_error, tiny_model, tokens

# Family, tied embeddings, φ, query heads: groups of 1, 3 and 4.
CASES = [
    ("llama", False, "mean", 2),
    ("llama", True, "mlp", 6),
    ("llama", False, "weighted", 8),
    ("qwen2", False, "linear", 6),
    ("qwen2", True, "weighted", 2),
    ("qwen3", True, "mlp", 8),
]
LIMIT = 1e-10
STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}


def patched(family: str = "llama", tied: bool = False, phi: str = "mlp", heads: int = 4) -> Any:
    """Float64, the same on all ranks; two KV heads."""
    torch.manual_seed(5)
    sizes = {"hidden_size": 48, "num_attention_heads": heads, "tie_word_embeddings": tied}
    sizes["vocab_size"] = 98  # transformers 5.17 splits no odd one
    dense = tiny_model(family, **sizes).train()
    config = replace(NSA, compression=phi)
    return moved(nsa_flex.patch(dense, config), scale=0.1).train()


def loss_of(model: Any, ids: Tensor) -> Tensor:
    """In the dtype of the model: that of transformers is in float32."""
    logits = model(input_ids=ids, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def step(model: Any, ids: Tensor, loss_of: Callable[[Any, Tensor], Tensor] = loss_of) -> Result:
    loss = loss_of(model, ids)
    loss.backward()
    return Result(loss.detach(), gradients(model))


def assert_same(case: object, found: Result, expected: Result) -> None:
    assert relative_error(found.loss, expected.loss) < LIMIT, case
    assert found.gradients.keys() == expected.gradients.keys(), case
    for name, gradient in found.gradients.items():
        want = expected.gradients[name]
        error = (gradient - want).norm() / want.norm().clamp_min(1e-6)
        assert error < LIMIT, f"{case}: gradient of {name} is off by {error}"


def batch(rows: int = 2, length: int = 72) -> Tensor:
    torch.manual_seed(6)
    return tokens(rows, length)


def by_parallelize_module(model: Any, mesh: DeviceMesh) -> None:
    """What a user of torch writes."""
    plan = model.config.base_model_tp_plan.items()
    styles = {name: STYLES[style]() for name, style in plan if style in STYLES}
    parallelize_module(model.model, mesh, styles)


def test_loss_and_gradients_of_one_process(tmp_path: Path) -> None:
    on_ranks(2, "cpu", tmp_path, every_family)


def every_family(_device: torch.device) -> None:
    mesh, ids = init_device_mesh("cpu", (2,)), batch()
    for case in CASES:
        expected = step(patched(*case), ids)
        model = nsa_flex.tensor_parallel(patched(*case), mesh)
        layer = model.model.layers[0].self_attn.nsa
        assert layer.gates.linear.weight.to_local().shape[0] == 3 * case[3] // 2
        assert_same(case, step(model, ids), expected)
        if case[0] != "qwen3":  # transformers sums those of its norms over ranks at each step anew
            sums = {name: 2 * x for name, x in expected.gradients.items()}
            assert_same(f"{case}, added up", step(model, ids), Result(expected.loss, sums))
    # A family whose plan gathers what its projections give: NSA layers stay whole.
    model = nsa_flex.tensor_parallel(patched("phi3"), mesh)
    assert not any(
        hasattr(x, "placements") for x in model.model.layers[0].self_attn.nsa.parameters()
    )
    assert hasattr(model.model.layers[0].self_attn.o_proj.weight, "placements")
    assert_same("phi3", step(model, ids), step(patched("phi3"), ids))
    layouts: list[Callable[[Any, DeviceMesh], Any]] = [then_told, before_patch]
    for layout in layouts:
        model = layout(patched(), mesh)
        assert_same(layout.__name__, step(model, ids), step(patched(), ids))


def then_told(model: Any, mesh: DeviceMesh) -> Any:
    by_parallelize_module(model, mesh)
    return nsa_flex.tensor_parallel(model, mesh)


def before_patch(model: Any, mesh: DeviceMesh) -> Any:
    """A model that is sharded gets layers that are."""
    state = {name: x for name, x in model.state_dict().items() if ".nsa." in name}
    dense = nsa_flex.unpatch(model)
    by_parallelize_module(dense, mesh)
    model = nsa_flex.patch(dense, replace(NSA, compression="mlp"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".nsa." in name:
                value = state[name]
                parameter.copy_(distribute_tensor(value, mesh, parameter.placements))
    return model


@pytest.mark.exhaustive
@on_two
def test_compiled_and_recomputed(device: str, tmp_path: Path) -> None:
    on_ranks(2, device, tmp_path, every_recipe)


def every_recipe(device: torch.device) -> None:
    mesh, ids = init_device_mesh(device.type, (2,)), whole_batch(device)
    exact, plain = one_process(device, torch.float64), one_process(device)
    for compiled, kind in ((False, "full"), (True, "none"), (True, "selective")):
        torch._dynamo.reset()
        counters.clear()
        model = nsa_flex.tensor_parallel(new_model(device).to(device), mesh)
        prepare(
            model,
            EngineSection(compile=compiled, checkpointing=kind),
            compiler=COMPILERS[device.type],
        )
        found = step(model, ids, problem.loss_of)
        assert (counters["stats"]["unique_graphs"] > 0) == compiled
        assert not counters["graph_break"]
        assert_equal(f"compiled {compiled}, recomputation {kind}", found, plain, exact)


def test_generate_and_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # transformers takes the mesh of an accelerator wherever there is one.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    patched(phi="weighted").save_pretrained(tmp_path / "whole")
    on_ranks(2, "cpu", tmp_path, generates)
    on_ranks(2, "cpu", tmp_path, checkpoints, tmp_path)


@torch.no_grad()
def generates(_device: torch.device) -> None:
    mesh, ids = init_device_mesh("cpu", (2,)), batch(2, 41)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    for phi in ("mlp", "weighted"):
        model, parallel = patched(phi=phi).eval(), patched(phi=phi).eval()
        nsa_flex.tensor_parallel(parallel, mesh)
        for implementation in (None, "static"):
            options: dict[str, Any] = {
                "attention_mask": mask,
                "max_new_tokens": 20,
                "do_sample": False,
                "cache_implementation": implementation,
                "disable_compile": True,
                "output_logits": True,
                "return_dict_in_generate": True,
            }
            expected, found = (each.generate(ids, **options) for each in (model, parallel))
            assert torch.equal(found.sequences, expected.sequences)
            logits, want = (torch.stack(each.logits) for each in (found, expected))
            assert relative_error(logits, want) < LIMIT
            assert found.past_key_values.layers[0].keys.shape[1] == 1  # KV heads of this rank


def checkpoints(_device: torch.device, folder: Path) -> None:
    ids = batch()
    model = nsa_flex.load(folder / "whole")
    expected = step(model.train(), ids)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers wants it in a config now
        loaded = nsa_flex.load(folder / "whole", tp_plan="auto")
        by_auto = transformers.AutoModelForCausalLM.from_pretrained(
            folder / "whole", tp_plan="auto"
        )
    assert_same("tp_plan", step(loaded.train(), ids), expected)
    assert by_auto.model.layers[0].self_attn.nsa.compress_key.is_split
    assert_same("AutoModel with tp_plan", step(by_auto.train(), ids), expected)
    config = transformers.distributed.DistributedConfig(tp_size=2)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "whole", distributed_config=config
    )
    assert loaded.tp_plan["model.layers.*.self_attn.nsa"] == "nsa_flex"
    assert_same("DistributedConfig", step(loaded.train(), ids), expected)
    loaded.save_pretrained(folder / "again")
    dist.barrier()
    again = nsa_flex.load(folder / "again")
    assert again.state_dict().keys() == model.state_dict().keys()
    for name, x in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], x), name


def test_the_plan_of_minicpm() -> None:
    """The gate of MiniCPM-SALA's sparse layers goes with its heads; a MiniCPM4 has none."""
    plan, gate = built().tp_plan, "model.layers.*.self_attn.o_gate"
    assert built(SALA).tp_plan == {**plan, gate: "colwise"}
    assert {**tiny_model().tp_plan, **plan} == plan


@pytest.mark.exhaustive
def test_minicpm_finds_what_one_process_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    even = replace(SALA, vocab_size=62)  # the head is split, too
    for heads in (1, 2):
        built(replace(even, num_key_value_heads=heads)).save_pretrained(tmp_path / str(heads))
    on_ranks(2, "cpu", tmp_path, gated, tmp_path)


def gated(_device: torch.device, folder: Path) -> None:
    torch.manual_seed(6)
    ids = ids_of(2, 130)
    config = transformers.distributed.DistributedConfig(tp_size=2)
    read = transformers.AutoModelForCausalLM.from_pretrained
    model = read(folder / "2", distributed_config=config)
    layer = model.model.layers[0].self_attn
    assert layer.o_gate.weight.to_local().shape[0] == layer.o_gate.weight.shape[0] // 2
    assert_same("gate", step(model.train(), ids), step(nsa_flex.load(folder / "2").train(), ids))
    with pytest.raises(ValueError, match=r"each layer has 1 KV heads .* over 2 ranks needs a"):
        read(folder / "1", distributed_config=config)


@pytest.mark.exhaustive
def test_beside_other_parallelism(tmp_path: Path) -> None:
    on_ranks(4, "cpu", tmp_path, two_dimensions)


def two_dimensions(device: torch.device) -> None:
    """Context parallelism, or FSDP2, on the other dimension of the mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "tp"))
    ids = batch()
    expected = step(patched(), ids)

    model = nsa_flex.tensor_parallel(patched(), mesh["tp"])
    nsa_flex.context_parallel(model, mesh["other"], kv_heads_at_once=1)
    own = nsa_flex.shard_batch(ids, mesh["other"], replace(NSA, compression="mlp"), labels=ids)
    logits = model(own["input_ids"], use_cache=False).logits
    labels, number = own["shift_labels"].flatten(), own["num_items_in_batch"]
    loss = F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum") / number
    loss.backward()
    assert_same("context parallelism", mean(loss, model, mesh["other"]), expected)

    model = shard(nsa_flex.tensor_parallel(patched(), mesh["tp"]), mesh["other"])
    loss = loss_of(model, ids.chunk(2)[mesh["other"].get_local_rank()])
    loss.backward()
    dist.all_reduce(loss, group=mesh["other"].get_group())
    found = Result(loss.detach() / 2, gradients(model))
    assert_same("FSDP2", found, expected)


def mean(loss: Tensor, model: nn.Module, mesh: DeviceMesh) -> Result:
    """Over a dimension of the mesh, as data parallelism takes it."""
    found = {name: whole(x) for name, x in gradients(model).items()}
    loss = loss.detach().clone()
    for x in (loss, *found.values()):
        dist.all_reduce(x, group=mesh.get_group())
        x /= mesh.size()
    return Result(loss, found)


def test_refused_by_name(tmp_path: Path) -> None:
    on_ranks(2, "cpu", tmp_path, refusals)


def refusals(_device: torch.device) -> None:
    mesh = init_device_mesh("cpu", (2,))
    split = nsa_flex.tensor_parallel(patched(), mesh)
    odd = patched()
    odd.model.layers[1].self_attn.q_proj.weight = nn.Parameter(
        distribute_tensor(odd.model.layers[1].self_attn.q_proj.weight.detach(), mesh)
    )
    group = mesh.get_group()
    one_head = tiny_model(num_key_value_heads=1)
    planless = patched()
    planless._tp_plan = {}
    cases: list[tuple[Any, Any, type[Exception], str]] = [
        (patched(), group, TypeError, "mesh is a ProcessGroup; it must be a DeviceMesh"),
        (
            patched(),
            init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")),
            ValueError,
            r"mesh has 2 dimensions .*; expected the one that splits heads, mesh\[name\]",
        ),
        (tiny_model(), mesh, ValueError, r"no patched layers: call nsa_flex.patch\(model\) fir"),
        (split, mesh, ValueError, "the heads of model.layers.0.self_attn are split already"),
        (
            nsa_flex.patch(one_head, NSA),
            mesh,
            ValueError,
            r"model.layers.0.self_attn has 1 KV heads \(and 4 query heads\), and tensor "
            "parallelism over 2 ranks needs a multiple of 2: .* use at most 1 ranks",
        ),
        (
            DistributedDataParallel(patched()),
            mesh,
            ValueError,
            "DistributedDataParallel already, .* call nsa_flex.tensor_parallel first, then wrap",
        ),
        (shard(patched(), mesh), mesh, ValueError, "sharded by fully_shard already"),
        (odd, mesh, ValueError, "layers.1.self_attn.q_proj.weight is a DTensor, .*Replicate"),
        (planless, mesh, ValueError, "LlamaForCausalLM has no tp_plan: .* parallelize_module fir"),
    ]
    for model, given, kind, message in cases:
        before = list(model.named_parameters())
        with pytest.raises(kind, match=message):
            nsa_flex.tensor_parallel(model, given)
        assert all(x is y for (_, x), (_, y) in zip(before, model.named_parameters(), strict=True))

    by_parallelize_module(dense := tiny_model(num_key_value_heads=1, head_dim=8), mesh)
    with pytest.raises(ValueError, match=r"has 1 KV heads .* tensor parallelism over 2 ranks"):
        nsa_flex.patch(dense, NSA)
    assert not hasattr(dense.model.layers[0].self_attn, "nsa")


def test_patch_names_its_layers_in_the_plan() -> None:
    dense = tiny_model()
    before = copy.deepcopy([dense.tp_plan, dense.model.tp_plan])
    model = nsa_flex.patch(dense, NSA, filter_fn=lambda _, name: "layers.1" in name)
    assert model.tp_plan == {**before[0], "model.layers.*.self_attn.nsa": "nsa_flex"}
    assert model.model.tp_plan == {**before[1], "layers.*.self_attn.nsa": "nsa_flex"}
    assert tiny_model().tp_plan == before[0]
    json.dumps(model.tp_plan)
    nsa_flex.unpatch(model)
    assert [model.tp_plan, model.model.tp_plan] == before
    # Of a family that gathers what its projections give, layers have all heads.
    assert "nsa_flex" not in nsa_flex.patch(tiny_model("phi3"), NSA).tp_plan.values()
