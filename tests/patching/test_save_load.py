"""What is written by `save_pretrained` or as a state dict comes back as the same model."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import nsa_flex
from nsa_flex.patching.hf_saved_config import from_saved
from patching.test_multimodal import image_inputs, patched, qwen_vl
from patching.tiny_models import NSA, moved, tiny_model, tokens


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


@pytest.mark.parametrize("auto", ["AutoModelForCausalLM", "AutoModel"])
def test_auto_classes_read_a_patched_checkpoint(auto: str, tmp_path: Path) -> None:
    model = trained(nsa_flex.patch(tiny_model(), NSA, init="dense"))
    saved = model if auto == "AutoModelForCausalLM" else model.model
    saved.save_pretrained(tmp_path)
    loaded = getattr(transformers, auto).from_pretrained(tmp_path, attn_implementation="eager")
    assert type(loaded) is type(saved)
    ids = tokens(2, 50)
    with torch.no_grad():
        assert torch.equal(loaded(ids)[0], saved(ids)[0])
    assert loaded.config.model_type == "llama"
    assert loaded.config.nsa_flex == saved.config.nsa_flex


def test_auto_classes_take_the_arguments_of_from_pretrained(tmp_path: Path) -> None:
    nsa_flex.patch(tiny_model(), NSA).save_pretrained(tmp_path)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, output_loading_info=True, eos_token_id=7
    )
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert loaded.config.eos_token_id == 7
    assert not report["unexpected_keys"]
    config = transformers.AutoConfig.from_pretrained(tmp_path, eos_token_id=7)
    assert (config.eos_token_id, config.hidden_size, config.num_labels) == (7, 32, 2)
    with pytest.raises(ValueError, match=r"call nsa_flex\.load\(path\)"):
        transformers.AutoModelForCausalLM.from_config(config)


def test_a_class_of_its_own_refuses_a_patched_checkpoint(tmp_path: Path) -> None:
    nsa_flex.patch(tiny_model(), NSA).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r'attn_implementation="nsa_flex\.load"` is not supported'
    ):
        transformers.LlamaForCausalLM.from_pretrained(tmp_path)


WITHOUT_NSA_FLEX = """
import sys, transformers
from transformers import AutoModelForCausalLM, LlamaForCausalLM
path = sys.argv[1]
messages = {AutoModelForCausalLM: "model type `nsa_flex`", LlamaForCausalLM: "nsa_flex.load"}
for loader, message in messages.items():
    try:
        loader.from_pretrained(path)
    except ValueError as error:
        assert message in str(error), error
    else:
        sys.exit(f"{loader} loaded a dense model")
