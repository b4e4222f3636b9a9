"""What a layer passes and NSA would ignore is refused by name, at patch or at the first call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import nsa_flex
from nsa_flex.cache.columns import IncomingBatch
from nsa_flex.patching.hf_families import declined, kind_of_mask
from nsa_flex.patching.hf_versions import CACHE
from nsa_flex.testing.models import model_types, tiny_decoder
from patching.tiny_models import NSA, SIZES, relative_error, tiny_model, tokens

IDS = tokens(2, 40)


def logits(model: nn.Module, ids: Tensor, **arguments: Any) -> Tensor:
    with torch.no_grad():
        return model(ids, **arguments).logits


def with_forward(change: Callable[..., Any], family: str = "llama") -> nn.Module:
    """A patched model whose second attention module calls `change(forward, **arguments)`."""
    model = nsa_flex.patch(tiny_model(family, attn_implementation="sdpa"), NSA)
    attention = model.model.layers[1].self_attn
    former = attention.forward
    attention.forward = lambda **arguments: change(former, **arguments)
    return model


# Families, before anything is changed

LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 2,
}
SHARED = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 8,
    "head_dim": 8,
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 8,
}
GEMMA_3N = {"laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 4}
MAMBA = {"mamba_n_heads": 4, "mamba_d_ssm": 32, "mamba_d_head": 8}


def family(name: str, config: str | None = None, **extras: Any) -> nn.Module:
    make_config = getattr(transformers, f"{config or name}Config")
    make = getattr(transformers, f"{name}ForCausalLM")
    return make(make_config(**{**SIZES, **extras})).eval()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: family("Doge"), r"has a mask that it computes itself \(keep_window_size\)"),
        (lambda: family("DiffLlama"), "has the difference of two attentions"),
        (
            lambda: family("HrmText", num_layers_per_stack=2),
            r"L_module\.layers\.0\.self_attn and H_module\.layers\.0\.self_attn have the same "
            "layer_idx=0",
        ),
        (
            lambda: family("Gemma3n", "Gemma3nText", **SHARED, **GEMMA_3N),
            r"keys and values that other layers read too \(kv_sharing_modes\)",
        ),
        (
            lambda: family("Gemma4", "Gemma4Text", **SHARED, global_head_dim=8),
            r"keys and values that other layers read too \(kv_sharing_modes\)",
        ),
        (
            lambda: family("FalconH1", **MAMBA),
            r"has a recurrent layer in the same layer of the cache \(layer type hybrid\)",
        ),
        (
            lambda: family("DeepseekV32", **LATENT),
            r"has an indexer that chooses keys \(layer type (indexed|deepseek_sparse)_attention\)",
        ),
        (
            lambda: family("DeepseekV3", **LATENT),
            r"DeepseekV3Attention has latent attention \(kv_lora_rank\)",
        ),
    ],
)
def test_a_family_is_refused_for_what_it_computes(make: Any, message: str) -> None:
    model = make()
    config, attributes = model.config, {name: set(vars(m)) for name, m in model.named_modules()}
    with pytest.raises(ValueError, match=message):
        nsa_flex.patch(model, NSA)
    assert model.config is config
    assert attributes == {name: set(vars(m)) for name, m in model.named_modules()}


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("axk2", "its indexer takes single tokens of latent keys"),
        ("deepseek_v32", "its indexer takes single tokens of latent keys"),
        ("deepseek_v4", "it attends the compressed keys themselves"),
        ("dots3_note", "its indexer takes single tokens of latent keys"),
        ("glm_moe_dsa", "its indexer takes single tokens of latent keys"),
        ("hy_v4", "its indexer takes single tokens of latent keys"),
        ("qwen4_exp", "its indexer takes blocks of 4 keys"),
    ],
)
def test_sparse_attention_that_is_left_out(model_type: str, reason: str) -> None:
    if model_type not in model_types():
        pytest.skip(f"this transformers has no {model_type}")
    message = rf"does not compute: of {model_type}.*, {reason}.*; leave"
    with pytest.raises(ValueError, match=message):
        nsa_flex.patch(tiny_decoder(model_type), NSA)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [("mistral_large4_text", "single tokens"), ("glm5_next", "pools of 16"), ("llama", None)],
)
def test_why_it_is_left_out(model_type: str, reason: str | None) -> None:
    """Of models that cannot be built alone."""
    config = transformers.PreTrainedConfig()
    config.model_type = model_type
    found = declined(config)
    assert (found is None) if reason is None else (found is not None and reason in found)


@pytest.mark.parametrize("layer", [0, 1, 2, 3])
def test_no_layer_with_shared_keys_is_patched_alone(layer: int) -> None:
    model = family("Gemma4", "Gemma4Text", **SHARED, global_head_dim=8)
    kind = "sees a limited context" if layer % 2 == 0 else "keys and values "
    with pytest.raises(ValueError, match=kind):
        nsa_flex.patch(model, NSA, filter_fn=lambda module, name: f"layers.{layer}." in name)


def test_a_family_that_views_what_attention_gives() -> None:
    model = afmoe("full_attention", "full_attention")
    ids = tokens(2, 20)
    expected = logits(model, ids)
    assert relative_error(logits(nsa_flex.patch(model, NSA, init="dense"), ids), expected) < 1e-5


@pytest.mark.parametrize(
    ("kind", "mask"),
    [
        ("full_attention", "full"),
        ("minimax_m3_sparse", "full"),
        ("sliding_attention", "local"),
        ("chunked_attention", "local"),
        ("linear_attention", None),
    ],
)
def test_which_mask_an_unpatched_layer_reads(kind: str, mask: str | None) -> None:
    module: Any = nn.Module()
    module.layer_idx = 1
    module.config = transformers.LlamaConfig(num_hidden_layers=2)
    module.config.layer_types = ["full_attention", kind]
    assert kind_of_mask(module) == mask


def test_parameters_that_accelerate_offloaded() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.cpu_offload(tiny_model(), execution_device="cpu")
    with pytest.raises(ValueError, match=r"offloaded by accelerate.*call nsa_flex\.patch first"):
        nsa_flex.patch(model, NSA)


# Masks


def test_a_mask_that_a_module_makes_of_its_own() -> None:
    def own_mask(forward: Any, attention_mask: Any, **rest: Any) -> Any:
        bias = torch.zeros(2, 4, 40, 40)
        return forward(attention_mask=bias, **rest)

    with pytest.raises(ValueError, match="LlamaAttention makes an attention mask of its own"):
        logits(with_forward(own_mask), IDS)


@pytest.mark.parametrize("heads", [1, 4])
def test_a_mask_that_a_decoder_layer_adds_to(heads: int) -> None:
    model = nsa_flex.patch(tiny_model(), NSA)

    def add(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "attention_mask": torch.zeros(2, heads, 40, 40)}

    model.model.layers[0].register_forward_pre_hook(add, with_kwargs=True)
    with pytest.raises(ValueError, match=r"given an attention mask of shape \(2, ., 40, 40\)"):
        logits(model, IDS)


def test_a_bias_of_each_head_is_refused_beside_masks_of_the_layers_left_out() -> None:
    chosen = {"filter_fn": lambda module, name: "layers.1" in name}
    model = nsa_flex.patch(tiny_model(), NSA, **chosen)
    logits(model, IDS)

    def add(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "attention_mask": torch.zeros(2, 4, 40, 40)}

    model.model.layers[1].register_forward_pre_hook(add, with_kwargs=True)
    with pytest.raises(ValueError, match=r"given an attention mask of shape \(2, 4, 40, 40\)"):
        logits(model, IDS)


# Keyword arguments


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("score_mod", r"a score modification \(score_mod\) is not something that NSA computes"),
        ("position_bias", r"a position bias \(position_bias\)"),
        ("sinks", r"attention sinks \(sinks\)"),
        ("topk_indices", r"keys chosen by an indexer \(topk_indices\)"),
        ("decay", "LlamaAttention passes decay to its attention, which NSA would ignore"),
    ],
)
def test_an_argument_that_a_layer_adds(argument: str, message: str) -> None:
    def add(forward: Any, **arguments: Any) -> Any:
        return forward(**arguments, **{argument: torch.zeros(2)})

    with pytest.raises(ValueError, match=message):
        logits(with_forward(add), IDS)


def test_an_argument_of_the_caller_goes_through() -> None:
    model = nsa_flex.patch(tiny_model(), NSA)
    assert torch.equal(logits(model, IDS, remark="of the caller"), logits(model, IDS))


@pytest.mark.parametrize("name", ["nsa_max_document", "cu_seqlens_q", "cu_seq_lens"])
def test_a_misspelt_bound_of_documents_is_no_argument_that_goes_through(name: str) -> None:
    model = nsa_flex.patch(tiny_model(), NSA)
    with pytest.raises(ValueError, match=rf"{name} is read by no patched layer; documents"):
        logits(model, IDS, **{name: torch.tensor([0, 40])})
    assert torch.equal(logits(model, IDS, **{name: None}), logits(model, IDS))


def test_a_window_that_the_config_does_not_tell() -> None:
    def narrow(forward: Any, **arguments: Any) -> Any:
        return forward(**arguments, sliding_window=8)

    with pytest.raises(ValueError, match=r"sees a limited context \(sliding_window=8\)"):
        logits(with_forward(narrow), IDS)


# Keys, values, tokens


class Attends:
    """A module that calls attention by `how`: a function in the place of NSA's own, unnoticed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, how: Callable[..., Any]) -> None:
        from nsa_flex.patching import hf_attention

        own = hf_attention.attention_forward

        def call(module: nn.Module, *tensors: Any, **named: Any) -> Any:
            return how(own, module, *tensors, **named)

        functions = hf_attention.AttentionInterface._global_mapping
        monkeypatch.setitem(functions, "nsa_flex", call)
        monkeypatch.setattr(hf_attention, "attention_forward", call)


