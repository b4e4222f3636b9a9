"""MiniMax-M3 as it is on the hub: upstream's names of tensors, images, every tensor taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as modeling

from nsa_flex.patching import minimax_m3
from nsa_flex.testing import check_model
from nsa_flex.testing.models import model_named
from nsa_flex.testing.run import CHECKS

IMAGE, VIDEO = 60, 61  # tokens
CONFIG = {
    "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
    "model_type": "minimax_m3_vl",
    "image_token_index": IMAGE,
    "video_token_index": VIDEO,
    "projector_hidden_size": 24,
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "patch_size": 4,
    },
    "text_config": {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 16,
        "dense_intermediate_size": 32,
        "shared_intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rotary_dim": 8,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "sparse_attention_config": {
            "sparse_attention_freq": [0, 1, 1],
            "sparse_num_index_heads": 2,
            "sparse_index_dim": 16,
            "sparse_block_size": 16,
            "sparse_topk_blocks": 3,
            "sparse_local_block": 1,
        },
        "moe_layer_freq": [0, 1, 0],
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5
        },
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    },
}  # fmt: skip
OF_PATCHES = ("dense start", "twin on the same config", "unpatch")
# Prefixes of a model's tensors, and of the same in a checkpoint.
PREFIXES = {
    "lm_head.": "language_model.lm_head.",
    "model.language_model.": "language_model.model.",
    "model.vision_tower.embeddings.proj.": "vision_tower.vision_model.embeddings.patch_embedding.",
    "model.vision_tower.layers.": "vision_tower.vision_model.encoder.layers.",
    "model.vision_tower.pre_layrnorm.": "vision_tower.vision_model.pre_layrnorm.",
    "model.multi_modal_projector.linear_": "multi_modal_projector.linear_",
    "model.multi_modal_projector.merge_linear_": "patch_merge_mlp.linear_",
}


def as_published(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A model's tensor under upstream's names: experts one by one, gate and up apart."""
    (prefix,) = (each for each in PREFIXES if name.startswith(each))
    name = PREFIXES[prefix] + name.removeprefix(prefix)
    name = name.replace(".self_attn.indexer.", ".self_attn.index_")
    name = name.replace(".mlp.gate.e_score", ".block_sparse_moe.e_score")
    for part in ("gate.", "experts.", "shared_experts."):
        name = name.replace(f".mlp.{part}", f".block_sparse_moe.{part}")
    if ".experts." in name:
        before, _, kind = name.rpartition(".")
        parts = {"w2": tensor} if kind == "down_proj" else dict(
            zip(("w1", "w3"), tensor.chunk(2, 1), strict=True)
        )  # fmt: skip
        return {
            f"{before}.{i}.{part}.weight": x[i].clone()
            for part, x in parts.items()
            for i in range(len(x))
        }
    if ".gate_up_proj." in name:
        halves = zip(("gate", "up"), tensor.chunk(2), strict=True)
        return {name.replace("gate_up", half): x.clone() for half, x in halves}
    return {name: tensor}


def write(path: Path) -> None:
    """A checkpoint with random weights."""
    (path / "config.json").write_text(json.dumps(CONFIG))
    model = modeling.MiniMaxM3SparseForConditionalGeneration(
        transformers.AutoConfig.from_pretrained(path)
    )
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            nn.init.normal_(parameter, std=0.3)
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        tensors |= as_published(name, tensor)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("minimax_m3")
    write(path)
    return path


def read(folder: Path, attention: str, **options: Any) -> Any:
    return transformers.AutoModelForImageTextToText.from_pretrained(
        folder, attn_implementation=attention, dtype=torch.float64,
        experts_implementation="eager", **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def models(folder: Path) -> tuple[Any, Any]:
    """The same checkpoint with transformers' SDPA and with nsa_flex."""
    return read(folder, "sdpa"), read(folder, "nsa_flex")


def picture_and_text(length: int) -> dict[str, Tensor]:
    """Two rows with an image of 2 x 3 tokens each, at different places."""
    ids = torch.randint(2, IMAGE, (2, length))
    ids[0, 20:26] = ids[1, 3:9] = IMAGE
    grid = torch.tensor([[1, 4, 6]] * 2)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(2 * 24, 3 * 2 * 4 * 4, dtype=torch.float64),
        "image_grid_thw": grid,
    }


def test_every_tensor_is_taken_under_upstreams_names(folder: Path) -> None:
    model, report = read(folder, "nsa_flex", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    written: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        written |= as_published(name, tensor)
    stored = load_file(folder / "model.safetensors")
    assert written.keys() == stored.keys()
    assert "language_model.model.layers.1.self_attn.index_q_proj.weight" in stored
    for name, tensor in stored.items():
        assert torch.equal(written[name].float(), tensor), name


def test_images_go_through_sdpa_and_text_through_blocks(models: Any, monkeypatch: Any) -> None:
    model, ours = models
    kinds = []
    attend = minimax_m3.attend

    def note(module: Any, *tensors: Any, **kwargs: Any) -> Any:
        is_sparse = kwargs.get("block_indices") is not None
        kinds.append((type(module).__name__.removeprefix("MiniMaxM3VL"), is_sparse))
        return attend(module, *tensors, **kwargs)

    monkeypatch.setattr(minimax_m3, "attend", note)
    inputs = picture_and_text(70)
    with torch.no_grad():
        found, expected = ours(**inputs).logits, model(**inputs).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    vision = [("VisionAttention", False)] * 4  # two layers of two images
    assert kinds == [*vision, ("Attention", False), *[("Attention", True)] * 2]


def test_the_vision_tower_is_trained(models: Any) -> None:
    inputs = picture_and_text(60)
    gradients = []
    for model in models:
        model.zero_grad()
        model(**inputs).logits.square().mean().backward()
        tower = model.model.vision_tower.named_parameters()
        gradients.append({name: x.grad for name, x in tower})
    for name, expected in gradients[0].items():
        assert expected.any() or name.endswith("k_proj.bias"), name
        torch.testing.assert_close(gradients[1][name], expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("cache", [None, "static"])
def test_text_is_generated_after_an_image(models: Any, cache: str | None) -> None:
    inputs = picture_and_text(60)
    made = [
        model.generate(
            **inputs, max_new_tokens=12, do_sample=False, pad_token_id=0,
            cache_implementation=cache, disable_compile=True,
        )
        for model in models
    ]  # fmt: skip
    assert torch.equal(*made)
    assert made[0].shape == (2, 72)


def test_the_checks_of_models_take_it(folder: Path) -> None:
    report = check_model(model_named(str(folder)))
    names = [check.name for check in report.checks]
    assert names == [name for name in CHECKS if name not in OF_PATCHES], report
    assert {check.status for check in report.checks} == {"ok"}, report
    assert len(report.layers) == 2
