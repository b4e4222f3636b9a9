"""MiniCPM4 checkpoints as published: against their oracle in float64; padding, packing, caches."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.models.llama import modeling_llama

import nsa_flex
from nsa_flex.patching import minicpm, minicpm_attention
from nsa_flex.patching.hf_versions import CACHE
from nsa_flex.patching.minicpm_config import MiniCPM4Config, MiniCPMConfig
from patching.tiny_models import moved
from reference import infllm_v2 as reference

MODEL = reference.Model()
# MiniCPM-SALA with its sparse layers alone.
SALA = replace(MODEL, attn_use_rope=False, attn_use_output_gate=True)
SPARSE = ("kernel_size", "kernel_stride", "init_blocks", "block_size", "window_size", "topk")
AUTO_MAP = {
    "AutoConfig": "configuration_minicpm.MiniCPMConfig",
    "AutoModelForCausalLM": "modeling_minicpm.MiniCPMForCausalLM",
}


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.utils.logging, "_tqdm_active", False)


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers' Llama computes in float32, norms and angles, in float64."""

    def norm(self: Any, x: Tensor) -> Tensor:
        return (
            self.weight * x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
        )

    def turns(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        half, rope = self.config.head_dim // 2, self.config.rope_parameters
        inverse = rope["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        if "short_factor" in rope:
            inverse = inverse / torch.tensor(rope["short_factor"], dtype=torch.float64)
        turn = position_ids[..., None] * inverse
        turn = torch.cat((turn, turn), -1)
        return turn.cos() * self.attention_scaling, turn.sin() * self.attention_scaling

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", norm)
    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", turns)


def config_of(model: reference.Model, **changes: Any) -> dict[str, Any]:
    """As upstream writes it."""
    values = dataclasses.asdict(model)
    sparse = values.pop("sparse")
    rope = {
        name: values.pop(name)
        for name in ("short_factor", "long_factor", "original_max_position_embeddings")
    }
    if sparse is not None:
        kept = {name: sparse[name] for name in SPARSE}
        values["sparse_config"] = {**kept, "use_nope": False, "dense_len": sparse["dense_len"]}
    return {
        **values,
        "architectures": ["MiniCPMForCausalLM"],
        "model_type": "minicpm",
        "auto_map": AUTO_MAP,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.1,
        "pretraining_tp": 1,
        "rope_scaling": {"rope_type": "longrope", **rope},
        "torch_dtype": "float64",
        "mup_denominator": 32,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
        **changes,
    }


def write(folder: Path, model: reference.Model, **changes: Any) -> dict[str, Tensor]:
    """A checkpoint; its weights."""
    weights = {
        name: torch.randn(shape, dtype=torch.float64) * (0.3 if len(shape) > 1 else 1)
        for name, shape in reference.shapes(model).items()
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(model, **changes)))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return weights


def built(model: reference.Model = MODEL, **changes: Any) -> Any:
    """A model with random weights, float64."""
    values = config_of(model, **changes)
    values = {k: v for k, v in values.items() if k not in ("architectures", "auto_map")}
    made = minicpm.MiniCPMForCausalLM._from_config(MiniCPMConfig.from_dict(values))
    for name, parameter in made.named_parameters():
        if "norm" not in name:
            nn.init.normal_(parameter, std=0.3)
    return made.double().eval()


def ids_of(*shape: int) -> Tensor:
    return torch.randint(3, MODEL.vocab_size, shape)


def logits(model: Any, ids: Tensor, **inputs: Any) -> Tensor:
    with torch.no_grad():
        return model(ids, **inputs).logits


def check_logits_and_gradients(model: Any, changed: reference.Model, weights: Any) -> None:
    ids = ids_of(2, 130)
    arrays = {name: weight.numpy() for name, weight in weights.items()}
    want, backward = reference.forward(arrays, changed, ids.numpy())
    found = model(ids).logits
    torch.testing.assert_close(found, torch.from_numpy(want), rtol=0, atol=1e-10)
    grad = torch.randn_like(found)
    found.backward(grad)
    expected = backward(grad.numpy())
    parameters = dict(model.named_parameters())
    assert parameters.keys() == expected.keys()
    for name, parameter in parameters.items():
        torch.testing.assert_close(
            parameter.grad, torch.from_numpy(expected[name]), rtol=1e-10, atol=1e-10
        )


@pytest.mark.parametrize("reader", ["auto", "load"])
def test_a_folder_is_read_and_computes_what_upstream_does(tmp_path, reader):
    """Logits and all gradients. No code that comes with the folder is run."""
    weights = write(tmp_path, MODEL)
    (tmp_path / "configuration_minicpm.py").write_text("raise SystemExit(1)")
    read = nsa_flex.load if reader == "load" else transformers.AutoModelForCausalLM.from_pretrained
    model = read(tmp_path, dtype=torch.float64)
    assert type(model) is minicpm.MiniCPMForCausalLM
    assert not model.training
    check_logits_and_gradients(model, MODEL, weights)


def test_sparse_layers_of_minicpm_sala(tmp_path):
    """Gates, and neither queries nor keys are turned; with a cache and packed as well."""
    weights = write(tmp_path, SALA)
    model = nsa_flex.load(tmp_path, dtype=torch.float64)
    assert model.model.layers[0].self_attn.o_gate.weight.shape == (32, 32)
    check_logits_and_gradients(model, SALA, weights)
    ids = ids_of(1, 120)
    whole = logits(model, ids)
    cache = transformers.DynamicCache(config=model.config)
    for part in ids.split([70, 40, 1, 9], 1):
        found = logits(model, part, **{CACHE: cache})
        first = cache.get_seq_length() - part.shape[1]
        expected = whole[:, first : first + part.shape[1]]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    position_ids = torch.arange(120)[None] % 75
    packed = logits(model, ids, position_ids=position_ids, use_cache=False)
    torch.testing.assert_close(packed[:, :75], whole[:, :75], rtol=0, atol=1e-10)
    alone = logits(model, ids[:, 75:])
    torch.testing.assert_close(packed[:, 75:], alone, rtol=0, atol=1e-10)
    model.set_attn_implementation("sdpa")
    dense = replace(SALA, sparse=None)
    arrays = {name: weight.numpy() for name, weight in weights.items()}
    want, _ = reference.forward(arrays, dense, ids.numpy())
    torch.testing.assert_close(logits(model, ids), torch.from_numpy(want), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "changed",
    [
        replace(MODEL, sparse=None),
        replace(MODEL, sparse=reference.Sizes(dense_len=131)),
        replace(MODEL, sparse=reference.Sizes(dense_len=130)),
        replace(MODEL, num_key_value_heads=1),
        replace(MODEL, num_key_value_heads=4),
        replace(MODEL, max_position_embeddings=1024),
        replace(MODEL, tie_word_embeddings=True),
    ],
    ids=["dense", "below dense_len", "at dense_len", "G 4", "G 1", "long factors", "tied"],
)
def test_other_configs(tmp_path, changed):
    weights = write(tmp_path, changed)
    model = nsa_flex.load(tmp_path, dtype=torch.float64)
    ids = ids_of(1, 130)
    arrays = {name: weight.numpy() for name, weight in weights.items()}
    want, _ = reference.forward(arrays, changed, ids.numpy())
    torch.testing.assert_close(logits(model, ids), torch.from_numpy(want), rtol=0, atol=1e-10)


@pytest.mark.parametrize(("longest", "length"), [(512, 500), (512, 600), (1024, 20)])
def test_angles_are_those_of_upstream(monkeypatch, longest, length):
    """Short factors up to the original length; long ones beyond, and in longer models always."""
    monkeypatch.undo()
    changed = replace(MODEL, max_position_embeddings=longest)
    rotary = built(changed).model.rotary_emb
    found = rotary(torch.zeros(1), torch.arange(length)[None])
    for half, want in zip(found, reference.angles(changed, length), strict=True):
        expected = torch.from_numpy(want).float()[None]
        torch.testing.assert_close(half, torch.cat((expected, expected), -1), rtol=0, atol=1e-4)


def test_tokens_after_a_query_change_nothing():
    model, ids = built(), ids_of(1, 120)
    changed = torch.cat((ids[:, :90], (ids[:, 90:] + 7) % 50 + 3), 1)
    before, after = (logits(model, each)[:, :90] for each in (ids, changed))
    assert torch.equal(before, after)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_are_as_if_alone(side):
    model, lengths, longest = built(), (110, 71, 1), 110
    ids, mask = ids_of(3, longest), torch.zeros(3, longest, dtype=torch.long)
    position_ids = torch.zeros(3, longest, dtype=torch.long)
    for row, length in enumerate(lengths):
        real = slice(longest - length, None) if side == "left" else slice(length)
        mask[row, real], position_ids[row, real] = 1, torch.arange(length)
    found = logits(model, ids, attention_mask=mask, position_ids=position_ids)
    for row in range(3):
        real = mask[row] != 0
        alone = logits(model, ids[row, real][None])
        torch.testing.assert_close(found[row, real][None], alone, rtol=0, atol=1e-10)


@pytest.mark.parametrize("real", [99, 100])
def test_padding_does_not_count_for_dense_len(real):
    """The longest row has `real` tokens, where the batch was padded to more."""
    model = built(replace(MODEL, sparse=reference.Sizes(dense_len=100)))
    ids, mask = ids_of(1, 104), torch.ones(1, 104, dtype=torch.long)
    mask[:, : 104 - real] = 0
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    found = logits(model, ids, attention_mask=mask, position_ids=position_ids)
    alone = logits(model, ids[:, 104 - real :])
    torch.testing.assert_close(found[:, 104 - real :], alone, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dense_len", [0, 80, 1000])
def test_packed_documents_are_as_if_alone(dense_len):
    model, lengths = (
        built(replace(MODEL, sparse=reference.Sizes(dense_len=dense_len))),
        (90, 1, 16, 85),
    )
    position_ids = torch.cat([torch.arange(length) for length in lengths])[None]
    ids = ids_of(1, sum(lengths))
    packed = logits(model, ids, position_ids=position_ids, use_cache=False)
    first = 0
    for length in lengths:
        part = slice(first, first + length)
        if dense_len != 80 or length >= 80:  # the longest document decides for all
            alone = logits(model, ids[:, part])
            torch.testing.assert_close(packed[:, part], alone, rtol=0, atol=1e-10)
        first += length


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True])
def test_cached_generation_is_one_forward_a_step(cache, padded):
    model, prompt, new = built(), ids_of(2, 90), 20
    mask = torch.ones_like(prompt)
    if padded:
        mask[0, :23] = 0
    made = model.generate(
        prompt, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0,
        cache_implementation=cache if cache == "static" else None, disable_compile=True,
    )  # fmt: skip
    for row in range(2):
        ids = prompt[row][mask[row] != 0][None]
        for step in range(new):
            ids = torch.cat([ids, logits(model, ids)[:, -1:].argmax(-1)], 1)
            assert ids[0, -1] == made[row, 90 + step], (row, step)


