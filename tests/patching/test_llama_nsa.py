"""Checkpoints under the names of NSA-1B, SSA-1B and MoBA-1B, against their oracle in float64."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.models.llama import modeling_llama

import nsa_flex
from nsa_flex.patching.hf_versions import CACHE
from nsa_flex.patching.llama_nsa import from_upstream, to_upstream
from nsa_flex.testing import check_model
from nsa_flex.testing.models import model_named
from nsa_flex.testing.run import CHECKS
from reference import nsa_1b

NSA = nsa_1b.Sizes()
SSA = nsa_1b.Sizes(window_size=0, selects_only=True)
BOTH = pytest.mark.parametrize("sizes", [NSA, SSA], ids=["NSA", "SSA"])
AUTO_MAP = {
    "AutoConfig": "configuration_llama_nsa.LlamaNSAConfig",
    "AutoModelForCausalLM": "modeling_llama_nsa.LlamaNSAForCausalLM",
}


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.utils.logging, "_tqdm_active", False)


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of transformers' Llama that compute in float32, norms and angles, in float64."""

    def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        size = x.square().mean(-1, keepdim=True) + self.variance_epsilon
        return self.weight * x * size.rsqrt()

    def angles(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        half = self.config.head_dim // 2
        theta = self.config.rope_parameters["rope_theta"]
        inverse = theta ** (-torch.arange(half, dtype=torch.float64) / half)
        turn = position_ids[..., None] * inverse
        turn = torch.cat((turn, turn), -1)
        return turn.cos(), turn.sin()

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", norm)
    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", angles)


def config_of(sizes: nsa_1b.Sizes, **changes: Any) -> dict[str, Any]:
    """As upstream writes it."""
    values = dataclasses.asdict(sizes)
    values.pop("selects_only")
    return {
        **values,
        "architectures": ["LlamaNSAForCausalLM"],
        "model_type": "llama-nsa",
        "attention_bias": False,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "rope_scaling": None,
        "torch_dtype": "float64",
        "transformers_version": "4.45.0.dev0",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "auto_map": AUTO_MAP,
        **changes,
    }


def weights_of(sizes: nsa_1b.Sizes) -> dict[str, torch.Tensor]:
    return {
        name: torch.randn(shape, dtype=torch.float64) * (0.3 if len(shape) > 1 else 1)
        for name, shape in nsa_1b.shapes(sizes).items()
    }


def write(
    folder: Path,
    sizes: nsa_1b.Sizes,
    weights: dict[str, torch.Tensor] | None = None,
    **changes: Any,
) -> dict[str, torch.Tensor]:
    """A checkpoint; its weights."""
    weights = weights_of(sizes) if weights is None else weights
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(sizes, **changes)))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return weights


def ids_of(sizes: nsa_1b.Sizes, batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, sizes.vocab_size, (batch, length))


def arrays(weights: dict[str, torch.Tensor]) -> nsa_1b.Weights:
    return {name: weight.numpy() for name, weight in weights.items()}


def logits(model: nn.Module, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, **inputs).logits


def close(found: torch.Tensor, expected: Any) -> None:
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@BOTH
def test_logits_and_all_gradients_are_the_oracles(
    sizes: nsa_1b.Sizes, tied: bool, tmp_path: Path
) -> None:
    sizes = dataclasses.replace(sizes, tie_word_embeddings=tied)
    weights = write(tmp_path, sizes)
    model = nsa_flex.load(tmp_path)
    ids = ids_of(sizes, 2, 61)
    expected, backward = nsa_1b.forward(arrays(weights), sizes, ids.numpy())
    found = model(ids).logits
    close(found, expected)
    grad = torch.randn_like(found) / found[0].numel()
    found.backward(grad)
    gradients = backward(grad.numpy())
    named = dict(model.named_parameters())
    for name, gradient in gradients.items():
        own = name.replace("self_attn.g_proj", "self_attn.nsa.gates.linear")
        close(named.pop(own).grad, gradient)
    assert not named, named.keys()


def test_gates_that_no_branch_reads_have_no_gradient(tmp_path: Path) -> None:
    write(tmp_path, SSA)
    model = nsa_flex.load(tmp_path)
    model(ids_of(SSA, 1, 40)).logits.sum().backward()
    grad = model.model.layers[0].self_attn.nsa.gates.linear.weight.grad.unflatten(0, (-1, 3))
    assert grad[:, [0, 2]].abs().max() == 0
    assert grad[:, 1].abs().max() > 0


