"""patch and unpatch: in place, all or nothing, and honest about what a call asks for."""

from __future__ import annotations

import copy
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import nsa_flex
from nsa_flex.hot_path import find_graph_breaks, find_syncs
from nsa_flex.patching import NSALayer, padded_rows
from nsa_flex.patching.rows import gather_real
from patching.tiny_models import NSA, relative_error, tiny_model, tokens

IDS = 2 + 37 * torch.arange(80).view(2, 40) % 95
GREEDY = {"max_new_tokens": 7, "do_sample": False}


def logits(model: nn.Module, ids: Tensor, **arguments: Any) -> Tensor:
    with torch.no_grad():
        return model(ids, **arguments).logits


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything that patch changes, to compare before and after."""
    return {
        "attributes": {name: dict(vars(module)) for name, module in model.named_modules()},
        "hooks": [len(module._forward_pre_hooks) for module in model.modules()],
        "state": {name: x.clone() for name, x in model.state_dict().items()},
        "config": model.config.to_dict(),
        "implementation": model.config._attn_implementation,
    }


def assert_unchanged(model: nn.Module, before: dict[str, Any]) -> None:
    after = snapshot(model)
    for name, attributes in before["attributes"].items():
        assert attributes.keys() == after["attributes"][name].keys()
    for key in ("hooks", "config", "implementation"):
        assert after[key] == before[key]
    assert after["state"].keys() == before["state"].keys()
    assert all(torch.equal(after["state"][name], x) for name, x in before["state"].items())


# The arguments


def test_patching_again_with_the_same_arguments_changes_nothing() -> None:
    model = nsa_flex.patch(tiny_model(), NSA, backend={"selected": "dense"})
    before, layers = snapshot(model), [m for m in model.modules() if isinstance(m, NSALayer)]
    assert nsa_flex.patch(model, NSA, backend={"selected": "dense"}) is model
    assert_unchanged(model, before)
    assert [m for m in model.modules() if isinstance(m, NSALayer)] == layers


@pytest.mark.parametrize(
    "change",
    [
        {"config": nsa_flex.NSAConfig()},
        {"init": "dense"},
        {"backend": "dense"},
        {"filter_fn": lambda module, name: "layers.0" in name},
    ],
)
def test_patching_again_with_other_arguments_is_refused(change: dict[str, Any]) -> None:
    model = nsa_flex.patch(tiny_model(), NSA)
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"patched already, with other arguments.*unpatch"):
        nsa_flex.patch(model, **{"config": NSA, **change})
    assert_unchanged(model, before)


def test_other_arguments_after_unpatch() -> None:
    model = nsa_flex.patch(nsa_flex.unpatch(nsa_flex.patch(tiny_model(), NSA)), init="dense")
    assert model.model.layers[0].self_attn.nsa.init == "dense"


def test_unpatch_of_an_unpatched_model_does_nothing() -> None:
    model = tiny_model()
    before = snapshot(model)
    assert nsa_flex.unpatch(model) is model
    assert_unchanged(model, before)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"config": {"window_size": 3}}, TypeError, "config is a dict; it must be an NSAConfig"),
        ({"init": "random"}, ValueError, "init is 'random'; it must be one of paper, dense"),
        ({"backend": "cuda"}, ValueError, "backend is 'cuda'; it must be one of"),
        ({"backend": {"slide": "flex"}}, ValueError, r"backend names branches \['slide'\]"),
        ({"filter_fn": lambda module, name: False}, ValueError, "filter_fn chose none of the"),
    ],
)
def test_bad_arguments_are_named(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = tiny_model()
    before = snapshot(model)
    with pytest.raises(error, match=message):
        nsa_flex.patch(model, **arguments)
    assert_unchanged(model, before)


def test_a_model_must_be_a_module() -> None:
    with pytest.raises(TypeError, match=r"model is a str; it must be an nn\.Module"):
        nsa_flex.patch("meta-llama/Llama-3.1-8B")


def test_a_compiled_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"compiled already: patch it before torch\.compile"):
        nsa_flex.patch(torch.compile(tiny_model()), NSA)
    model = tiny_model()
    model.compile()
    with pytest.raises(ValueError, match="compiled already"):
        nsa_flex.patch(model, NSA)


# Models with features that NSA does not compute


def gpt_oss() -> nn.Module:
    return transformers.GptOssForCausalLM(
        transformers.GptOssConfig(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            num_local_experts=2,
            num_experts_per_tok=1,
            pad_token_id=0,
        )
    )


def gpt_bigcode() -> nn.Module:
    return transformers.GPTBigCodeForCausalLM(
        transformers.GPTBigCodeConfig(n_embd=32, n_head=2, n_layer=1, vocab_size=97)
    )


def bert() -> nn.Module:
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    return transformers.BertModel(transformers.BertConfig(**sizes, intermediate_size=32))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: tiny_model("gemma2", attn_logit_softcapping=50.0),
            r"Gemma2Attention has logit soft-capping \(attn_logit_softcapping=50.0\)",
        ),
        (gpt_oss, r"GptOssAttention has attention sinks"),
        (
            lambda: tiny_model("mistral", sliding_window=8),
            r"layers\.0\.self_attn sees a limited context \(sliding_window=8\).*_window=None",
        ),
        (lambda: tiny_model("phi3", sliding_window=8), r"limited context \(sliding_window=8\)"),
        (
            lambda: tiny_model("gemma3", use_bidirectional_attention=True),
            r"bidirectional attention \(is_causal=False\)",
        ),
        (bert, r"bidirectional attention"),
        (gpt_bigcode, r"GPTBigCodeAttention has projections .*register_adapter"),
        (
            lambda: tiny_model("gpt2", add_cross_attention=True),
            r"GPT2Attention has cross-attention beside it \(add_cross_attention=True\)",
        ),
        (lambda: nn.Linear(2, 2), r"Linear has no attention module .*register_adapter"),
    ],
)
def test_a_model_that_nsa_cannot_stand_in_for_is_left_as_it_was(make: Any, message: str) -> None:
    model = make()
    model.config = getattr(model, "config", transformers.LlamaConfig())
    before = snapshot(model)
    with pytest.raises(ValueError, match=message):
        nsa_flex.patch(model, NSA)
    assert_unchanged(model, before)


def test_a_window_beyond_the_models_context_is_no_limit() -> None:
    model = tiny_model("phi3", sliding_window=512)
    expected = logits(model, IDS[:, :32])
    found = logits(nsa_flex.patch(model, NSA, init="dense"), IDS[:, :32])
    assert relative_error(found, expected) < 1e-5


def test_a_filter_that_names_a_sliding_layer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn sees a limited context"):
        nsa_flex.patch(tiny_model("gemma3"), NSA, filter_fn=lambda module, name: True)


def test_layers_left_out_keep_their_attention() -> None:
    model = tiny_model(attn_implementation="sdpa")
    ids = IDS[:, :32]
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    packed = {"position_ids": (torch.arange(32) % 16)[None], "use_cache": False}
    calls: list[dict[str, Any]] = [{}, {"attention_mask": mask}, packed]
    expected = [logits(model, ids, **call) for call in calls]
    only_last = nsa_flex.patch(
        model, NSA, init="dense", filter_fn=lambda module, name: "layers.1" in name
    )
    for call, dense in zip(calls, expected, strict=True):
        keep = call.get("attention_mask", torch.ones_like(ids)).bool()
        assert relative_error(logits(only_last, ids, **call)[keep], dense[keep]) < 1e-5


def test_layers_left_out_need_an_attention_that_runs_beside_nsa() -> None:
    model = tiny_model()
    model.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match=r"'flex_attention' cannot run beside NSA.*'sdpa'"):
        nsa_flex.patch(model, NSA, filter_fn=lambda module, name: "layers.1" in name)
    nsa_flex.patch(model, NSA)
    assert nsa_flex.unpatch(model).config._attn_implementation == "flex_attention"


# Calls that ask for more than NSA computes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"output_attentions": True}, "output_attentions=True is not supported"),
        ({"attention_mask": torch.ones(2, 1, 40, 40)}, r"\(2, 1, 40, 40\); expected a padding"),
        ({"attention_mask": torch.ones(2, 30)}, r"shape \(2, 30\); expected .* 40 a row"),
        ({"attention_mask": torch.ones(2, 50)}, r"shape \(2, 50\); expected .* 40 a row"),
        ({"is_causal": False}, "is_causal=False is not supported"),
        ({"softcap": 30.0}, r"logit soft-capping \(softcap\) is not something"),
        ({"s_aux": torch.zeros(4)}, r"attention sinks \(s_aux\)"),
        (
            {"cu_seq_lens_q": torch.tensor([0, 40])},
            "cu_seq_lens_q with a cache is not supported",
        ),
        (
            {"cu_seq_lens_q": torch.tensor([0, 40]), "use_cache": False},
            "cu_seq_lens_q describes one row of tokens, got a batch of 2",
        ),
    ],
)
def test_a_call_that_cannot_be_honoured_is_refused(
    arguments: dict[str, Any], message: str
) -> None:
    model = nsa_flex.patch(tiny_model(), NSA)
    with pytest.raises(ValueError, match=message):
        logits(model, IDS, **arguments)


def test_packed_positions_with_a_cache_are_refused() -> None:
    model = nsa_flex.patch(tiny_model(), NSA)
    positions = (torch.arange(40) % 16)[None]
    with pytest.raises(RuntimeError, match=r"position_ids restart.*use_cache=False"):
        logits(model, IDS, position_ids=positions)
    plain = logits(model, IDS, position_ids=torch.arange(40)[None])
    assert torch.equal(plain, logits(model, IDS))


def test_attention_dropout_is_refused_in_training_only() -> None:
    model = nsa_flex.patch(tiny_model(attention_dropout=0.1), NSA)
    logits(model, IDS)
    with pytest.raises(ValueError, match=r"attention dropout is not supported, got 0\.1"):
        model.train()(IDS)


def test_an_attention_module_outside_its_decoder_is_refused() -> None:
    model = nsa_flex.patch(tiny_model(), NSA).model
    hidden = torch.randn(1, 8, 32)
    angles = model.rotary_emb(hidden, torch.arange(8)[None])
    with pytest.raises(RuntimeError, match="not told of padding and packed documents"):
        model.layers[0](hidden, position_embeddings=angles)


# Padding, documents, caches


def test_packed_documents_by_cu_seqlens() -> None:
    model = nsa_flex.patch(tiny_model(), NSA)
    cu_seqlens = torch.tensor([0, 13, 13, 40])
    ids = IDS[:1]
    found = logits(
        model,
        ids,
        cu_seq_lens_q=cu_seqlens,
        cu_seq_lens_k=cu_seqlens,
        max_length_q=27,
        max_length_k=27,
        position_ids=torch.cat((torch.arange(13), torch.arange(27)))[None],
        use_cache=False,
    )
    expected = torch.cat([logits(model, ids[:, :13]), logits(model, ids[:, 13:])], 1)
    assert relative_error(found, expected) < 1e-5


def test_many_short_documents_need_a_bound() -> None:
    model = nsa_flex.patch(tiny_model(), NSA)
    packed = {"position_ids": torch.arange(40)[None] % 2, "use_cache": False}
    with pytest.raises(
        RuntimeError, match="more short documents than are expected: pass nsa_max_documents"
    ):
        logits(model, IDS[:1], **packed)
    found = logits(model, IDS[:1], nsa_max_documents=20, **packed)
    expected = logits(model, IDS[:1].view(20, 2)).view(1, 40, -1)
    assert relative_error(found, expected) < 1e-5


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_cu_seqlens_without_positions_are_documents_alone(family: str) -> None:
    model = nsa_flex.patch(tiny_model(family, attn_implementation="sdpa"), NSA)
    with torch.no_grad():  # a φ that is not a mean tells where a document begins
        for name, parameter in model.named_parameters():
            if ".nsa.compress" in name:
                parameter.normal_()
    ids, cu_seqlens = IDS[:1], torch.tensor([0, 13, 13, 40])
    found = logits(model, ids, cu_seq_lens_q=cu_seqlens, use_cache=False)
    expected = torch.cat([logits(model, ids[:, :13]), logits(model, ids[:, 13:])], 1)
    assert relative_error(found, expected) < 1e-5


def test_a_mask_with_gaps_is_the_row_without_them() -> None:
    model = nsa_flex.patch(tiny_model(), NSA)
    mask = (torch.rand(2, 40) < 0.7).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    found = logits(model, IDS, attention_mask=mask, position_ids=positions)
    for row, keep in enumerate(mask.bool()):
        alone = logits(model, IDS[row][keep][None])[0]
        assert relative_error(found[row][keep], alone) < 1e-5


def test_gather_real_is_a_permutation_that_keeps_order() -> None:
    real = torch.rand(3, 17) < 0.5
    layout = gather_real(real)
    x = torch.arange(51).reshape(3, 1, 17, 1)
    moved = layout.align(x)
    assert torch.equal(layout.restore(moved), x)
    for row, keep in enumerate(real):
        assert torch.equal(moved[row, 0, : keep.sum(), 0], x[row, 0, keep, 0])


@pytest.mark.parametrize("chunks", [(9, 1, 1, 29), (40,), (3, 37), (1,) * 40])
def test_chunks_against_cached_keys_equal_one_call(chunks: tuple[int, ...]) -> None:
    layer = nsa_flex.patch(tiny_model(), NSA).model.layers[0].self_attn.nsa
    hidden = torch.randn(3, 40, 32)
    query, key, value = (torch.randn(3, heads, 40, 8) for heads in (4, 2, 2))
    real = torch.ones(3, 40, dtype=torch.bool)
    real[0, :12] = False
    real[1] = torch.rand(40) < 0.6
    with torch.no_grad():
        whole = layer(hidden, query, key, value, rows=padded_rows(real, 40))
        parts, begin = [], 0
        for length in chunks:
            end = begin + length
            part = slice(begin, end)
            rows = padded_rows(real[:, :end], length, begin)
            parts.append(
                layer(
                    hidden[:, part],
                    query[:, :, part],
                    key[:, :, :end],
                    value[:, :, :end],
                    rows=rows,
                )
            )
            begin = end
    keep = real[:, None, :, None]
    assert relative_error(torch.cat(parts, 2) * keep, whole * keep) < 1e-5


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize(
    "how",
    [
        {"cache_implementation": "static"},
        {"prefill_chunk_size": 4},
        {"num_beams": 2},
    ],
)
def test_ways_to_generate(family: str, padding: int, how: dict[str, Any]) -> None:
    model = nsa_flex.patch(tiny_model(family, attn_implementation="sdpa"), NSA)
    ids = IDS[:, :14]
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    plain = {"num_beams": how.get("num_beams", 1), "use_cache": False}
    expected = model.generate(ids, attention_mask=mask, **GREEDY, **plain)
    found = model.generate(ids, attention_mask=mask, **GREEDY, **how)
    assert torch.equal(found, expected)


def test_assisted_generation() -> None:
    model = nsa_flex.patch(tiny_model(), NSA)
    ids = IDS[:1, :14]
    expected = model.generate(ids, use_cache=False, **GREEDY)
    found = model.generate(ids, assistant_model=tiny_model(), **GREEDY)
    assert torch.equal(found, expected)


def test_generation_that_goes_on_from_a_right_padded_prompt() -> None:
    model = nsa_flex.patch(tiny_model(), NSA)
    ids, lengths = IDS[:, :20], torch.tensor([20, 11])
    mask = (torch.arange(20) < lengths[:, None]).long()
    following = tokens(2, 1)
    with torch.no_grad():
        cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
        found = model(
            following,
            attention_mask=torch.cat((mask, torch.ones(2, 1, dtype=mask.dtype)), 1),
            position_ids=lengths[:, None],
            past_key_values=cache,
        ).logits
    for row, length in enumerate(lengths.tolist()):
        alone = torch.cat((ids[row, :length], following[row]))[None]
        assert relative_error(found[row, -1], logits(model, alone)[0, -1]) < 1e-5


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_static_cache_beside_layers_left_out(padding: int, implementation: str) -> None:
    model = nsa_flex.patch(
        tiny_model(attn_implementation=implementation),
        NSA,
        filter_fn=lambda m, name: "layers.1" in name,
    )
    mask = torch.ones_like(IDS)
    mask[0, :padding] = 0
    expected = model.generate(IDS, attention_mask=mask, use_cache=False, **GREEDY)
    found = model.generate(IDS, attention_mask=mask, cache_implementation="static", **GREEDY)
    assert torch.equal(found, expected)


def test_image_tokens_that_look_ahead_are_refused() -> None:
    from nsa_flex.patching.hf_attention import mask_for_attention

    model = nsa_flex.patch(tiny_model(), NSA)
    embeds = torch.zeros(1, 4, 32)
    common = {"config": model.config, "inputs_embeds": embeds, "attention_mask": None}
    create = transformers.masking_utils.create_causal_mask
    for overlay in (
        {"or_mask_function": lambda *places: torch.tensor(True)},
        {"block_sequence_ids": torch.zeros(1, 4, dtype=torch.long)},
    ):
        with pytest.raises(ValueError, match=r"custom mask function .* is not supported"):
            create(**common, past_key_values=None, **overlay)
    mask = torch.ones(1, 3, dtype=torch.bool)
    filled = mask_for_attention(1, 1, 5, attention_mask=mask, config=model.config)
    assert filled.tolist() == [[True, True, True, False, False]]


def test_switching_the_attention_for_a_while() -> None:
    model = tiny_model(attn_implementation="sdpa")
    packed = {"position_ids": torch.arange(40)[None] % 20, "use_cache": False}
    dense = logits(model, IDS[:1], **packed)
    sparse = logits(nsa_flex.patch(model, NSA), IDS[:1], **packed)
    model.set_attn_implementation("sdpa")
    assert torch.equal(logits(model, IDS[:1], **packed), dense)
    model.set_attn_implementation("nsa_flex")
    assert torch.equal(logits(model, IDS[:1], **packed), sparse)


# Devices, dtypes, copies, training


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_new_parameters_take_after_the_layer(dtype: torch.dtype) -> None:
    model = nsa_flex.patch(tiny_model().to(dtype), NSA)
    assert {x.dtype for x in model.model.layers[0].self_attn.nsa.state_dict().values()} == {dtype}
    assert logits(model, IDS).dtype == dtype
    assert not model.model.layers[0].self_attn.nsa.training


# All blocks of the 40 tokens are chosen, so that rounding cannot choose others.
ALL_BLOCKS = replace(NSA, num_selected_blocks=5)


def test_a_cast_model_errs_as_the_unpatched_one_does() -> None:
    model = tiny_model()
    expected = logits(copy.deepcopy(model).double(), IDS)
    eager = logits(copy.deepcopy(model).bfloat16(), IDS)
    found = logits(nsa_flex.patch(model, ALL_BLOCKS, init="dense").bfloat16(), IDS)
    assert relative_error(found, expected) < 2 * relative_error(eager, expected)


def test_autocast_trains() -> None:
    model = tiny_model().train()
    expected = logits(copy.deepcopy(model).double(), IDS)
    with torch.autocast("cpu", torch.bfloat16):
        eager = logits(model, IDS)
        output = nsa_flex.patch(model, ALL_BLOCKS, init="dense")(IDS, labels=IDS)
    assert relative_error(output.logits.detach(), expected) < 2 * relative_error(eager, expected)
    output.loss.backward()
    gradient = model.model.layers[0].self_attn.nsa.gates.linear.weight.grad
    assert gradient.dtype == torch.float32
    assert gradient.norm() > 0


def test_patching_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = nsa_flex.patch(tiny_model(), NSA)
    assert all(x.is_meta for x in model.state_dict().values())
    source = nsa_flex.patch(tiny_model(), NSA, init="dense")
    model.load_state_dict(source.state_dict(), assign=True)
    model.model.rotary_emb = source.model.rotary_emb
    assert torch.equal(logits(model, IDS), logits(source, IDS))


def test_a_copy_is_patched_and_unpatched_on_its_own() -> None:
    dense = tiny_model()
    expected = logits(dense, IDS)
    model = nsa_flex.patch(copy.deepcopy(dense), NSA)
    twin = copy.deepcopy(model)
    before = logits(model, IDS)
    assert torch.equal(logits(twin, IDS), before)
    assert torch.equal(logits(nsa_flex.unpatch(twin), IDS), expected)
    assert torch.equal(logits(model, IDS), before)
    assert torch.equal(logits(nsa_flex.unpatch(model), IDS), expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant: bool) -> None:
    model = nsa_flex.patch(tiny_model().train(), NSA)
    twin = copy.deepcopy(model)
    twin.gradient_checkpointing_enable({"use_reentrant": reentrant})
    mask = torch.ones_like(IDS)
    mask[0, :7] = 0
    for each in (model, twin):
        each(IDS, attention_mask=mask, labels=IDS).loss.backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_training_lowers_the_loss() -> None:
    model = nsa_flex.patch(tiny_model().train(), NSA, init="dense")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        loss = model(IDS, labels=IDS).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


# torch.compile and host syncs

CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padded": {"attention_mask": (torch.arange(40) >= torch.tensor([[0], [7]])).long()},
    "packed": {"position_ids": (torch.arange(40) % 20)[None].expand(2, -1)},
}


@pytest.mark.parametrize("call", CALLS)
def test_a_patched_model_waits_for_no_tensor(call: str) -> None:
    model = nsa_flex.patch(tiny_model(), NSA)
    assert find_syncs(model, IDS, use_cache=False, **CALLS[call]) == []


@pytest.mark.kept(lambda call: call == "padded")
@pytest.mark.parametrize("call", CALLS)
def test_a_model_patched_in_part_is_one_graph(call: str) -> None:
    model = nsa_flex.patch(tiny_model("gemma3"), NSA)
    assert find_graph_breaks(model, IDS, use_cache=False, **CALLS[call]) == []


def test_compiled_training_step_equals_eager() -> None:
    model = nsa_flex.patch(tiny_model().train(), NSA)
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    losses = [each(IDS, labels=IDS, use_cache=False).loss for each in (compiled, twin)]
    assert relative_error(losses[0].detach(), losses[1].detach()) < 1e-6
    for loss in losses:
        loss.backward()
    # A shift of all compressed keys changes no softmax: the gradient of their position embedding
    # is 0 at the start, up to the rounding of what cancels out.
    all_of_them = torch.cat([x.grad.flatten() for x in twin.parameters()])
    least = 1e-3 * float(all_of_them.norm())
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        error = float((ours.grad - theirs.grad).norm())
        assert error < 1e-5 * max(float(theirs.grad.norm()), least)


def test_importing_nsa_flex_does_not_import_transformers() -> None:
    code = "import sys, nsa_flex; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
