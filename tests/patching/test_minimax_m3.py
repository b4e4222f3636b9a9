"""MiniMax-M3 by `attn_implementation="nsa_flex"`: as with SDPA, and right where that errs."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as modeling

import nsa_flex
from nsa_flex import indexer, indexer_topk
from nsa_flex.dispatch import table
from nsa_flex.patching import minimax_m3
from nsa_flex.patching.hf_versions import CACHE
from nsa_flex.testing.models import model_named
from reference import minimax_m3 as reference
from reference.accuracy import assert_close, eager_attention, to_float64

BLOCK = 16


def tiny(**changes: Any) -> Any:
    """A config of two sparse layers and one dense one."""
    return modeling.MiniMaxM3VLTextConfig(
        **{
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 32,
            "dense_intermediate_size": 32,
            "shared_intermediate_size": 16,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rotary_dim": 8,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_block_size": BLOCK,
            "index_topk_blocks": 3,
            "layer_types": ["minimax_m3_sparse", "full_attention", "minimax_m3_sparse"],
            "mlp_layer_types": ["dense"] * 3,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5
            },
            "bos_token_id": 1,
            "eos_token_id": None,
            "pad_token_id": 0,
            **changes,
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    """The same weights with transformers' SDPA and with nsa_flex, float64."""
    torch.manual_seed(0)
    model = modeling.MiniMaxM3VLForCausalLM._from_config(tiny(), attn_implementation="sdpa")
    ours = modeling.MiniMaxM3VLForCausalLM._from_config(tiny(), attn_implementation="nsa_flex")
    for name, parameter in model.named_parameters():
        if "norm" in name or "proj" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    # A padding token, of zeros, likes all blocks alike: which it selects is not defined.
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.02)
    ours.load_state_dict(model.state_dict())
    return model.double().eval(), ours.double().eval()


def tokens(*shape: int) -> Tensor:
    return torch.randint(2, 64, shape)


@pytest.mark.parametrize("length", [1, 15, 70, 129])
def test_rows_are_those_of_sdpa(models, length):
    model, ours = models
    ids = tokens(2, length)
    torch.testing.assert_close(ours(ids).logits, model(ids).logits, rtol=0, atol=1e-10)


def test_every_gradient_is_that_of_sdpa(models):
    ids = tokens(2, 100)
    gradients = []
    for model in models:
        model.zero_grad()
        model(ids).logits.square().sum().backward()
        gradients.append({name: x.grad for name, x in model.named_parameters()})
    assert gradients[0].keys() == gradients[1].keys()
    for name, expected in gradients[0].items():
        if "indexer" in name:
            assert gradients[1][name] is None or not gradients[1][name].any()
        else:
            assert expected.any(), name
            torch.testing.assert_close(gradients[1][name], expected, rtol=1e-9, atol=1e-10)


def layer_call(model: Any, ids: Tensor) -> tuple[list[Tensor], Any, Tensor]:
    """What the first layer attends: queries, keys and values, the indexer's, and the output."""
    attention, seen = model.model.layers[0].self_attn, {}

    def note(module: Any, *tensors: Any, block_indices: Any, **kwargs: Any) -> Any:
        if module is attention:
            tensors = (*(x.detach().requires_grad_() for x in tensors[:3]), *tensors[3:])
            seen.update(inputs=tensors[:3], index=block_indices)
        output = minimax_m3.attend(module, *tensors, block_indices=block_indices, **kwargs)
        if module is attention:
            seen.update(output=output[0].transpose(1, 2))
        return output

    functions = transformers.AttentionInterface
    former = functions._global_mapping["nsa_flex"]
    functions.register("nsa_flex", note)
    try:
        model(ids)
    finally:
        functions.register("nsa_flex", former)
    return list(seen["inputs"]), seen["index"], seen["output"]


