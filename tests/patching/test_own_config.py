"""A patched model has a config of its own: nobody who shares the original sees the patch."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import nsa_flex
from nsa_flex.patching.hf_attention import attention_forward
from patching.tiny_models import NSA, tiny_model, tokens


def twins(implementation: str = "sdpa", family: str = "llama") -> tuple[nn.Module, nn.Module]:
    """Two models on one config object, with the same parameters."""
    first = tiny_model(family, attn_implementation=implementation)
    second = type(first)(first.config).eval()
    second.load_state_dict(first.state_dict())
    assert second.config is first.config
    return first, second


def logits(model: nn.Module, ids: Tensor, **arguments: Any) -> Tensor:
    with torch.no_grad():
        return model(ids, **arguments).logits


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("masked", [False, True])
def test_patching_one_model_leaves_another_on_the_same_config_alone(
    implementation: str, masked: bool
) -> None:
    dense, sparse = twins(implementation)
    ids = tokens(1, 40)
    call = {"attention_mask": torch.ones_like(ids)} if masked else {}
    expected = logits(dense, ids, **call)
    nsa_flex.patch(sparse, NSA)
    assert torch.equal(logits(dense, ids, **call), expected)
    assert not torch.equal(logits(sparse, ids, **call), expected)
    assert dense.config._attn_implementation == implementation
    assert not hasattr(dense.config, "nsa_flex")


def test_two_models_on_one_config_are_patched_and_unpatched_apart() -> None:
    first, second = twins()
    ids, config = tokens(2, 40), first.config
    dense = logits(first, ids)
    nsa_flex.patch(first, NSA)
    nsa_flex.patch(second, NSA, init="dense")
    sparse = logits(first, ids)
    assert second.config.nsa_flex["init"] == "dense"
    nsa_flex.unpatch(second)
    assert torch.equal(logits(second, ids), dense)
    assert torch.equal(logits(first, ids), sparse)
    assert first.config.nsa_flex["init"] == "paper"
    nsa_flex.unpatch(first)
    assert first.config is second.config is config
    assert torch.equal(logits(first, ids), dense)


def configs_of(model: nn.Module) -> dict[str, Any]:
    return {
        f"{name}.{key}": value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, transformers.PreTrainedConfig)
    }


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_unpatch_gives_the_config_objects_back(family: str) -> None:
    model = tiny_model(family)
    before = configs_of(model)
    nsa_flex.patch(model, NSA)
    patched = configs_of(model)
    assert patched.keys() == before.keys()
    assert all(patched[name] is not config for name, config in before.items())
    assert model.config is model.model.config
    nsa_flex.unpatch(model)
    assert all(config is before[name] for name, config in configs_of(model).items())


def test_nested_configs_keep_their_place() -> None:
    text = tiny_model().config.to_dict()
    model = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(
            text_config=text,
            vision_config={
                "model_type": "clip_vision_model",
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 8,
                "patch_size": 4,
            },
            image_token_index=96,
        )
    ).eval()
    config, nested = model.config, model.config.text_config
    vision = model.model.vision_tower.config._attn_implementation
    chosen = {"filter_fn": lambda module, name: "language_model" in name}
    nsa_flex.patch(model, NSA, **chosen)
    assert model.config.text_config is model.model.language_model.config
    assert model.config.text_config.nsa_flex["layers"]
    assert model.config.text_config._attn_implementation == "nsa_flex"
    assert model.model.vision_tower.config._attn_implementation == vision
    assert not hasattr(nested, "nsa_flex")
    logits(model, tokens(1, 20))
    nsa_flex.unpatch(model)
    assert model.config is config
    assert model.config.text_config is model.model.language_model.config is nested


def test_what_changes_meanwhile_is_kept() -> None:
    model = tiny_model()
    original = model.config
    rope = copy.deepcopy(original.rope_parameters)
    nsa_flex.patch(model, NSA)
    model.resize_token_embeddings(120)
    model.config.use_cache = False
    model.config.remark = {"of": "the user"}
    del model.config.bos_token_id
    assert original.vocab_size != 120
    nsa_flex.unpatch(model)
    assert model.config is original
    assert (original.vocab_size, original.use_cache) == (120, False)
    assert original.remark == {"of": "the user"}
    assert "bos_token_id" not in vars(original)
    assert original.rope_parameters == rope
    assert logits(model, tokens(1, 9)).shape[-1] == 120


def test_what_the_original_says_meanwhile_is_not_overwritten() -> None:
    first, second = twins()
    nsa_flex.patch(first, NSA)
    second.resize_token_embeddings(120)
    nsa_flex.unpatch(first)
    assert second.config.vocab_size == 120


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_copy_is_unpatched_on_its_own(copied: Any, family: str) -> None:
    model = tiny_model(family)
    ids = tokens(2, 40)
    dense = logits(model, ids)
    twin = copied(nsa_flex.patch(model, NSA))
    sparse = logits(model, ids)
    assert torch.equal(logits(twin, ids), sparse)
    nsa_flex.unpatch(twin)
    assert torch.equal(logits(twin, ids), dense)
    assert not hasattr(twin.config, "nsa_flex")
    assert torch.equal(logits(model, ids), sparse)


def test_a_wrapper_that_unpatch_did_not_see_holds_a_plain_config() -> None:
    model = nsa_flex.patch(tiny_model(attn_implementation="sdpa"), NSA)
    nsa_flex.unpatch(model.model)
    assert not hasattr(model.config, "nsa_flex")
    assert model.config._attn_implementation == "sdpa"


def test_a_config_that_cannot_be_copied_leaves_the_model_as_it_was() -> None:
    class Unique:
        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            raise TypeError("there is only one")

    model = tiny_model()
    model.config.unique = Unique()
    config = model.config
    with pytest.raises(TypeError, match="only one"):
        nsa_flex.patch(model, NSA)
    assert model.config is config
    assert not hasattr(config, "nsa_flex")
    assert not any(name.endswith("nsa") for name, _ in model.named_modules())


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("masked", [False, True])
def test_a_model_made_from_the_config_of_a_patched_one_does_not_attend(
    family: str, masked: bool
) -> None:
    patched = nsa_flex.patch(tiny_model(family), NSA)
    ids = tokens(1, 40)
    call = {"attention_mask": torch.ones_like(ids)} if masked else {}
    made = type(patched)(copy.deepcopy(patched.config)).eval()
    with pytest.raises(
        ValueError, match=r"is not patched: call nsa_flex\.load\(path\).*nsa_flex\.patch\(model\)"
    ):
        logits(made, ids, **call)
    made.set_attn_implementation("sdpa")
    logits(made, ids, **call)


def test_a_model_made_from_the_config_of_a_patched_one_can_be_patched() -> None:
    patched = nsa_flex.patch(tiny_model(attn_implementation="sdpa"), NSA)
    made = type(patched)(copy.deepcopy(patched.config)).eval()
    del made.config.nsa_flex
    nsa_flex.patch(made, NSA)
    made.load_state_dict(patched.state_dict())
    ids = tokens(1, 40)
    assert torch.equal(logits(made, ids), logits(patched, ids))
    assert made.config.nsa_flex["attn_implementation"] == "sdpa"


def test_naming_nsa_as_the_attention_of_a_model_that_is_not_patched() -> None:
    model = tiny_model()
    ids = tokens(1, 40)
    model.set_attn_implementation("nsa_flex")
    with pytest.raises(ValueError, match="it has no record of a patch: call nsa_flex"):
        logits(model, ids, attention_mask=torch.ones_like(ids))
    with pytest.raises(ValueError, match="LlamaAttention is not patched: call nsa_flex"):
        attention_forward(model.model.layers[0].self_attn, *[torch.zeros(1, 2, 3, 4)] * 3, None)


def test_layers_left_out_hold_a_config_that_names_their_attention() -> None:
    model = nsa_flex.patch(tiny_model("gemma3", attn_implementation="sdpa"), NSA)
    kept, patched = (layer.self_attn for layer in model.model.layers)
    assert kept.config._attn_implementation == "sdpa"
    assert patched.config is model.config


@pytest.mark.parametrize("family", ["qwen2-sliding", "llama"])
@pytest.mark.parametrize("other", ["sdpa", "flex_attention"])
def test_unpatched_layers_follow_another_implementation(family: str, other: str) -> None:
    """They run what masks are made for; back with NSA, what they ran before."""
    dense, sparse = twins("eager", family)
    ids, twin = tokens(1, 20), tokens(1, 20)
    twin[:, :-1] = ids[:, :-1]  # nothing but the last token is another
    expected = logits(dense, ids)
    keep = None if family == "qwen2-sliding" else (lambda _, name: "layers.1" in name)
    nsa_flex.patch(sparse, NSA, filter_fn=keep)
    before = logits(sparse, ids)
    sparse.set_attn_implementation(other)
    found = logits(sparse, ids)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits(sparse, twin)[:, :-1], found[:, :-1], rtol=1e-4, atol=1e-4)
    sparse.set_attn_implementation("nsa_flex")
    assert torch.equal(logits(sparse, ids), before)