def test_auto_classes_and_load_read_alike_and_run_no_code(tmp_path: Path) -> None:
    write(tmp_path, NSA)
    script = (
        "import sys, torch, nsa_flex, transformers\n"
        f"path = {str(tmp_path)!r}\n"
        "read = transformers.AutoModelForCausalLM.from_pretrained\n"
        "models = [nsa_flex.load(path), read(path), read(path, trust_remote_code=True)]\n"
        "ids = torch.arange(3, 50)[None]\n"
        "first, *others = [model(ids).logits for model in models]\n"
        "assert all(torch.equal(first, other) for other in others)\n"
        "assert {type(model).__name__ for model in models} == {'LlamaForCausalLM'}\n"
        "assert not any('modeling_llama_nsa' in name for name in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    assert "code" not in done.stderr  # nobody asks


@pytest.mark.usefixtures("exact")
def test_the_future_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path, NSA)
    model, ids = nsa_flex.load(tmp_path), ids_of(NSA, 1, 61)
    before = logits(model, ids)
    for place in (17, 30, 44):
        changed = ids.clone()
        changed[:, place:] = ids_of(NSA, 1, 61 - place)
        assert torch.equal(logits(model, changed)[:, :place], before[:, :place])


def stepped(model: Any, ids: torch.Tensor, cache: Any, parts: list[int]) -> torch.Tensor:
    """Logits of tokens that come in parts, with a cache."""
    found = [logits(model, part, **{CACHE: cache}) for part in ids.split(parts, 1)]
    return torch.cat(found, 1)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@BOTH
def test_a_cache_gives_the_oracles_logits(
    sizes: nsa_1b.Sizes, static: bool, tmp_path: Path
) -> None:
    weights = write(tmp_path, sizes)
    model, ids = nsa_flex.load(tmp_path), ids_of(sizes, 2, 61)
    cache: Any = transformers.DynamicCache(config=model.config)
    if static:
        cache = transformers.StaticCache(config=model.config, max_cache_len=64)
    found = stepped(model, ids, cache, [21, 20, *[1] * 15, 3, 2])
    close(found, nsa_1b.forward(arrays(weights), sizes, ids.numpy())[0])


@BOTH
def test_generated_tokens_are_the_oracles_with_and_without_an_engine(
    sizes: nsa_1b.Sizes, tmp_path: Path
) -> None:
    """Padded rows by `generate`, requests by continuous batching: each as if it were alone."""
    weights = write(tmp_path, sizes, eos_token_id=None)
    model, lengths = nsa_flex.load(tmp_path), (19, 34)
    prompts = [ids_of(sizes, 1, length) for length in lengths]
    expected = []
    for prompt in prompts:
        for _ in range(10):
            last = nsa_1b.forward(arrays(weights), sizes, prompt.numpy())[0][0, -1]
            prompt = torch.cat((prompt, torch.tensor([[int(last.argmax())]])), 1)
        expected.append(prompt[0, -10:].tolist())
    options: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    rows = torch.cat([torch.nn.functional.pad(row, (34 - row.shape[1], 0)) for row in prompts])
    mask = torch.tensor([[0] * 15 + [1] * 19, [1] * 34])
    generated = model.generate(rows, attention_mask=mask, **options)
    assert generated[:, -10:].tolist() == expected
    small = {"page_size": 16, "num_blocks": 64, "max_batch_tokens": 48, "max_memory_percent": 0.5}
    outputs = model.generate_batch(
        [prompt[0].tolist() for prompt in prompts],
        generation_config=transformers.GenerationConfig(**options),
        continuous_batching_config=transformers.ContinuousBatchingConfig(**small),
    )
    assert [output.generated_tokens for output in outputs.values()] == expected


@pytest.mark.usefixtures("exact")
@BOTH
def test_padded_rows_and_packed_documents_are_alone(sizes: nsa_1b.Sizes, tmp_path: Path) -> None:
    weights = write(tmp_path, sizes)
    model, lengths = nsa_flex.load(tmp_path), (21, 40)
    rows = [ids_of(sizes, 1, length) for length in lengths]
    expected = [nsa_1b.forward(arrays(weights), sizes, row.numpy())[0][0] for row in rows]
    mask = torch.tensor([[0] * 19 + [1] * 21, [1] * 40])
    padded = torch.cat([torch.nn.functional.pad(row, (40 - row.shape[1], 0)) for row in rows])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    found = logits(model, padded, attention_mask=mask, position_ids=positions)
    packed = logits(
        model,
        torch.cat(rows, 1),
        position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
        use_cache=False,
    )
    for i, (length, want) in enumerate(zip(lengths, expected, strict=True)):
        close(found[i, 40 - length :], want)
        start = sum(lengths[:i])
        close(packed[0, start : start + length], want)