def other_values(attend: Any, module: Any, query: Any, key: Any, value: Any, *rest: Any, **named):
    return attend(module, query, key, value + 1, *rest, **named)


def twice(attend: Any, *arguments: Any, **named: Any):
    attend(*arguments, **named)
    return attend(*arguments, **named)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (other_values, "LlamaAttention attends other keys or values than it put into the cache"),
        (twice, "LlamaAttention attends twice over what it put into the cache once"),
    ],
)
def test_keys_and_values_that_are_not_those_of_the_cache(
    how: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nsa_flex.patch(tiny_model(), NSA)
    cache = nsa_flex.NSACache(model)
    logits(model, IDS[:, :9], past_key_values=cache)
    Attends(monkeypatch, how)
    with pytest.raises(ValueError, match=message):
        logits(model, IDS[:, 9:10], past_key_values=cache)
    assert cache.get_seq_length() == 9
    monkeypatch.undo()
    found = logits(model, IDS[:, 9:10], past_key_values=cache)
    torch.testing.assert_close(found, logits(model, IDS[:, :10], use_cache=False)[:, 9:])


def test_a_module_that_is_used_twice_in_a_forward() -> None:
    model = nsa_flex.patch(tiny_model(), NSA)
    model.model.layers[1].forward = model.model.layers[0].forward
    with pytest.raises(ValueError, match="given keys twice in one forward: a module that is used"):
        logits(model, IDS, past_key_values=nsa_flex.NSACache(model))


def test_keys_that_never_reached_the_cache() -> None:
    def elsewhere(forward: Any, **arguments: Any) -> Any:
        return forward(**{**arguments, CACHE: None})

    model = with_forward(elsewhere)
    with pytest.raises(ValueError, match="attends keys that it did not put into its layer"):
        logits(model, IDS, past_key_values=nsa_flex.NSACache(model))


def test_a_layer_cache_hands_out_once() -> None:
    layer = nsa_flex.patch(tiny_model(), NSA).model.layers[0].self_attn.nsa
    cache, key = layer.new_cache(), torch.randn(1, 2, 5, 8)
    with torch.no_grad():
        cache.expect(IncomingBatch(5))
        stored = cache.update(key, key)
        with pytest.raises(ValueError, match="given keys twice in one forward"):
            cache.update(key, key)
        cache.check_handed_back("Layer", *stored)
        cache.expect(IncomingBatch(5))
        cache.update(key, key)


def test_a_layer_that_attends_fewer_tokens_than_its_decoder_got(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def last(attend: Any, module: Any, query: Any, *rest: Any, **named: Any):
        return attend(module, query[:, :, -3:], *rest, **named)

    model = nsa_flex.patch(tiny_model(), NSA)
    Attends(monkeypatch, last)
    mask = torch.ones_like(IDS)
    mask[0, :5] = 0
    with pytest.raises(ValueError, match=r"attends queries \(batch, tokens\) \(2, 3\), but .*40"):
        logits(model, IDS, attention_mask=mask, use_cache=False)


# Export


def test_exporting_a_step_with_a_cache() -> None:
    model = nsa_flex.patch(tiny_model(), NSA)
    cache = transformers.StaticCache(config=model.config, max_cache_len=64)
    logits(model, IDS[:1], past_key_values=cache)

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Tensor) -> Tensor:
            return self.model(ids, past_key_values=cache).logits

    with (
        torch.no_grad(),
        pytest.raises(Exception, match=r"exporting \(torch\.export\) a call with a cache"),
    ):
        torch.export.export(Step(), (IDS[:1, :1],))


# Packed documents around patched layers


def afmoe(*kinds: str) -> nn.Module:
    sizes = {"moe_intermediate_size": 16, "num_experts": 2, "num_experts_per_tok": 1}
    return family("Afmoe", **sizes, head_dim=8, layer_types=list(kinds), sliding_window=8)


def test_documents_beside_layers_whose_masks_know_none() -> None:
    model = nsa_flex.patch(afmoe("sliding_attention", "full_attention"), NSA)
    with pytest.raises(ValueError, match=r"cu_seq_lens_q .* masks .* data\.documents joined"):
        logits(model, IDS[:1], cu_seq_lens_q=torch.tensor([0, 13, 40]), use_cache=False)
    restart = (torch.arange(40) % 20)[None]
    with pytest.raises(RuntimeError, match=r"position_ids restart.* data\.documents joined"):
        logits(model, IDS[:1], position_ids=restart, use_cache=False)
    alone = nsa_flex.patch(afmoe("full_attention", "full_attention"), NSA)
    logits(alone, IDS[:1], position_ids=restart, use_cache=False)


def test_bounds_of_documents_that_a_model_keeps_from_its_decoder() -> None:
    model = nsa_flex.patch(family("Falcon", alibi=False), NSA)
    bounds = {"cu_seq_lens_q": torch.tensor([0, 13, 40]), "use_cache": False}
    with pytest.raises(ValueError, match="FalconForCausalLM does not hand cu_seq_lens_q down"):
        logits(model, IDS[:1], **bounds)
    nsa_flex.unpatch(model)
    assert not model._forward_pre_hooks


# What the checks cost compiled code

STEPS = {"training": (40, 41, 55, 33), "decoding": (1, 1, 1, 1)}


@pytest.mark.kept(lambda what: what == "training")
@pytest.mark.parametrize("what", STEPS)
def test_layers_compiled_each_for_itself_share_their_graphs(what: str) -> None:
    """One graph for the first length and one for all others; a step's reads its own cache."""
    torch._dynamo.reset()
    model = nsa_flex.patch(tiny_model(num_hidden_layers=4), NSA)
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    call: dict[str, Any] = {"use_cache": False}
    if what == "decoding":
        call = {"past_key_values": nsa_flex.NSACache(model, max_length=64)}
        logits(model, IDS, **call)
    for layer in model.model.layers:
        layer.compile(backend=count, fullgraph=True)
    for length in STEPS[what]:
        with torch.set_grad_enabled(what == "training"):
            model(tokens(2, length), **call)
    assert len(graphs) == (2 if what == "training" else 4)


def test_masks_that_came_before_the_documents_did() -> None:
    model = nsa_flex.patch(tiny_decoder("gemma3"), NSA)
    ids = IDS[:1]
    bounds = {"cu_seq_lens_q": torch.tensor([0, 13, 40]), "use_cache": False}
    with pytest.raises(ValueError, match=r"masks of its unpatched .* already, for one document"):
        logits(model, ids, **bounds)
    positions = torch.cat((torch.arange(13), torch.arange(27)))[None]
    found = logits(model, ids, **bounds, position_ids=positions)
    with pytest.raises(RuntimeError, match="position_ids count on where a document of cu_seq"):
        logits(model, ids, **bounds, position_ids=torch.arange(40)[None])
    alone = [logits(model, part, use_cache=False) for part in ids.split([13, 27], dim=1)]
    assert relative_error(found, torch.cat(alone, 1)) < 1e-5