@pytest.mark.parametrize("padded", [False, True])
def test_caches_agree_where_generation_becomes_sparse(padded):
    """One layer, whose keys do not depend on attention: each step is one forward of all tokens."""
    changed = replace(MODEL, num_hidden_layers=1, sparse=reference.Sizes(dense_len=100))
    model, prompt, new = built(changed), ids_of(2, 90), 20
    mask = torch.ones_like(prompt)
    if padded:
        mask[0, :23] = 0
    made = [
        model.generate(
            prompt, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0,
            cache_implementation=cache, disable_compile=True,
        )
        for cache in (None, "static")
    ]  # fmt: skip
    assert torch.equal(*made)
    ids = prompt
    for _ in range(new):
        real = torch.nn.functional.pad(mask, (0, ids.shape[1] - 90), value=1)
        position_ids = (real.cumsum(1) - 1).clamp(min=0)
        last = logits(model, ids, attention_mask=real, position_ids=position_ids)[:, -1:]
        ids = torch.cat([ids, last.argmax(-1)], 1)
    assert torch.equal(ids, made[0])


def test_a_prefill_in_chunks_is_one_forward():
    model, ids = built(), ids_of(2, 120)
    whole = logits(model, ids)
    cache = transformers.DynamicCache(config=model.config)
    for first, end in ((0, 70), (70, 110), (110, 111), (111, 120)):
        part = logits(model, ids[:, first:end], **{CACHE: cache})
        torch.testing.assert_close(part, whole[:, first:end], rtol=0, atol=1e-10)