assert "nsa_flex" not in sys.modules
import nsa_flex
assert hasattr(AutoModelForCausalLM.from_pretrained(path).model.layers[0].self_attn, "nsa")
"""


def test_transformers_alone_refuses_a_patched_checkpoint(tmp_path: Path) -> None:
    nsa_flex.patch(tiny_model(), NSA).save_pretrained(tmp_path)
    code = [sys.executable, "-c", WITHOUT_NSA_FLEX, str(tmp_path)]
    subprocess.run(code, check=True, capture_output=True, text=True)


def test_a_checkpoint_with_the_dense_model_type_is_loaded(tmp_path: Path) -> None:
    """As nsa_flex 0.1.0 wrote them: the record in the config, nothing else of NSA."""
    model = trained(nsa_flex.patch(tiny_model(), NSA))
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(from_saved(json.loads(file.read_text()))))
    assert json.loads(file.read_text())["model_type"] == "llama"
    loaded, ids = nsa_flex.load(tmp_path, attn_implementation="eager"), tokens(1, 40)
    assert torch.equal(logits(loaded, ids), logits(model, ids))

    dense = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"records NSA layers .* call nsa_flex\.load\(path\)"):
        nsa_flex.patch(dense, NSA)


def test_a_model_made_from_the_config_of_a_patched_one_is_not_patched_anew() -> None:
    model = nsa_flex.patch(tiny_model(), NSA)
    fresh = type(model)(copy.deepcopy(model.config))
    with pytest.raises(ValueError, match=r"records NSA layers .*del model\.config\.nsa_flex"):
        nsa_flex.patch(fresh, NSA)
    del fresh.config.nsa_flex
    assert nsa_flex.patch(fresh, NSA) is fresh


def test_what_is_set_on_a_config_that_was_read_counts(tmp_path: Path) -> None:
    nsa_flex.patch(tiny_model(), NSA).save_pretrained(tmp_path / "model")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "model")
    config.num_labels, config.pad_token_id = 5, 7
    config.save_pretrained(tmp_path / "config")
    again = transformers.AutoConfig.from_pretrained(tmp_path / "config")
    assert (again.num_labels, again.pad_token_id) == (5, 7)
    copy.copy(config).pad_token_id = 9
    assert config.base.pad_token_id == 7
    classifier = transformers.AutoModelForSequenceClassification
    with pytest.warns(UserWarning, match=r"newly initialized: score\.weight"):
        model = classifier.from_pretrained(tmp_path / "model", config=config)
    assert (model.score.out_features, model.config.pad_token_id) == (5, 7)


def test_a_config_that_was_read_agrees_with_itself(tmp_path: Path) -> None:
    """GPT-2 calls its width n_embd, and hidden_size too."""
    nsa_flex.patch(tiny_model("gpt2"), NSA).save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    for name, size in (("hidden_size", 64), ("n_embd", 96)):
        setattr(config, name, size)
        assert config.hidden_size == config.n_embd == config.base.hidden_size == size


def test_tensors_of_other_sizes_are_named(tmp_path: Path) -> None:
    model = nsa_flex.patch(tiny_model(), NSA)
    model.save_pretrained(tmp_path)
    size = model.config.vocab_size
    named = rf"embed_tokens\.weight is \({size}, \d+\) and \({size + 2}, \d+\) in the model"
    with pytest.raises(ValueError, match=named):
        nsa_flex.load(tmp_path, vocab_size=size + 2)
    with pytest.warns(UserWarning, match=rf"newly initialized: .*{named}"):
        found = nsa_flex.load(tmp_path, vocab_size=size + 2, ignore_mismatched_sizes=True)
    assert found.lm_head.weight.shape[0] == size + 2
    assert torch.equal(found.model.norm.weight, model.model.norm.weight)


def test_the_model_in_memory_keeps_its_class_and_type(tmp_path: Path) -> None:
    model = nsa_flex.patch(tiny_model(), NSA)
    config = model.config
    model.save_pretrained(tmp_path)
    assert type(model) is transformers.LlamaForCausalLM
    assert model.config is config
    assert (config.model_type, config.architectures) == ("llama", ["LlamaForCausalLM"])
    on_disk = json.loads((tmp_path / "config.json").read_text())
    assert (on_disk["model_type"], on_disk["architectures"]) == (
        "nsa_flex",
        ["NSALlamaForCausalLM"],
    )


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_saves_itself(how: str, tmp_path: Path) -> None:
    model = nsa_flex.patch(tiny_model(), NSA)
    twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    trained(twin).save_pretrained(tmp_path)
    loaded, ids = nsa_flex.load(tmp_path, attn_implementation="eager"), tokens(1, 40)
    assert torch.equal(logits(loaded, ids), logits(twin, ids))


def test_a_patched_model_does_not_name_the_dense_checkpoint(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "dense")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    names = (model.name_or_path, model.config.name_or_path)
    nsa_flex.patch(model, NSA)
    assert model.name_or_path == model.config.name_or_path
    with pytest.raises(
        OSError, match=r"nsa_flex\.patch\(.*save_pretrained it, then nsa_flex\.load"
    ):
        transformers.AutoModelForCausalLM.from_pretrained(model.config.name_or_path)
    model.save_pretrained(tmp_path / "sparse")
    loaded = nsa_flex.load(tmp_path / "sparse")
    assert loaded.name_or_path == loaded.config.name_or_path == str(tmp_path / "sparse")
    nsa_flex.unpatch(model)
    assert (model.name_or_path, model.config.name_or_path) == names


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


def test_a_variant_is_read_whole(tmp_path: Path) -> None:
    """NSA's tensors from the files that the others come from."""
    model, ids = moved(nsa_flex.patch(tiny_model(), NSA)), tokens(1, 40)
    model.save_pretrained(tmp_path)
    moved(model)
    model.save_pretrained(tmp_path, variant="ema")
    loaded = nsa_flex.load(tmp_path, variant="ema", dtype=torch.float64)
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    alone = tmp_path / "alone"
    model.save_pretrained(alone, variant="ema", max_shard_size="20KB")
    loaded = nsa_flex.load(alone, variant="ema", dtype=torch.float64)
    assert torch.equal(logits(loaded, ids), logits(model, ids))


@pytest.mark.parametrize(("first", "second"), [("20KB", "5GB"), ("5GB", "20KB")])
def test_two_saves_in_one_folder_are_not_mixed(first: str, second: str, tmp_path: Path) -> None:
    """transformers reads the single file, be it the older one."""
    model, ids = moved(nsa_flex.patch(tiny_model(), NSA)), tokens(1, 40)
    saved = {}
    for size in (first, second):
        trained(moved(model)).save_pretrained(tmp_path, max_shard_size=size)
        saved[size] = logits(model, ids)
    loaded = nsa_flex.load(tmp_path, dtype=torch.float64)
    assert torch.equal(logits(loaded, ids), saved["5GB"])


def test_a_head_that_the_checkpoint_lacks_is_a_new_one(tmp_path: Path) -> None:
    model, ids = moved(nsa_flex.patch(tiny_model(), NSA)), tokens(1, 40)
    model.save_pretrained(tmp_path)
    auto = transformers.AutoModelForSequenceClassification
    with pytest.warns(
        UserWarning, match=r"not in the checkpoint, newly initialized: score\.weight"
    ):
        classifier = auto.from_pretrained(tmp_path, num_labels=3, dtype=torch.float64)
    assert classifier(ids).logits.shape == (1, 3)
    with torch.no_grad():
        hidden = [each.model(ids).last_hidden_state for each in (model, classifier)]
    assert torch.equal(*hidden)