def test_a_sparse_layer_computes_what_its_definition_says(models):
    """And its gradients, beside those of an oracle that shares nothing with transformers."""
    inputs, index, output = layer_call(models[1], tokens(1, 100))
    index_query, index_key = (x[0].detach().numpy() for x in index)
    blocks = reference.selected_blocks(index_query, index_key[0], BLOCK, 3, 1)
    arrays = [to_float64(x)[0] for x in inputs]
    expected, backward = reference.attention(*arrays, blocks, BLOCK)
    torch.testing.assert_close(output[0], torch.from_numpy(expected), rtol=0, atol=1e-12)
    grad = torch.randn_like(output)
    found = torch.autograd.grad(output, inputs, grad)
    for gradient, wanted in zip(found, backward(grad[0].numpy()), strict=True):
        torch.testing.assert_close(gradient[0], torch.from_numpy(wanted), rtol=0, atol=1e-10)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_bfloat16_errs_at_most_twice_as_eager_attention(models, device):
    """A sparse layer, forward and backward, for the blocks that it selected."""
    model = copy.deepcopy(models[1]).to(device, torch.bfloat16)
    inputs, index, output = layer_call(model, tokens(1, 100).to(device))
    found = indexer_topk(*index, block_size=BLOCK, num_blocks=3)[0].tolist()
    blocks = [[set(row) - {-1} for row in head] for head in found]
    index_query, index_key = (to_float64(x)[0] for x in index)
    exact = reference.selected_blocks(index_query, index_key[0], BLOCK, 3, 1)
    pairs = [
        pair for heads in zip(blocks, exact, strict=True) for pair in zip(*heads, strict=True)
    ]
    assert sum(one == other for one, other in pairs) >= 0.99 * len(pairs)  # but for near ties
    arrays = [to_float64(x)[0] for x in inputs]
    expected, backward = reference.attention(*arrays, blocks, BLOCK)
    mask = torch.from_numpy(reference.selected_mask(blocks, 100, 100, BLOCK))[None].to(device)
    plain = eager_attention(*inputs, mask, 16**-0.5)
    grad = torch.randn_like(output)
    wanted = [expected, *backward(to_float64(grad)[0])]
    ours, theirs = ([out, *torch.autograd.grad(out, inputs, grad)] for out in (output, plain))
    for name, mine, want, eager in zip("oqkv", ours, wanted, theirs, strict=True):
        assert_close(name, mine[0], want, eager[0], torch.bfloat16)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_are_as_if_alone(models, side):
    _, ours = models
    lengths, longest = (70, 41, 1), 70
    ids, mask = tokens(3, longest), torch.zeros(3, longest, dtype=torch.long)
    position_ids = torch.zeros(3, longest, dtype=torch.long)
    for row, length in enumerate(lengths):
        real = slice(longest - length, None) if side == "left" else slice(length)
        mask[row, real], position_ids[row, real] = 1, torch.arange(length)
    logits = ours(ids, attention_mask=mask, position_ids=position_ids).logits
    for row in range(3):
        real = mask[row] != 0
        alone = ours(ids[row, real][None]).logits
        torch.testing.assert_close(logits[row, real][None], alone, rtol=0, atol=1e-10)


def test_packed_documents_are_as_if_alone(models):
    _, ours = models
    lengths = (33, 1, 16, 50)
    position_ids = torch.cat([torch.arange(length) for length in lengths])[None]
    ids = tokens(1, sum(lengths))
    logits = ours(ids, position_ids=position_ids, use_cache=False).logits
    first = 0
    for length in lengths:
        part = slice(first, first + length)
        alone = ours(ids[:, part]).logits
        torch.testing.assert_close(logits[:, part], alone, rtol=0, atol=1e-10)
        first += length
    with pytest.raises(RuntimeError, match="packed documents need use_cache=False"):
        ours(ids, position_ids=position_ids, use_cache=True)


def test_packed_documents_by_their_lengths(models):
    _, ours = models
    ids, lengths = tokens(1, 100), torch.tensor([0, 33, 34, 50, 100])
    packed = {"cu_seq_lens_q": lengths.int(), "cu_seq_lens_k": lengths.int()}
    logits = ours(ids, use_cache=False, **packed).logits
    for first, end in itertools.pairwise(lengths.tolist()):
        alone = ours(ids[:, first:end]).logits  # by other angles, which are float32
        torch.testing.assert_close(logits[:, first:end], alone, rtol=0, atol=1e-6)
    padding = torch.tensor([[0] * 3 + [1] * 97])
    with pytest.raises(ValueError, match="cu_seq_lens_q is for one row of packed documents"):
        ours(ids, attention_mask=padding, use_cache=False, **packed)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True])