def test_a_step_makes_the_new_means_alone(monkeypatch):
    """Also behind a reordered, a cropped and a repeated cache, whose means are made anew."""
    model, ids = built(), ids_of(2, 130)
    cache, sizes = transformers.DynamicCache(config=model.config), []
    mean_of_blocks = minicpm_attention.mean_of_blocks

    def note(segments: Tensor, config: Any) -> Tensor:
        sizes.append(segments.shape[2])
        return mean_of_blocks(segments, config)

    def check(first: int, end: int, expected: bool) -> None:
        sizes.clear()
        found = logits(model, ids[:, first:end], **{CACHE: cache})
        whole = logits(model, ids[:, :end], use_cache=False)
        torch.testing.assert_close(found, whole[:, first:end], rtol=0, atol=1e-10)
        made_anew = any(size > 20 for size in sizes)
        assert made_anew is expected

    monkeypatch.setattr(minicpm_attention, "mean_of_blocks", note)
    check(0, 100, True)
    for first in range(100, 112):
        check(first, first + 1, False)
    cache.reorder_cache(torch.tensor([1, 0]))
    ids = ids.flip(0)
    check(112, 113, True)
    check(113, 117, False)
    cache.crop(-3)
    check(114, 118, True)
    cache.batch_repeat_interleave(2)
    ids = ids.repeat_interleave(2, 0)
    check(118, 119, True)


