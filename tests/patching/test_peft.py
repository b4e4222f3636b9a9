"""PEFT on a patched model: LoRA, and φ and gates trained whole by modules_to_save=["nsa"]."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn

import nsa_flex
from nsa_flex.patching.layer import layer_of
from patching.own_adapters import takes_own_adapters
from patching.tiny_models import NSA, moved, relative_error, tiny_model, tokens

IDS = tokens(2, 40)


def adapted() -> nn.Module:
    """A patched model with an adapter, both trained for some steps."""
    model = nsa_flex.patch(tiny_model(), NSA)
    config = peft.LoraConfig(
        target_modules=["q_proj", "v_proj"],
        modules_to_save=["nsa"],
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(model, config)
    train(model)
    return model


def train(model: nn.Module) -> None:
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    for _ in range(3):
        model(IDS, labels=IDS, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(IDS, use_cache=False).logits


@torch.no_grad()
def generate(model: nn.Module) -> Tensor:
    return model.generate(IDS[:, :20], max_new_tokens=8, do_sample=False)


def greedy(model: nn.Module) -> Tensor:
    """As `generate`, without a cache."""
    ids = IDS[:, :20]
    with torch.no_grad():
        for _ in range(8):
            following = model(ids, use_cache=False).logits[:, -1:].argmax(-1)
            ids = torch.cat((ids, following), 1)
    return ids


def test_training_moves_the_copies_that_are_saved() -> None:
    model = adapted()
    for module in model.modules():
        layer = layer_of(module)
        if layer is None:
            continue
        copy = module.nsa.modules_to_save["default"]
        moved = [
            name
            for name, x in copy.named_parameters()
            if not torch.equal(x, layer.get_parameter(name))
        ]
        assert len(moved) == len(list(copy.parameters()))


def test_generation_uses_the_copies_in_force() -> None:
    model = adapted()
    assert torch.equal(generate(model), greedy(model))
    with model.disable_adapter():
        assert torch.equal(generate(model), greedy(model))


def test_a_merged_model_is_a_patched_model(tmp_path: Path) -> None:
    model = adapted()
    expected = logits(model)
    merged = model.merge_and_unload()
    torch.testing.assert_close(logits(merged), expected)
    merged.save_pretrained(tmp_path)
    assert torch.equal(
        logits(nsa_flex.load(tmp_path, attn_implementation="eager")), logits(merged)
    )
    assert torch.equal(generate(merged), greedy(merged))
    nsa_flex.unpatch(merged)
    assert not [name for name, _ in merged.named_modules() if name.endswith("nsa")]
    assert not any(module._forward_pre_hooks for module in merged.modules())


def test_unpatch_looks_through_the_wrapper() -> None:
    dense = tiny_model()
    expected = logits(dense)
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["nsa"])
    model = peft.get_peft_model(nsa_flex.patch(dense, NSA), config)
    nsa_flex.unpatch(model)
    assert not [name for name, _ in model.named_modules() if ".nsa" in name]
    assert torch.equal(logits(model), expected)  # LoRA starts as no change


def test_an_adapter_comes_back_on_the_same_base(tmp_path: Path) -> None:
    base = nsa_flex.patch(tiny_model(), NSA, init="dense")
    base.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(
        target_modules=["q_proj"], modules_to_save=["nsa"], task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(nsa_flex.load(tmp_path / "base"), config)
    train(model)
    model.save_pretrained(tmp_path / "adapter")

    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert torch.equal(logits(loaded), logits(model))
    again = peft.PeftModel.from_pretrained(nsa_flex.load(tmp_path / "base"), tmp_path / "adapter")
    assert torch.equal(logits(again), logits(model))


def test_an_adapter_without_nsa_keeps_that_of_the_base(tmp_path: Path) -> None:
    base = nsa_flex.patch(tiny_model(), NSA)
    train(base)
    base.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(nsa_flex.load(tmp_path / "base"), config)
    train(model)
    model.save_pretrained(tmp_path / "adapter")
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert torch.equal(logits(loaded), logits(model))


def test_the_adapter_of_a_base_that_was_not_saved_does_not_load_on_the_dense_one(
    tmp_path: Path,
) -> None:
    tiny_model().save_pretrained(tmp_path / "dense")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    config = peft.LoraConfig(
        target_modules=["q_proj"], modules_to_save=["nsa"], task_type="CAUSAL_LM"
    )
    peft.get_peft_model(nsa_flex.patch(base, NSA), config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(
        OSError, match=r"nsa_flex\.patch\(.*save_pretrained it, then nsa_flex\.load"
    ):
        peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")


@takes_own_adapters
@pytest.mark.parametrize("patched", [False, True])
def test_an_adapter_of_transformers_own(patched: bool, tmp_path: Path) -> None:
    """`add_adapter` and its `save_pretrained`, and the Auto class with the adapter's folder."""
    base, folder = tmp_path / "base", tmp_path / "adapter"
    model = tiny_model()
    if patched:
        moved(nsa_flex.patch(model, NSA))
    model.save_pretrained(base)
    auto = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(base, dtype=torch.float64)
    model.add_adapter(peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    model.save_pretrained(folder)
    assert (folder / "adapter_config.json").exists()
    loaded = auto.from_pretrained(folder, dtype=torch.float64)
    assert torch.equal(logits(loaded), logits(model))
    assert patched == any(layer_of(module) is not None for module in loaded.modules())


@torch.no_grad()
def cached_error(model: nn.Module, cache: object) -> float:
    """How far a second call with the cache is from one call over all tokens."""
    model(IDS[:, :25], past_key_values=cache)
    found = model(IDS[:, 25:], past_key_values=cache).logits
    return relative_error(found, logits(model)[:, 25:])


@pytest.mark.parametrize("max_length", [None, 50])
def test_a_cache_compresses_with_the_adapter_in_force(max_length: int | None) -> None:
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["nsa"])
    model = nsa_flex.patch(tiny_model(), NSA)
    early = nsa_flex.NSACache(model, max_length=max_length)
    model = peft.get_peft_model(model, config, adapter_name="one")
    model.add_adapter("two", config)
    moved(model)
    assert cached_error(model, early) < 1e-12  # made before there were adapters, and empty
    cache = nsa_flex.NSACache(model, max_length=max_length)
    assert cached_error(model, cache) < 1e-12
    model.set_adapter("two")
    lengths = [int(layer.get_seq_length()) for layer in cache.layers]
    with torch.no_grad(), pytest.raises(ValueError, match="another φ compressed"):
        model(IDS[:, :1], past_key_values=cache)
    assert [int(layer.get_seq_length()) for layer in cache.layers] == lengths
    cache.reset()
    assert cached_error(model, cache) < 1e-12