def test_cached_generation_is_one_forward_a_step(models, cache, padded):
    _, ours = models
    prompt, new = tokens(2, 40), 30
    mask = torch.ones_like(prompt)
    if padded:
        mask[0, :23] = 0
    made = ours.generate(
        prompt, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0,
        cache_implementation=cache if cache == "static" else None, disable_compile=True,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    steps = torch.stack(made.logits, 1)
    assert torch.equal(steps.argmax(-1), made.sequences[:, 40:])
    for row in range(2):
        ids = torch.cat([prompt[row][mask[row] != 0], made.sequences[row, 40:]])[None]
        # RMSNorm and angles are float32, in which argmax may be decided by rounding.
        expected = ours(ids).logits[0, -new - 1 : -1].float()
        torch.testing.assert_close(steps[row], expected, rtol=0, atol=1e-6)


def test_cached_steps_are_those_of_sdpa(models):
    model, ours = models
    ids = tokens(2, 90)
    caches = [transformers.DynamicCache(config=each.config) for each in models]
    for part in (slice(0, 50), slice(50, 51), slice(51, 90)):
        logits = [
            each(ids[:, part], **{CACHE: cache}).logits
            for each, cache in zip((model, ours), caches, strict=True)
        ]
        torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-10)


def test_no_tensor_of_queries_by_keys_and_no_host_sync(models):
    """Compiled whole: an operator that waits for a value would break the graph."""
    _, ours = models
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    for rows in (1, 2):  # transformers makes one row of position_ids for all
        ids = tokens(rows, 64)
        torch.testing.assert_close(compiled(ids).logits, ours(ids).logits, rtol=0, atol=1e-10)


def test_no_allocation_has_a_byte_for_each_query_and_key(monkeypatch):
    """Forward and backward, around the kernel that attends; on the CPU a stand-in plays it."""

    def attend(task: Any) -> tuple[Tensor, None]:
        ends = (task.key + task.value).mean(2, keepdim=True)
        return task.query * ends.repeat_interleave(2, 1), None

    monkeypatch.setitem(table.IMPLEMENTATIONS, ("dense", "selected"), attend)
    monkeypatch.setattr(indexer, "MAX_SCORES", 1 << 16)
    length = 1024
    sizes = {"num_hidden_layers": 2, "layer_types": ["minimax_m3_sparse"] * 2}
    largest = []
    for implementation in ("nsa_flex", "sdpa"):
        config = tiny(**sizes, mlp_layer_types=["dense"] * 2)
        model = modeling.MiniMaxM3VLForCausalLM._from_config(
            config, attn_implementation=implementation
        )
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            model(tokens(1, length), use_cache=False).logits.sum().backward()
        events = found.profiler.kineto_results.events()
        largest.append(max(event.nbytes() for event in events if event.name() == "[memory]"))
    assert largest[0] < length**2 < largest[1]


@pytest.mark.gpu
def test_no_tensor_of_queries_by_keys_on_kernels():
    length = 16384
    config = tiny(
        num_hidden_layers=2, mlp_layer_types=["dense"] * 2, index_block_size=128,
        layer_types=["minimax_m3_sparse"] * 2,
    )  # fmt: skip
    model = modeling.MiniMaxM3VLForCausalLM._from_config(config, attn_implementation="nsa_flex")
    model = model.cuda()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model(tokens(1, length).cuda(), use_cache=False).logits.sum().backward()
    assert torch.cuda.max_memory_allocated() - before < length**2


def test_the_others_keep_their_indexer(models):
    model, _ = models
    assert model(tokens(1, 20)).logits.isfinite().all()
    blocks = []
    hook = model.model.layers[0].self_attn.indexer.register_forward_hook(
        lambda module, args, output: blocks.append(output)
    )
    model(tokens(1, 20))
    hook.remove()
    assert isinstance(blocks[0], Tensor)


def test_given_blocks_are_attended(models):
    """A model whose indexer gives blocks itself, as transformers' does."""
    model, ours = models
    indexer = ours.model.layers[0].self_attn.indexer
    hook = indexer.register_forward_hook(
        lambda module, args, output: torch.zeros(1, 2, 20, 1, dtype=torch.int64)
    )
    ids = tokens(1, 20)
    try:
        logits = ours(ids).logits
        with pytest.raises(ValueError, match="count blocks from the first slot"):
            ours(ids, attention_mask=torch.tensor([[0] * 3 + [1] * 17]))
    finally:
        hook.remove()
    torch.testing.assert_close(logits[:, :16], model(ids).logits[:, :16], rtol=0, atol=1e-10)
    assert not torch.allclose(logits[:, 16:], model(ids).logits[:, 16:])