def test_packed_by_lengths():
    """As the collators of FlashAttention tell documents."""
    model, lengths = built(), (90, 1, 85)
    ids = ids_of(1, sum(lengths))
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    inputs = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
    packed = logits(model, ids, use_cache=False, **inputs)
    for first, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        alone = logits(model, ids[:, first:end])
        torch.testing.assert_close(packed[:, first:end], alone, rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match="cu_seq_lens_q is for one row of packed documents"):
        logits(model, ids, attention_mask=torch.ones_like(ids), **inputs)


def test_the_conformance_harness_runs():
    """On a twin with small blocks, whatever the sizes of the model."""
    model = built(replace(MODEL, sparse=reference.Sizes(32, 16, 1, 64, 2048, 64, 8192)))
    before = dict(vars(model.config))
    report = nsa_flex.testing.check_model(model, name="tiny")
    assert [check.name for check in report.checks if check.status == "ok"] == [
        "patch", "causality", "left padding", "right padding", "packed by position_ids",
        "packed by cu_seq_lens", "dynamic cache", "static cache", "save and load", "gradients",
    ], str(report)  # fmt: skip
    assert len(report.layers) == 2
    assert vars(model.config) == before


def test_continuous_batching_is_refused():
    with pytest.raises(ValueError, match="continuous batching of MiniCPMForCausalLM is not"):
        built().generate_batch([[5, 6, 7]])


def test_patch_puts_nsa_in_its_place():
    model, ids = built(), ids_of(1, 60)
    sparse = logits(model, ids)
    nsa_flex.patch(model, nsa_flex.NSAConfig(8, 4, 16, 4, window_size=16, compression="mlp"))
    patched = logits(model, ids)
    assert not torch.allclose(patched, sparse)
    nsa_flex.unpatch(model)
    assert torch.equal(logits(model, ids), sparse)


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("reader", ["auto", "load"])
def test_a_patched_one_is_written_and_read_again(tmp_path, reader, sparse):
    model, ids = built(MODEL if sparse else replace(MODEL, sparse=None)), ids_of(1, 110)
    config = nsa_flex.NSAConfig(8, 4, 16, 4, window_size=16, compression="mlp")
    moved(nsa_flex.patch(model, config))
    model.save_pretrained(tmp_path)
    read = nsa_flex.load if reader == "load" else transformers.AutoModelForCausalLM.from_pretrained
    again = read(tmp_path)
    assert type(again) is minicpm.MiniCPMForCausalLM
    torch.testing.assert_close(logits(again, ids), logits(model, ids), rtol=0, atol=1e-12)


