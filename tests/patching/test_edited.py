"""Layers that are added, copied, moved or dropped after `patch`, and models made of such parts."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

import nsa_flex
from patching.tiny_models import NSA, moved, tiny_model, tokens


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.utils.logging, "_tqdm_active", False)


def llama(num_layers: int = 3, **options: Any) -> Any:
    config = tiny_model().config
    config.num_hidden_layers = num_layers
    return moved(nsa_flex.patch(transformers.LlamaForCausalLM(config).eval(), NSA, **options))


def number_anew(model: Any) -> Any:
    for place, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = place
    model.config.num_hidden_layers = len(model.model.layers)
    return model


def added(model: Any) -> Any:
    """Depth up-scaling: a copy of a layer at the end."""
    model.model.layers.append(moved(copy.deepcopy(model.model.layers[1])))
    return number_anew(model)


def inserted(model: Any) -> Any:
    model.model.layers.insert(1, moved(copy.deepcopy(model.model.layers[0])))
    return number_anew(model)


def turned_about(model: Any) -> Any:
    model.model.layers = nn.ModuleList(reversed(model.model.layers))
    return number_anew(model)


def first_dropped(model: Any) -> Any:
    model.model.layers = model.model.layers[1:]
    return number_anew(model)


def last_dropped(model: Any) -> Any:
    del model.model.layers[2]
    return number_anew(model)


EDITS = [added, inserted, turned_about, first_dropped, last_dropped]
Edit = Callable[[Any], Any]


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("left_out", [None, "layers.0."])
def test_an_edited_model_comes_back_as_it_was_saved(
    edit: Edit, left_out: str | None, tmp_path: Path
) -> None:
    model = llama(filter_fn=None if left_out is None else lambda _, name: left_out not in name)
    edit(model).save_pretrained(tmp_path)
    loaded = nsa_flex.load(tmp_path, dtype=torch.float64, attn_implementation="eager")
    ids = tokens(1, 60)
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    patched = [name for name, _ in model.named_modules() if name.endswith(".nsa")]
    assert [name for name, _ in loaded.named_modules() if name.endswith(".nsa")] == patched
    assert loaded.config.nsa_flex["layers"] == model.config.nsa_flex["layers"]


def test_a_config_of_another_number_of_layers_is_not_saved(tmp_path: Path) -> None:
    model = llama()
    model.model.layers.append(copy.deepcopy(model.model.layers[1]))
    with pytest.raises(
        ValueError, match=r"has layers\.3\.self_attn, and .*num_hidden_layers=3: .*after patch"
    ):
        model.save_pretrained(tmp_path)
    del model.model.layers[3], model.model.layers[2]
    with pytest.raises(ValueError, match=r"has no layers\.2\.self_attn, .*num_hidden_layers=3"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    number_anew(model).save_pretrained(tmp_path)
    assert len(nsa_flex.load(tmp_path).model.layers) == 2


def test_layers_of_two_patches_are_not_saved(tmp_path: Path) -> None:
    model, other = llama(), llama(init="dense")
    model.model.layers[1] = other.model.layers[1]
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn was patched otherwise than .*\.0"):
        model.save_pretrained(tmp_path)


def test_a_layer_put_into_a_dense_model_is_saved_with_it(tmp_path: Path) -> None:
    dense, model = moved(tiny_model()), llama()
    dense.model.layers[1] = model.model.layers[1]
    dense.save_pretrained(tmp_path)
    loaded = nsa_flex.load(tmp_path, dtype=torch.float64)
    patched = [name for name, _ in loaded.named_modules() if name.endswith(".nsa")]
    assert patched == ["model.layers.1.self_attn.nsa"]
    assert not hasattr(dense.config, "nsa_flex")


@pytest.mark.parametrize("key", ["layers", "num_hidden_layers"])
def test_tensors_of_nsa_that_no_layer_takes_are_refused(key: str, tmp_path: Path) -> None:
    """As checkpoints of edited models were written once."""
    llama().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    if key == "layers":
        del config["nsa_flex"]["layers"][2]
    else:
        config["num_hidden_layers"] = 2
    file.write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match=r"NSA tensors that no layer takes: model\.layers\.2\.self_attn\.nsa"
    ):
        nsa_flex.load(tmp_path)


# Models that patch never saw


def patched_inside() -> Any:
    model = moved(tiny_model())
    nsa_flex.patch(model.model, NSA)
    return moved(model)


def under_another_head() -> Any:
    model = moved(tiny_model())
    model.model = moved(nsa_flex.patch(tiny_model(), NSA)).model
    return model


def classifier() -> Any:
    """The usual recipe of a reward model."""
    patched = moved(nsa_flex.patch(tiny_model(), NSA))
    model = transformers.LlamaForSequenceClassification(tiny_model().config).double().eval()
    model.model = patched.model
    return model


@pytest.mark.parametrize("make", [patched_inside, under_another_head, classifier])
@pytest.mark.parametrize("by", ["model", "class"])
def test_what_patch_never_saw_is_saved_whole(make: Any, by: str, tmp_path: Path) -> None:
    model, ids = make(), tokens(1, 60)
    if by == "model":
        model.save_pretrained(tmp_path)
    else:
        transformers.PreTrainedModel.save_pretrained(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "nsa_flex"
    loaded = nsa_flex.load(tmp_path, dtype=torch.float64)
    assert type(loaded) is type(model)
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    assert not hasattr(model.config, "nsa_flex")


def test_a_model_patched_in_a_plain_wrapper_is_saved_whole(tmp_path: Path) -> None:
    """The wrapper, which `patch` was given, has no `save_pretrained`."""
    model, ids = moved(tiny_model()), tokens(1, 60)
    nsa_flex.patch(nn.ModuleDict({"inner": model}), NSA)
    moved(model).save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert torch.equal(logits(loaded, ids), logits(model, ids))


def test_the_call_of_the_class_saves_a_patched_model(tmp_path: Path) -> None:
    model, ids = llama(), tokens(1, 60)
    transformers.LlamaForCausalLM.save_pretrained(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "nsa_flex"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert torch.equal(logits(loaded, ids), logits(model, ids))


def test_the_config_alone_is_written_as_that_of_a_patched_model(tmp_path: Path) -> None:
    """As scripts do that write the tensors by themselves."""
    model, ids = llama(), tokens(1, 60)
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(tmp_path)
    save_file(model.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "nsa_flex"
    loaded = nsa_flex.load(tmp_path, dtype=torch.float64)
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    transformers.AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    again = json.loads((tmp_path / "again" / "config.json").read_text())
    assert again == json.loads((tmp_path / "config.json").read_text())


def test_two_patched_decoders_are_not_saved_in_one(tmp_path: Path) -> None:
    model = llama()
    model.draft = llama().model
    with pytest.raises(ValueError, match=r"holds 2 patched decoders, .* save each by itself"):
        model.save_pretrained(tmp_path)
    model.draft.save_pretrained(tmp_path)


def test_a_dense_model_of_a_patched_ones_config_is_saved_as_dense(tmp_path: Path) -> None:
    model = llama()
    dense = type(model)(copy.deepcopy(model.config))
    dense.set_attn_implementation("sdpa")
    dense.save_pretrained(tmp_path)
    loaded, ids = transformers.LlamaForCausalLM.from_pretrained(tmp_path), tokens(1, 40)
    assert torch.equal(logits(loaded, ids), logits(dense.eval(), ids))
    assert dense.config.nsa_flex == model.config.nsa_flex


UNPICKLED = """
import pickle, sys
model = pickle.loads(open(sys.argv[1], "rb").read())
model.save_pretrained(sys.argv[2])
"""


def test_an_unpickled_reward_model_is_saved_whole(tmp_path: Path) -> None:
    """In a process that never called patch."""
    model, ids = classifier(), tokens(1, 60)
    (tmp_path / "model").write_bytes(pickle.dumps(model))
    subprocess.run(
        [sys.executable, "-c", UNPICKLED, tmp_path / "model", tmp_path / "saved"], check=True
    )
    loaded = nsa_flex.load(tmp_path / "saved", dtype=torch.float64)
    assert torch.equal(logits(loaded, ids), logits(model, ids))


# Calls of edited models


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("called_before", [False, True])
def test_an_edited_model_generates_what_its_full_passes_give(
    edit: Edit, called_before: bool
) -> None:
    model, ids = llama(), tokens(1, 40)
    if called_before:
        model.generate(ids, max_new_tokens=2, do_sample=False)
    edit(model)
    how = {"max_new_tokens": 8, "do_sample": False, "min_new_tokens": 8}
    expected = model.generate(ids, use_cache=False, **how)
    assert torch.equal(model.generate(ids, **how), expected)
    assert torch.equal(model.generate(ids, cache_implementation="static", **how), expected)


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_model_is_unpatched_whole(edit: Edit) -> None:
    model, ids = edit(llama()), tokens(1, 40)
    dense = transformers.LlamaForCausalLM(copy.deepcopy(model.config)).double().eval()
    dense.load_state_dict(model.state_dict(), strict=False)
    dense.set_attn_implementation("eager")
    assert logits(model, ids).shape == (1, 40, 97)
    nsa_flex.unpatch(model)
    assert torch.equal(logits(model, ids), logits(dense, ids))
    assert not any("nsa" in name for name, _ in model.named_modules())
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert "register_forward_pre_hook" not in vars(module)
        assert not hasattr(getattr(module, "config", None), "nsa_flex")


def test_a_copied_layer_follows_the_attention_implementation() -> None:
    model, ids = added(llama()), tokens(1, 40)
    sparse = logits(model, ids)
    model.set_attn_implementation("eager")
    dense = logits(model, ids)
    model.set_attn_implementation("nsa_flex")
    assert torch.equal(logits(model, ids), sparse)
    assert torch.equal(logits(nsa_flex.unpatch(model), ids), dense)


@pytest.mark.parametrize("edit", [added, first_dropped])
@pytest.mark.parametrize("implementation", ["dynamic", "static"])
def test_places_that_are_not_set_are_named(edit: Edit, implementation: str) -> None:
    model, ids = llama(), tokens(1, 40)
    numbers = [layer.self_attn.layer_idx for layer in edit(model).model.layers]
    assert numbers == list(range(len(numbers)))
    stale = [0, 1, 2, 1] if edit is added else [1, 2]
    for layer, number in zip(model.model.layers, stale, strict=True):
        layer.self_attn.layer_idx = number
    with pytest.raises(ValueError, match=r"layer_idx \[.*\], .* give each its place"):
        model.generate(ids, max_new_tokens=2, cache_implementation=implementation)
    assert logits(model, ids).shape == (1, 40, 97)


def test_a_number_of_layers_lowered_late_is_named() -> None:
    model, ids = llama(), tokens(1, 40)
    model.model.layers = model.model.layers[1:]
    model.generate(ids, max_new_tokens=2)
    model.config.num_hidden_layers = 2
    with pytest.raises(ValueError, match=r"layer_idx \[1, 2\], .*num_hidden_layers=2: .*after"):
        model.generate(ids, max_new_tokens=2)


def test_an_unpatched_layer_that_was_added_is_named() -> None:
    model, ids = llama(), tokens(1, 40)
    kind = type(model.model.layers[0])
    model.model.layers.append(kind(model.config, 3).double())
    model.config.num_hidden_layers = 4
    with pytest.raises(ValueError, match=r"is patched, and its LlamaAttention with layer_idx=3"):
        model(ids)


def test_a_model_whose_layers_were_all_exchanged_is_named() -> None:
    model, ids = llama(), tokens(1, 40)
    model.model.layers = tiny_model().double().model.layers
    with pytest.raises(ValueError, match=r"none of .* LlamaModel is patched: .*unpatch"):
        model(ids)
    nsa_flex.unpatch(model)
    assert model.config._attn_implementation == "eager"
    assert not model.model._forward_pre_hooks


def test_layers_of_two_patches_do_not_run_together() -> None:
    model, ids = llama(), tokens(1, 40)
    sizes = {**NSA.to_dict(), "window_size": 16}
    other = nsa_flex.patch(tiny_model(), nsa_flex.NSAConfig.from_dict(sizes)).double()
    model.model.layers[1] = other.model.layers[1]
    with pytest.raises(ValueError, match=r"layers of LlamaModel differ in their NSAConfig"):
        model(ids)


def test_a_patched_layer_in_a_dense_model_is_named() -> None:
    dense = moved(tiny_model())
    dense.model.layers[1] = llama().model.layers[1]
    with pytest.raises(RuntimeError, match=r"put into one that is not patched"):
        dense(tokens(1, 40))


def test_a_copied_layer_of_falcon_is_unpatched() -> None:
    model = nsa_flex.patch(tiny_model("falcon-7b"), NSA)
    layers = model.transformer.h
    layers.append(copy.deepcopy(layers[1]))
    layers[2].self_attention.layer_idx = 2
    model.config.num_hidden_layers = 3
    model(tokens(1, 40))
    nsa_flex.unpatch(model)
    assert not any("forward" in vars(module) for module in model.modules())
    model(tokens(1, 40))


def test_wrapped_layers_are_saved_by_their_own_names(tmp_path: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model, ids = llama(), tokens(1, 40)
    layers = model.model.layers
    for place, layer in enumerate(layers):
        layers[place] = checkpoint_wrapper(layer)
    assert torch.equal(model.generate(ids, max_new_tokens=3)[:, :40], ids)
    model.save_pretrained(tmp_path)
    loaded = nsa_flex.load(tmp_path, dtype=torch.float64)
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    assert loaded.config.nsa_flex["layers"] == [f"layers.{place}.self_attn" for place in range(3)]