@pytest.mark.parametrize("shard", ["5GB", "20KB"])
@BOTH
def test_saved_again_it_is_what_was_read(sizes: nsa_1b.Sizes, shard: str, tmp_path: Path) -> None:
    weights = write(tmp_path / "first", sizes, inference_mode="sparse")
    model, ids = nsa_flex.load(tmp_path / "first"), ids_of(sizes, 1, 40)
    model.save_pretrained(tmp_path / "second", max_shard_size=shard)
    files = list((tmp_path / "second").glob("*.safetensors"))
    assert (len(files) > 1) == (shard == "20KB")
    written = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert written.keys() == weights.keys()
    assert all(torch.equal(written[name], weights[name]) for name in weights)
    config = json.loads((tmp_path / "second" / "config.json").read_text())
    former = config_of(sizes, inference_mode="sparse")
    changed = {name for name, value in former.items() if config.get(name) != value}
    assert changed == {"transformers_version"}
    again = nsa_flex.load(tmp_path / "second")
    assert torch.equal(logits(again, ids), logits(model, ids))
    assert again.config.nsa_flex == model.config.nsa_flex


def test_saved_in_the_other_format_when_told(tmp_path: Path) -> None:
    write(tmp_path / "first", SSA)
    model, ids = nsa_flex.load(tmp_path / "first"), ids_of(SSA, 1, 40)
    model.save_pretrained(tmp_path / "own", checkpoint_format="nsa_flex")
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    assert config["model_type"] == "nsa_flex"
    assert "format" not in config["nsa_flex"]
    loaded = nsa_flex.load(tmp_path / "own")
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    model.save_pretrained(tmp_path / "second")
    config = json.loads((tmp_path / "second" / "config.json").read_text())
    assert config["model_type"] == "llama-nsa"
    with pytest.raises(ValueError, match="format is 'torch'; this model has nsa_flex or"):
        model.save_pretrained(tmp_path / "third", checkpoint_format="torch")
    with pytest.raises(ValueError, match="format is 'llama-nsa'; this model has nsa_flex"):
        loaded.save_pretrained(tmp_path / "third", checkpoint_format="llama-nsa")
    with pytest.raises(ValueError, match="is of patched models; LlamaForCausalLM is not patched"):
        nsa_flex.unpatch(loaded).save_pretrained(tmp_path / "third", checkpoint_format="nsa_flex")
    assert not (tmp_path / "third").exists()


def test_dtype_and_device_map(tmp_path: Path) -> None:
    write(tmp_path, NSA)
    model = nsa_flex.load(tmp_path, dtype=torch.bfloat16, device_map="cpu")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.model.layers[0].self_attn.nsa.gates.offset.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model.layers.0.self_attn.q_norm.weight": torch.ones(8)},
            r"tensors that the model does not take: model.layers.0.self_attn.q_norm.weight; it is "
            "of another kind than llama-nsa",
        ),
        (
            {"model.layers.7.self_attn.g_proj.weight": torch.ones(12, 32)},
            "no layer takes: model.layers.7.self_attn.g_proj.weight",
        ),
        (
            {"model.layers.1.self_attn.g_proj.weight": None},
            "the checkpoint lacks model.layers.1.self_attn.g_proj.weight",
        ),
        (
            {"model.layers.1.self_attn.o_proj.weight": None},
            "the checkpoint lacks model.layers.1.self_attn.o_proj.weight",
        ),
    ],
)
def test_every_tensor_is_taken_or_named(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    weights = {**weights_of(NSA), **change}
    write(tmp_path, NSA, {name: x for name, x in weights.items() if x is not None})
    with pytest.raises(ValueError, match=message):
        nsa_flex.load(tmp_path)


def test_other_heads_leave_the_first_one_out(tmp_path: Path) -> None:
    """Tied embeddings may be in a checkpoint twice."""
    weights = weights_of(NSA)
    copy = weights["model.embed_tokens.weight"].clone()
    write(tmp_path, NSA, {**weights, "lm_head.weight": copy})
    model, ids = nsa_flex.load(tmp_path), ids_of(NSA, 1, 40)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with pytest.warns(UserWarning, match="not in the model, left out: lm_head.weight"):
        base = transformers.AutoModel.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(base(ids)[0] @ copy.T, logits(model, ids))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inference_mode": "full"}, "inference_mode is 'full', gated dense attention"),
        ({"inference_mode": "both"}, "inference_mode is 'both'; it must be sparse or full"),
        (
            {"block_size": 64, "block_counts": 16, "window_size": 0},
            "block_size=64 and window_size=0 are those of FullAttn-1B",
        ),
        (
            {"block_size": 16, "block_counts": 12},
            "block_counts=12 with block_size=16: upstream's kernel keeps halves of tiles",
        ),
    ],
)
def test_other_models_are_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path, NSA, **changes)
    with pytest.raises(ValueError, match=message):
        nsa_flex.load(tmp_path)