def test_layers_left_out_of_patch_are_dense_when_told(tmp_path):
    """Not unasked: InfLLM-V2 does not run beside NSA."""
    model, ids = built(), ids_of(1, 110)

    def patch_last() -> None:
        sizes = nsa_flex.NSAConfig(8, 4, 16, 4, window_size=16, compression="mlp")
        nsa_flex.patch(model, sizes, filter_fn=lambda module, _: module.layer_idx == 1)

    with pytest.raises(ValueError, match="InfLLM-V2 cannot run beside NSA: patch all layers"):
        patch_last()
    model.set_attn_implementation("sdpa")
    patch_last()
    model.save_pretrained(tmp_path)
    again = nsa_flex.load(tmp_path)
    assert again.model.layers[0].self_attn.config._attn_implementation == "sdpa"
    torch.testing.assert_close(logits(again, ids), logits(model, ids), rtol=0, atol=1e-12)


def test_the_class_that_is_asked_for(tmp_path):
    write(tmp_path, MODEL)
    assert type(nsa_flex.load(tmp_path, model_class=minicpm.MiniCPMModel)) is minicpm.MiniCPMModel


def test_a_checkpoint_of_another_class_is_checked_too(tmp_path: Path):
    """A patched model without a head is read as it was saved; no class takes random weights."""
    base = built().model
    for parameter in base.parameters():
        parameter.data = parameter.data.float()
    nsa_flex.patch(base).save_pretrained(tmp_path / "base")
    assert type(nsa_flex.load(tmp_path / "base")) is minicpm.MiniCPMModel
    whole = built()
    whole.save_pretrained(tmp_path / "whole")
    weights = {name: x for name, x in whole.state_dict().items() if "layers.0.mlp.up" not in name}
    save_file(weights, tmp_path / "whole" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks layers\.0\.mlp\.up_proj\.weight"):
        nsa_flex.load(tmp_path / "whole", model_class=minicpm.MiniCPMModel)


def test_compiled_whole_without_a_host_sync():
    torch._dynamo.reset()
    model = built()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for rows in (1, 2):  # transformers makes one row of position_ids for all
        ids = ids_of(rows, 100)
        with torch.no_grad():
            found = compiled(ids, use_cache=False).logits
        torch.testing.assert_close(found, logits(model, ids), rtol=0, atol=1e-10)


def test_another_attention_is_dense_everywhere():
    model, ids = built(), ids_of(1, 120)
    sparse = logits(model, ids)
    model.set_attn_implementation("sdpa")
    dense = logits(model, ids)
    assert not torch.allclose(sparse, dense)
    without = built(replace(MODEL, sparse=None))
    without.load_state_dict(model.state_dict())
    assert without.config._attn_implementation == "sdpa"
    torch.testing.assert_close(dense, logits(without, ids), rtol=0, atol=1e-12)


def test_attention_modules_of_another_class():
    """Which have no sizes at hand: those of the config count."""
    model, ids = built(), ids_of(1, 120)
    expected = logits(model, ids)
    for layer in model.model.layers:
        del layer.self_attn.infllm
    assert torch.equal(logits(model, ids), expected)


def test_it_is_written_and_read_again(tmp_path):
    write(tmp_path / "upstream", MODEL)
    model = nsa_flex.load(tmp_path / "upstream", dtype=torch.float64)
    model.save_pretrained(tmp_path / "again")
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert written["model_type"] == "minicpm"
    assert written["architectures"] == ["MiniCPMForCausalLM"]
    again = nsa_flex.load(tmp_path / "again", dtype=torch.float64)
    ids = ids_of(1, 110)
    assert torch.equal(logits(again, ids), logits(model, ids))


def test_under_the_type_that_transformers_plans(tmp_path):
    write(tmp_path, MODEL, model_type="minicpm4", architectures=["MiniCPM4ForCausalLM"])
    model = nsa_flex.load(tmp_path, dtype=torch.float64)
    assert type(model) is minicpm.MiniCPM4ForCausalLM
    assert model.config._attn_implementation == "nsa_flex"


def test_full_size_on_meta():
    """MiniCPM4-8B: names and shapes of upstream's tensors."""
    sparse = {"kernel_size": 32, "kernel_stride": 16, "init_blocks": 1, "block_size": 64,
              "window_size": 2048, "topk": 64, "use_nope": False, "dense_len": 8192}  # fmt: skip
    config = MiniCPM4Config(sparse_config=sparse)
    with torch.device("meta"):
        model = minicpm.MiniCPM4ForCausalLM._from_config(config, dtype=torch.bfloat16)
    found = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    big = reference.Model(32, 4096, 16384, 32, 2, 73448)
    assert found == reference.shapes(big)
    assert sum(x.numel() for x in model.parameters()) == pytest.approx(8.2e9, rel=0.01)
    assert model.model.layers[0].self_attn.infllm == nsa_flex.InfLLMV2Config()


@pytest.mark.parametrize("kind", ["lacks", "has more tensors:"])
def test_every_tensor_is_taken(tmp_path, kind):
    weights = write(tmp_path, MODEL)
    name = "model.layers.1.self_attn.o_gate.weight"
    if kind == "lacks":
        name = "model.layers.1.self_attn.k_proj.weight"
        del weights[name]
    else:
        weights[name] = torch.zeros(2, 2)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=rf"the checkpoint {kind} {name}"):
        nsa_flex.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sparse_config": {"use_nope": True}}, "sparse_config has use_nope=True"),
        ({"sparse_config": {"sparsity": 1}}, r"unknown fields of sparse_config \['sparsity'\]"),
        ({"num_experts": 8}, "num_experts=8: MiniCPM models with experts are not supported"),
        ({"model_type": "minicpm_sala"}, "MiniCPM-SALA is not supported: most of its layers"),
    ],
)
def test_refused_by_name(tmp_path, changes, message):
    write(tmp_path, MODEL, **changes)
    with pytest.raises(ValueError, match=message):
        nsa_flex.load(tmp_path)
    with pytest.raises(ValueError, match=message):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_refused_arguments(tmp_path):
    write(tmp_path, MODEL)
    with pytest.raises(ValueError, match="backend='dense' is for patched models"):
        nsa_flex.load(tmp_path, backend="dense")
    with pytest.raises(ValueError, match="output_attentions=True is not supported"):
        built()(ids_of(1, 20), output_attentions=True)
    model = built(attention_dropout=0.1).train()
    with pytest.raises(ValueError, match=r"dropout=0\.1 is not supported in sparse layers"):
        model(ids_of(1, 20))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float64, torch.uint8])