def test_the_conformance_harness_runs(models, tmp_path):
    """On a twin with small blocks, whatever the sizes of the model; of a checkpoint as well."""
    _, ours = models
    model = copy.deepcopy(ours)
    for layer in model.model.layers:
        if layer.self_attn.indexer:
            layer.self_attn.indexer.block_size = 128
    before = dict(vars(model.config))
    report = nsa_flex.testing.check_model(model, name="tiny")
    assert [check.name for check in report.checks if check.status == "ok"] == [
        "patch", "causality", "left padding", "right padding", "packed by position_ids",
        "packed by cu_seq_lens", "dynamic cache", "static cache", "save and load", "gradients",
    ], str(report)  # fmt: skip
    assert report.layers == ("model.layers.0.self_attn", "model.layers.2.self_attn")
    assert vars(model.config) == before
    model.save_pretrained(tmp_path)
    read = nsa_flex.testing.check_model(model_named(str(tmp_path)), checks=["causality"])
    assert read.layers == report.layers


def test_continuous_batching_is_refused(models):
    _, ours = models
    with pytest.raises(ValueError, match="continuous batching of MiniMaxM3VLForCausalLM is not"):
        ours.generate_batch([[5, 6, 7]])


def test_dropout_is_refused(models):
    _, ours = models
    layers = [layer.self_attn for layer in ours.model.layers if layer.self_attn.indexer]
    try:
        ours.train()
        for layer in layers:
            layer.attention_dropout = 0.1
        with pytest.raises(ValueError, match=r"dropout=0\.1 is not supported"):
            ours(tokens(1, 20))
    finally:
        ours.eval()
        for layer in layers:
            layer.attention_dropout = 0.0


def test_attention_weights_are_refused(models):
    with pytest.raises(ValueError, match="output_attentions=True is not supported"):
        models[1](tokens(1, 20), output_attentions=True)


def test_a_mask_of_the_callers_own_is_refused(models):
    _, ours = models
    mask = torch.ones(1, 1, 20, 20, dtype=torch.bool).tril()
    with pytest.raises(
        ValueError, match=r"attention_mask has shape \(1, 1, 20, 20\); expected pad"
    ):
        ours(tokens(1, 20), attention_mask=mask)


def test_the_full_size_is_taken():
    """On meta: 64 query and 4 KV heads, blocks of 128, one sparse and one dense layer."""
    config = tiny(
        hidden_size=6144, num_attention_heads=64, num_key_value_heads=4, head_dim=128,
        rotary_dim=64, index_n_heads=4, index_head_dim=128, index_block_size=128,
        index_topk_blocks=16, num_hidden_layers=2, mlp_layer_types=["dense"] * 2,
        layer_types=["minimax_m3_sparse", "full_attention"],
    )  # fmt: skip
    with torch.device("meta"):
        model = modeling.MiniMaxM3VLForCausalLM._from_config(
            config, attn_implementation="nsa_flex", dtype=torch.bfloat16
        )
        hidden = torch.zeros(1, 4096, 6144, dtype=torch.bfloat16)
        position_ids = torch.arange(4096)[None]
        rotary = model.model.rotary_emb(hidden, position_ids)
        for layer in model.model.layers:  # the model itself reads a value for its mask
            hidden = layer(hidden, position_embeddings=rotary, position_ids=position_ids)
    assert hidden.shape == (1, 4096, 6144)


@pytest.mark.gpu
def test_on_kernels(models):
    """Float32, where the kernels select the blocks that SDPA's indexer does."""
    model, ours = (copy.deepcopy(each).float().cuda() for each in models)
    ids = tokens(2, 300).cuda()
    logits = []
    for each in (model, ours):
        logits.append(each(ids).logits)
        logits[-1].square().mean().backward()
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-3, atol=1e-4)
    expected = dict(model.named_parameters())
    for name, parameter in ours.named_parameters():
        if "indexer" not in name:
            torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-2, atol=1e-4)
