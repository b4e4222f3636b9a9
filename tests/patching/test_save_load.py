"""What is written by `save_pretrained` or as a state dict comes back as the same model."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import nsa_flex
from patching.tiny_models import NSA, tiny_model, tokens


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.utils.logging, "_tqdm_active", False)


def trained(model: nn.Module) -> nn.Module:
    """Every parameter moved off its start, gates and φ too."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    return model


def logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "gemma3",
        "phi3",
        "gpt2",
        "gpt-neox",
        "falcon-40b",
        "stablelm",
        "qwen3-next",
        "qwen3.5",
    ],
)
@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_a_saved_model_is_loaded_with_identical_logits(
    family: str, shard: str, tmp_path: Path
) -> None:
    model = trained(nsa_flex.patch(tiny_model(family), NSA, init="dense"))
    ids = tokens(2, 50)
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert not list(tmp_path.glob("*.bin"))
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 or shard == "5GB"

    loaded = nsa_flex.load(tmp_path, attn_implementation="eager")

    assert torch.equal(logits(loaded, ids), logits(model, ids))
    assert loaded.config.nsa_flex == model.config.nsa_flex
    assert not loaded.training
    assert {n: p.dtype for n, p in loaded.named_parameters()} == {
        n: p.dtype for n, p in model.named_parameters()
    }


def test_load_keeps_what_patch_was_told(tmp_path: Path) -> None:
    backend = {"selected": "dense", "sliding": "auto"}
    model = nsa_flex.patch(
        tiny_model(), NSA, filter_fn=lambda _, name: "layers.1" in name, backend=backend
    )
    model.save_pretrained(tmp_path)
    loaded = nsa_flex.load(tmp_path)
    assert not hasattr(loaded.model.layers[0].self_attn, "nsa")
    layer = loaded.model.layers[1].self_attn.nsa
    assert (layer.config, layer.init, layer.backend) == (NSA, "paper", backend)
    assert (
        nsa_flex.load(tmp_path, backend="dense").model.layers[1].self_attn.nsa.backend == "dense"
    )


def test_loading_in_another_dtype_casts_the_added_tensors_too(tmp_path: Path) -> None:
    trained(nsa_flex.patch(tiny_model(), NSA)).save_pretrained(tmp_path)
    loaded = nsa_flex.load(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}


def test_a_half_precision_model_is_loaded_with_identical_logits(tmp_path: Path) -> None:
    # Not by model.bfloat16(), which would round transformers' rotary frequencies as well.
    trained(nsa_flex.patch(tiny_model(), NSA)).save_pretrained(tmp_path / "float32")
    model = nsa_flex.load(tmp_path / "float32", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "bfloat16")
    loaded, ids = nsa_flex.load(tmp_path / "bfloat16"), tokens(1, 40)
    assert torch.equal(logits(loaded, ids), logits(model, ids))


def test_a_loaded_model_can_be_unpatched(tmp_path: Path) -> None:
    dense = tiny_model()
    ids = tokens(1, 40)
    expected = logits(dense, ids)
    nsa_flex.patch(dense, NSA).save_pretrained(tmp_path)
    loaded = nsa_flex.unpatch(nsa_flex.load(tmp_path, attn_implementation="eager"))
    assert torch.equal(logits(loaded, ids), expected)
    assert not hasattr(loaded.config, "nsa_flex")


def test_transformers_alone_loads_the_dense_part(tmp_path: Path) -> None:
    dense = tiny_model()
    ids = tokens(1, 40)
    expected = logits(dense, ids)
    nsa_flex.patch(dense, NSA).save_pretrained(tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager"
    )
    assert torch.equal(logits(plain, ids), expected)
    nsa_flex.patch(plain, NSA)


def test_the_state_dict_goes_into_an_equally_patched_model(tmp_path: Path) -> None:
    model = trained(nsa_flex.patch(tiny_model(), NSA, init="dense"))
    twin = nsa_flex.patch(tiny_model(), NSA, init="dense")
    state = {name: x.clone() for name, x in model.state_dict().items()}
    save_file(state, tmp_path / "state.safetensors")
    twin.load_state_dict(load_file(tmp_path / "state.safetensors"))
    ids = tokens(1, 40)
    assert torch.equal(logits(twin, ids), logits(model, ids))


def test_a_dense_checkpoint_is_refused(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"not a checkpoint of a patched model .*no nsa_flex"):
        nsa_flex.load(tmp_path)


@pytest.mark.parametrize("name", ["self_attn.nsa.gates.linear.bias", "mlp.up_proj.weight"])
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    nsa_flex.patch(tiny_model(), NSA).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    del state[f"model.layers.1.{name}"]
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"checkpoint lacks .*layers\.1\.{name}"):
        nsa_flex.load(tmp_path)


def test_the_record_is_json_and_survives_a_copy_of_the_config() -> None:
    model = nsa_flex.patch(tiny_model("gemma3"), NSA)
    record = copy.deepcopy(model.config).nsa_flex
    assert json.loads(json.dumps(record)) == record
    assert record["config"] == NSA.to_dict()
    assert json.loads(model.config.to_json_string())["nsa_flex"] == record