def test_a_mask_of_the_callers_own_is_refused(dtype):
    mask = torch.ones(1, 1, 20, 20).tril().to(dtype)
    with pytest.raises(
        ValueError, match=r"attention_mask has shape \(1, 1, 20, 20\); expected pad"
    ):
        built()(ids_of(1, 20), attention_mask=mask)


def test_it_makes_way_for_transformers_own():
    """Where transformers has a model type, nothing of ours is registered for it."""
    code = (
        "from transformers.models.auto import configuration_auto as auto\n"
        "auto.CONFIG_MAPPING_NAMES['minicpm4'] = 'MiniCPM3Config'\n"
        "import nsa_flex\n"
        "from nsa_flex.patching import minicpm_config\n"
        "assert [x.model_type for x in minicpm_config.own_configs()] == ['minicpm']\n"
        "assert 'minicpm4' not in auto.CONFIG_MAPPING._extra_content\n"
        "assert 'minicpm' in auto.CONFIG_MAPPING._extra_content\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("module", ["hf_saved_config", "minicpm_config", "minicpm_auto"])
def test_each_registered_module_can_be_the_first_import(module: str) -> None:
    """The import of transformers' tables calls `register` of these, which may be under way."""
    code = (
        f"import nsa_flex.patching.{module}\n"
        "from transformers import AutoModelForCausalLM\n"
        "known = {x.model_type for x in AutoModelForCausalLM._model_mapping}\n"
        "assert {'nsa_flex', 'minicpm'} <= known, known\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