def test_a_config_that_is_not_the_decoders_saves_its_record(tmp_path: Path) -> None:
    """As after `unpatch` of the decoder alone, or where the model was given a copy."""
    model, ids = nsa_flex.patch(tiny_model(), NSA), tokens(1, 40)
    nsa_flex.unpatch(model.model)
    nsa_flex.patch(model, NSA)
    assert model.config is not model.model.config
    moved(model).save_pretrained(tmp_path)
    loaded = nsa_flex.load(tmp_path, dtype=torch.float64)
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    assert not hasattr(model.config, "nsa_flex")


CLASSES = [
    "LlamaForSequenceClassification",
    "LlamaForTokenClassification",
    "LlamaForQuestionAnswering",
    "LlamaModel",
]


@pytest.mark.parametrize("name", CLASSES)
def test_a_checkpoint_is_loaded_as_the_class_that_was_saved(name: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = getattr(transformers, name)(tiny_model().config).eval()
    moved(nsa_flex.patch(model, NSA)).save_pretrained(tmp_path)
    auto = getattr(transformers, name.replace("LlamaFor", "AutoModelFor").replace("Llama", "Auto"))
    ids = tokens(1, 40)
    for load in (nsa_flex.load, auto.from_pretrained):
        loaded = load(tmp_path, dtype=torch.float64)
        assert type(loaded) is type(model)
        with torch.no_grad():
            assert torch.equal(loaded(ids)[0], model(ids)[0])


def test_a_multimodal_checkpoint_is_loaded_as_what_it_is(tmp_path: Path) -> None:
    model = moved(patched(qwen_vl()))
    model.save_pretrained(tmp_path)
    inputs = image_inputs()
    inputs["pixel_values"] = inputs["pixel_values"].double()
    for load in (nsa_flex.load, transformers.AutoModelForImageTextToText.from_pretrained):
        loaded = load(tmp_path, dtype=torch.float64)
        assert type(loaded) is type(model)
        with torch.no_grad():
            assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)


def test_a_class_that_transformers_does_not_have_is_asked_for(tmp_path: Path) -> None:
    class OwnLlama(transformers.LlamaForCausalLM):
        pass

    model = moved(nsa_flex.patch(OwnLlama(tiny_model().config).eval(), NSA))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"is of a OwnLlama, .* pass model_class="):
        nsa_flex.load(tmp_path)
    loaded, ids = nsa_flex.load(tmp_path, model_class=OwnLlama, dtype=torch.float64), tokens(1, 40)
    assert torch.equal(logits(loaded, ids), logits(model, ids))


@pytest.mark.parametrize("auto", [False, True])
def test_an_attention_implementation_that_attends_nowhere_is_named(
    auto: bool, tmp_path: Path
) -> None:
    load = transformers.AutoModelForCausalLM.from_pretrained if auto else nsa_flex.load
    nsa_flex.patch(tiny_model(), NSA).save_pretrained(tmp_path / "all")
    with pytest.warns(UserWarning, match=r"'eager': all attention layers .* are patched, and run"):
        loaded = load(tmp_path / "all", attn_implementation="eager")
    assert loaded.config._attn_implementation == "nsa_flex"
    assert nsa_flex.unpatch(loaded).config._attn_implementation == "eager"
    one = nsa_flex.patch(tiny_model(), NSA, filter_fn=lambda _, name: "layers.1" in name)
    one.save_pretrained(tmp_path / "one")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(tmp_path / "all")
        load(tmp_path / "all", attn_implementation="nsa_flex")
        loaded = load(tmp_path / "one", attn_implementation="eager")
    assert loaded.model.layers[0].self_attn.config._attn_implementation == "eager"


@pytest.mark.parametrize("auto", [False, True])
def test_offloading_while_loading_is_refused(auto: bool, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    load = transformers.AutoModelForCausalLM.from_pretrained if auto else nsa_flex.load
    model, ids = moved(nsa_flex.patch(tiny_model(), NSA)), tokens(1, 40)
    model.save_pretrained(tmp_path)
    places = {f"model.{name}": "cpu" for name, _ in model.model.named_children()}
    del places["model.layers"]
    places |= {"model.layers.0": "cpu", "model.layers.1": "disk", "lm_head": "cpu"}
    with pytest.raises(ValueError, match=r"device_map offloads .*accelerate\.dispatch_model"):
        load(tmp_path, device_map=places, offload_folder=tmp_path / "offloaded")
    loaded = load(tmp_path, device_map="cpu", dtype=torch.float64)
    accelerate.dispatch_model(loaded, places, main_device="cpu", offload_dir=tmp_path / "disk")
    assert loaded.model.layers[1].self_attn.q_proj.weight.is_meta
    assert torch.equal(logits(loaded, ids), logits(model, ids))