def test_a_caller_may_say_otherwise_than_the_config(tmp_path: Path) -> None:
    write(tmp_path / "first", NSA, inference_mode="full")
    options = {"inference_mode": "sparse", "selection": "top_k"}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "first", **options)
    assert model.model.layers[0].self_attn.nsa.config.selection == "top_k"
    trained = nsa_flex.load(tmp_path / "first", inference_mode="sparse")
    assert trained.model.layers[0].self_attn.nsa.config.selection == "tiled_top_k"
    ids = ids_of(NSA, 1, 61)
    assert torch.equal(logits(model, ids)[:, :16], logits(trained, ids)[:, :16])  # one tile
    assert not torch.equal(logits(model, ids), logits(trained, ids))
    model.save_pretrained(tmp_path / "second")
    again = nsa_flex.load(tmp_path / "second")
    assert again.model.layers[0].self_attn.nsa.config.selection == "top_k"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("tiled_top_k", 16, 16, 128, ("compressed", "selected", "sliding"))),
        ({"window_size": 0}, ("tiled_top_k", 16, 16, 512, ("selected",))),
        ({"block_size": 64}, ("top_k", 64, 16, 128, ("compressed", "selected", "sliding"))),
    ],
    ids=["NSA-1B", "SSA-1B", "blocks of 64"],
)
def test_a_model_of_full_size_has_upstreams_names_and_shapes(
    changes: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    sizes = nsa_1b.Sizes(
        num_hidden_layers=16,
        hidden_size=2048,
        intermediate_size=8192,
        num_attention_heads=32,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=128256,
        block_size=16,
        block_counts=16,
        window_size=128,
    )
    written = {**config_of(sizes, max_position_embeddings=131072), **changes}
    base = from_upstream(written)
    record = base.pop("nsa_flex")
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(base))
        nsa = nsa_flex.NSAConfig.from_dict(record["config"])
        nsa_flex.patch(model, nsa, init=record["init"])
    found = (nsa.selection, nsa.compress_stride, nsa.num_selected_blocks, nsa.window_size)
    assert (*found, nsa.branches) == expected
    tensors = {
        name.replace("nsa.gates.linear", "g_proj"): tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if not name.endswith("gates.offset")
    }
    assert tensors.pop("lm_head.weight") == (128256, 2048)  # tied, and in no checkpoint
    assert tensors == nsa_1b.shapes(sizes)
    assert tensors["model.layers.0.self_attn.g_proj.weight"] == (96, 2048)
    assert tensors["model.layers.15.self_attn.k_proj.weight"] == (128, 2048)


def test_the_config_comes_back_as_it_was() -> None:
    config = config_of(NSA, inference_mode="sparse", rope_scaling=None)
    del config["torch_dtype"]
    assert to_upstream(from_upstream(config)) == {**config, "torch_dtype": None}


def test_loading_warns_of_nothing(tmp_path: Path) -> None:
    write(tmp_path, NSA)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nsa_flex.load(tmp_path)


@BOTH
def test_the_checks_of_models_take_it(sizes: nsa_1b.Sizes, tmp_path: Path) -> None:
    write(tmp_path, sizes)
    report = check_model(model_named(str(tmp_path)))
    assert [check.name for check in report.checks] == list(CHECKS)
    assert {check.status for check in report.checks} == {"ok"}, report
