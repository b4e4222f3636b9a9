"""torchao on patched models: what is quantized, what stays, saved and read again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nsa_flex
from patching.tiny_models import NSA, relative_error, tiny_model, tokens

torchao: Any = pytest.importorskip("torchao.quantization")
transformers = pytest.importorskip("transformers")

CONFIGS = {
    "int8 weights": torchao.Int8WeightOnlyConfig,
    "int8 weights and activations": torchao.Int8DynamicActivationInt8WeightConfig,
    "float8 weights": torchao.Float8WeightOnlyConfig,
}
every_kind = pytest.mark.parametrize("kind", CONFIGS)
# Of 80 tokens all blocks are chosen: rounding a score changes no choice, which is a step.
ALL_CHOSEN = replace(NSA, num_selected_blocks=10)
# The rounding of dense attention's projections is the measure; NSA attends three times.
MORE_THAN_DENSE = 2.0


def model_of(patched: bool, **changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, **changes}
    model: Any = tiny_model("llama", **sizes).to(torch.bfloat16)
    return nsa_flex.patch(model, ALL_CHOSEN) if patched else model


@torch.no_grad()
def logits(model: Any, ids: Tensor) -> Tensor:
    return model(ids).logits


def rounding(patched: bool, config: Any, ids: Tensor, device: str = "cpu") -> float:
    """How far the quantized model is from itself, relative."""
    model = model_of(patched).to(device)
    ids = ids.to(device)
    before = logits(model, ids)
    torchao.quantize_(model, config, filter_fn=nsa_flex.quantization_filter)
    return relative_error(logits(model, ids), before)


def assert_only_nsa_is_whole(model: nn.Module) -> None:
    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    linear.pop("lm_head")
    for name, module in linear.items():
        is_quantized = type(module.weight.data).__module__.startswith("torchao")
        assert is_quantized != name.endswith("nsa.gates.linear"), name
    added = {name: x for name, x in model.named_parameters() if ".nsa." in name}
    assert added
    assert {type(x) for x in added.values()} == {nn.Parameter}
    assert {x.dtype for x in added.values()} == {torch.bfloat16}


@every_kind
def test_gates_and_compression_stay_as_they_are(kind: str) -> None:
    model = model_of(patched=True)
    torchao.quantize_(model, CONFIGS[kind](), filter_fn=nsa_flex.quantization_filter)
    assert_only_nsa_is_whole(model)


@every_kind
def test_a_patched_model_loses_what_a_dense_one_does(kind: str) -> None:
    ids = tokens(2, 80)
    dense, sparse = (rounding(patched, CONFIGS[kind](), ids) for patched in (False, True))
    assert 0 < sparse < MORE_THAN_DENSE * dense


def test_cached_steps_of_a_quantized_model_are_its_whole_pass() -> None:
    model = model_of(patched=True)
    config = torchao.Int8WeightOnlyConfig()
    torchao.quantize_(model, config, filter_fn=nsa_flex.quantization_filter)
    ids = tokens(1, 60)
    whole = logits(model, ids)[:, 40:]
    cache = nsa_flex.NSACache(model)
    with torch.no_grad():
        model(ids[:, :40], past_key_values=cache)
        steps = [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(40, 60)]
    # Two orders of sums in bfloat16, of which each may be a unit off in every layer.
    assert relative_error(torch.cat(steps, 1), whole) < 4 * torch.finfo(torch.bfloat16).eps


@every_kind
def test_quantized_on_loading_saved_and_loaded_again(kind: str, tmp_path: Path) -> None:
    ids = tokens(1, 50)
    model_of(patched=True).save_pretrained(tmp_path / "whole")
    config = transformers.TorchAoConfig(CONFIGS[kind]())
    quantized = nsa_flex.load(tmp_path / "whole", quantization_config=config, dtype=torch.bfloat16)
    assert_only_nsa_is_whole(quantized)
    quantized.save_pretrained(tmp_path / "quantized")
    again = nsa_flex.load(tmp_path / "quantized")
    assert_only_nsa_is_whole(again)
    assert torch.equal(logits(again, ids), logits(quantized, ids))


def test_quantized_in_memory_goes_through_torch_save(tmp_path: Path) -> None:
    ids = tokens(1, 50)
    model, again = (model_of(patched=True) for _ in range(2))
    config = torchao.Int8WeightOnlyConfig()
    torchao.quantize_(model, config, filter_fn=nsa_flex.quantization_filter)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    again.load_state_dict(torch.load(tmp_path / "state.pt"), assign=True)
    assert torch.equal(logits(again, ids), logits(model, ids))


def test_save_pretrained_of_what_was_quantized_in_memory_is_refused(tmp_path: Path) -> None:
    model = model_of(patched=True)
    config = torchao.Int8WeightOnlyConfig()
    torchao.quantize_(model, config, filter_fn=nsa_flex.quantization_filter)
    with pytest.raises(ValueError, match=r"q_proj.weight was quantized in memory .*TorchAoConfig"):
        model.save_pretrained(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", ["PerTensor", "PerRow"])
def test_float8_activations_on_a_gpu(granularity: str) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("float8 products need compute capability 8.9")
    scales = getattr(torchao, granularity)()
    config = torchao.Float8DynamicActivationFloat8WeightConfig(granularity=scales)
    ids = tokens(2, 80)
    dense, sparse = (rounding(patched, config, ids, "cuda") for patched in (False, True))
    assert 0 < sparse < MORE_THAN_DENSE * dense
