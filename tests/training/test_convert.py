"""A dense checkpoint trained on the spot becomes NSA: masses of blocks, stages, refusals."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from training.small_config import CUDA, NSA, small_config, write_texts
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import nsa_flex
from nsa_flex import NSAConfig
from nsa_flex.patching import NSALayer
from nsa_flex.selection import choose_blocks
from nsa_flex.training.alignment import base_frozen, recalls
from nsa_flex.training.block_mass import (
    compressed_block_mass,
    dense_block_mass,
    divergence,
    free_blocks,
    recall_of,
)
from nsa_flex.training.config import DataSection, ModelSection
from nsa_flex.training.convert import Stage, convert
from nsa_flex.training.dense_choice import CHOICE_FILE, choose_dense_layers
from nsa_flex.training.models import PRESETS, build_model, decoder_layers
from nsa_flex.training.run import train
from nsa_flex.training.telemetry import read_rows, schema
from nsa_flex.training.texts import find_texts
from nsa_flex.training.tokenization import BYTES

SMALL = NSAConfig(8, 4, 8, 4, window_size=12, compression="mean")
TOKENS = 100
POSITIONS = torch.arange(0, TOKENS, 3)


def heads() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, TOKENS, 16), torch.randn(2, 2, TOKENS, 16)
    return query[:, :, POSITIONS], key, key.unfold(2, 8, 4).mean(-1)


def test_dense_mass_is_the_softmax_summed_over_blocks() -> None:
    query, key, _ = heads()
    mass = dense_block_mass(query, key, POSITIONS, SMALL, 0.5)
    assert mass.shape == (2, 2, len(POSITIONS), 13)
    for row, position in enumerate(POSITIONS.tolist()):
        for head in range(2):
            seen = key[1, head, : position + 1]
            p = sum((query[1, 2 * head + g, row] @ seen.T * 0.5).softmax(-1) for g in (0, 1)) / 2
            for block in range(13):
                wanted = p[8 * block : 8 * block + 8].sum()
                torch.testing.assert_close(mass[1, head, row, block], wanted)


def test_compressed_mass_is_what_blocks_are_selected_by() -> None:
    query, _, compressed = heads()
    mass = compressed_block_mass(query, compressed, POSITIONS, SMALL, 0.5, 13)
    free = free_blocks(POSITIONS, 13, SMALL)
    selected = choose_blocks(
        query, compressed, config=SMALL, scale=0.5, num_blocks=13, positions=POSITIONS[None]
    )
    best = torch.where(free, mass, -1.0).argmax(-1)
    asked = free.any(-1)
    assert asked.sum() > 20
    assert (selected == best[..., None]).any(-1)[:, :, asked].all()


def test_what_differs_less_has_a_smaller_divergence() -> None:
    query, key, compressed = heads()
    dense = dense_block_mass(query, key, POSITIONS, SMALL, 0.5)
    free = free_blocks(POSITIONS, 13, SMALL)
    compressed = compressed.requires_grad_()
    ours = compressed_block_mass(query, compressed, POSITIONS, SMALL, 0.5, 13)
    loss = divergence(dense, ours, free)
    assert divergence(dense, dense, free).abs() < 1e-6
    (grad,) = torch.autograd.grad(loss, compressed)
    nearer = compressed_block_mass(query, compressed - grad, POSITIONS, SMALL, 0.5, 13)
    assert 0 < divergence(dense, nearer, free) < loss


def test_recall_of_all_blocks_and_of_none() -> None:
    query, key, _ = heads()
    dense = dense_block_mass(query, key, POSITIONS, SMALL, 0.5)
    free = free_blocks(POSITIONS, 13, SMALL)
    best = torch.where(free, dense, -1.0).argmax(-1, keepdim=True)  # one place beside the forced
    own = (POSITIONS // 8)[:, None].expand(best.shape)
    everything = torch.arange(13).expand(*best.shape[:3], 13)
    assert recall_of(dense, best, free, SMALL).blocks == 1.0
    assert recall_of(dense, own, free, SMALL).blocks == 0.0
    found = recall_of(dense, everything, free, SMALL)
    torch.testing.assert_close(torch.stack(found), torch.ones(2))
    some = recall_of(dense, best, free, SMALL).scores
    assert 0 < some < 1
    nothing_to_choose = recall_of(dense[:, :, :8], own[:, :, :8], free[:8], SMALL)
    assert nothing_to_choose.blocks.isnan()
    forced = NSAConfig(8, 4, 8, 3, window_size=12)
    assert recall_of(dense, own, free, forced).blocks.isnan()


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts") / "texts")


@pytest.fixture(scope="module")
def dense(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A dense checkpoint."""
    out = tmp_path_factory.mktemp("dense") / "run"
    run = {"log_every": 40, "gates_every": 0, "eval_every": 0, "save_every": 0}
    config = small_config(
        out,
        texts,
        model={"attention": "dense"},
        data={"documents": "joined", "seq_len": 128},
        training={"steps": 40},
        run=run,
    )
    return train(config)["model"]


STAGES = (
    Stage("1-align", 30, 128, 1e-2, frozen=True, alignment=1.0),
    Stage("2-sparse", 2, 128, 1e-3, alignment=0.5),
    Stage("3-long", 2, 160, 1e-3),
)


def settings(**changes: Any) -> tuple[str, ...]:
    values = {
        "training.batch_size": 2,
        "training.accumulate": 1,
        "engine.compile": "false",
        "engine.device": "cpu",
        "run.log_every": 1,
        "run.gates_every": 30,
        "run.eval_every": 0,
        "run.save_every": 0,
        "data.held_out_share": 0.2,
        **{f"model.nsa.{name}": value for name, value in NSA.items()},
        **changes,
    }
    return tuple(f"{name}={value}" for name, value in values.items())


def test_a_dense_checkpoint_is_converted_in_stages(
    dense: str, texts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "converted"
    result = convert(
        dense, out, [str(texts)], tokenizer="bytes", stages=STAGES, overrides=settings()
    )
    assert result["model"] == str(out / "3-long" / "model")
    before, after = result["recall"]["1-align"]["block_recall"]
    assert after > before + 0.05
    for stage in STAGES:
        rows = read_rows(out / stage.name, "recall")
        assert {row["step"] for row in rows} >= {0, stage.steps}
        for row in rows:
            jsonschema.validate(row, schema("recall"))
    losses = [row["loss"] for row in read_rows(out / "1-align", "training") if row["loss"]]
    assert sum(losses[-5:]) < sum(losses[:5])

    aligned = nsa_flex.load(out / "1-align" / "model").state_dict()
    base = nsa_flex.load(result["model"])
    for name, value in AutoModelForCausalLM.from_pretrained(dense).state_dict().items():
        assert torch.equal(aligned[name], value), name  # the first stage leaves it alone
    assert any(isinstance(module, NSALayer) for module in base.modules())
    ids = torch.randint(1, 256, (1, 150))
    assert F.cross_entropy(base(ids).logits[0, :-1], ids[0, 1:]).isfinite()
    # What is done is not run again.
    again = convert(
        dense, out, [str(texts)], tokenizer="bytes", stages=STAGES, overrides=settings()
    )
    assert (again["seconds"], again["recall"]) == (0.0, result["recall"])
    out.rename(tmp_path / "moved")
    given = (dense, tmp_path / "moved", [str(texts)])
    smaller = settings(**{"engine.checkpointing": "full", "training.batch_size": 1})
    kept = convert(*given, tokenizer="bytes", stages=STAGES, overrides=smaller)
    assert kept["seconds"] == 0.0
    unaligned = [dataclasses.replace(STAGES[0], steps=0), *STAGES[1:]]
    with pytest.raises(ValueError, match=r"2-sparse began with other weights than those of"):
        convert(*given, tokenizer="bytes", stages=unaligned, overrides=settings())
    with pytest.raises(ValueError, match=r"other settings: seed was 0 and is 3; repeat"):
        convert(*given, tokenizer="bytes", stages=STAGES[2:], overrides=settings(seed=3))
    other = [dataclasses.replace(STAGES[1], alignment=0.25)]
    for _ in ("finished", "begun"):
        with pytest.raises(ValueError, match=r"2-sparse .*: alignment was 0\.5 and is 0\.25; rep"):
            convert(*given, tokenizer="bytes", stages=other, overrides=settings())
        shutil.rmtree(tmp_path / "moved" / "2-sparse" / "model", ignore_errors=True)
    aligned = str(tmp_path / "moved" / "1-align" / "model")
    with pytest.raises(ValueError, match=r"window_size is 16, and .* was patched with 12: a patc"):
        convert(
            aligned,
            tmp_path / "other",
            [str(texts)],
            tokenizer="bytes",
            stages=STAGES[1:],
            overrides=settings(**{"model.nsa.window_size": 16}),
        )
    assert not (tmp_path / "other").exists()


def test_other_weights_in_the_same_folder_are_refused(
    dense: str, texts: Path, tmp_path: Path
) -> None:
    """At the stage that began with others: a finished one, and one behind a stage run anew."""
    given = (tmp_path / "out", [str(texts)])
    options: dict[str, Any] = {"tokenizer": "bytes", "stages": STAGES[1:]}
    convert(dense, *given, **options, overrides=settings())
    other = AutoModelForCausalLM.from_pretrained(dense)
    with torch.no_grad():
        other.lm_head.weight[3, 3] += 1
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"2-sparse began with other weights than .*other"):
        convert(str(tmp_path / "other"), *given, **options, overrides=settings())
    shutil.rmtree(given[0] / "2-sparse")
    with pytest.raises(ValueError, match=r"3-long began with other weights than .*2-sparse"):
        convert(str(tmp_path / "other"), *given, **options, overrides=settings())


def test_rows_longer_than_learnt_positions_are_refused_before_all_stages(
    texts: Path, tmp_path: Path
) -> None:
    sizes = {"n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 256}
    config = GPT2Config(**sizes, attn_pdrop=0.0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    stages = [dataclasses.replace(STAGES[1], seq_len=length) for length in (128, 192)]
    with pytest.raises(ValueError, match="rows have 192 tokens, and the model has learnt 128 pos"):
        convert(
            str(tmp_path / "gpt2"),
            tmp_path / "out",
            [str(texts)],
            tokenizer="bytes",
            stages=stages,
            overrides=settings(),
        )
    assert not (tmp_path / "out").exists()


def test_layers_that_lose_most_stay_dense(dense: str, texts: Path, tmp_path: Path) -> None:
    lines: list[str] = []

    def run(
        keep_dense: int,
        *more: str,
        out: str = "out",
        seq_len: int = 128,
        choice_len: int | None = None,
    ) -> dict[str, Any]:
        return convert(
            dense,
            tmp_path / out,
            [str(texts)],
            tokenizer="bytes",
            stages=[dataclasses.replace(stage, seq_len=seq_len) for stage in STAGES[1:]],
            keep_dense=keep_dense,
            choice_len=choice_len,
            overrides=[*settings(), *more],
            note=lines.append,
        )

    for count, text in (
        (2, r"2 layers were to stay dense, of 2 that can be"),
        (-1, "=-1 must be"),
    ):
        with pytest.raises(ValueError, match=text):
            run(count)
    with pytest.raises(ValueError, match=r"no held-out row has more than n \* l' = 32 tokens"):
        run(1, seq_len=32)
    with pytest.raises(ValueError, match=r"no held-out row has more than n \* l' = 32 tokens"):
        run(1, choice_len=32)
    with pytest.raises(ValueError, match="choice_len=64 without keep_dense: no layer is chosen"):
        run(0, choice_len=64)
    assert not lines
    assert not (tmp_path / "out").exists()
    result = run(1)
    told = json.loads((tmp_path / "out" / CHOICE_FILE).read_text())
    worst = max(told["lost"], key=lambda layer: told["lost"][layer])
    assert told["dense_layers"] == result["dense_layers"] == [int(worst)]
    assert lines[0] == "layers are measured on 8 rows, the longest of 128 tokens"
    assert (told["seq_len"], told["tokens"]) == (128, [128] * 8)
    assert [line.split()[1] for line in lines[1:]] == ["0", "1", "layers:"]
    layers = decoder_layers(nsa_flex.load(result["model"]))
    is_dense = [not hasattr(layer.self_attn, "nsa") for layer in layers]
    assert is_dense == [str(number) == worst for number in (0, 1)]
    assert run(1)["dense_layers"] == [int(worst)]
    assert len(lines) == 4  # not measured again
    assert run(1, choice_len=128)["dense_layers"] == [int(worst)]
    with pytest.raises(ValueError, match=r"chosen on rows of 128 tokens, and choice_len=192: le"):
        run(1, choice_len=192)
    with pytest.raises(
        ValueError, match=rf"begun with dense layers \[{worst}\], and keep_dense=2"
    ):
        run(2)
    with pytest.raises(ValueError, match=r"keep_dense=1 must be .* without model.dense_layers"):
        run(1, "model.dense_layers=[0]", out="other")
    run(1, "data.seq_len_warmup=[[1,64]]", out="longer", choice_len=192)
    longer = json.loads((tmp_path / "longer" / CHOICE_FILE).read_text())
    assert {*longer["tokens"]} == {192}
    assert longer["lost"] != told["lost"]


@pytest.mark.parametrize("documents", ["joined", "separate"])
def test_what_a_layer_loses_is_what_patching_it_alone_costs(
    documents: str, tmp_path: Path
) -> None:
    """Of tokens that are learned from, each seen with its own document."""
    rng = np.random.default_rng(0)
    texts = ["".join(map(chr, rng.integers(97, 123, count))) for count in (70, 90)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": x}) + "\n" for x in texts))
    llama = {**PRESETS["tiny"], "model_type": "llama", "num_hidden_layers": 4, "vocab_size": 256}
    torch.manual_seed(0)
    fresh = ModelSection(config=llama, attention="dense")
    model = build_model(fresh, DataSection(files=()), BYTES)
    with torch.no_grad():
        for layer in model.model.layers:
            for name in ("q", "k", "v", "o"):  # so that single tokens count, and much
                getattr(layer.self_attn, f"{name}_proj").weight *= 20
    checkpoint = str(tmp_path / "sharp")
    model.save_pretrained(checkpoint)
    files = [str(tmp_path / "texts.jsonl")]
    config = small_config(
        tmp_path / "run",
        tmp_path / "texts.jsonl",
        model={"checkpoint": checkpoint, "preset": None, "init": "dense", "nsa": NSA},
        data={"documents": documents, "seq_len": 256, "held_out_files": files},
    )
    chosen = choose_dense_layers(config, 2, tmp_path)
    found = json.loads((tmp_path / CHOICE_FILE).read_text())["lost"]
    assert list(found) == ["0", "1", "2", "3"]
    assert chosen == sorted(sorted(range(4), key=lambda layer: -found[str(layer)])[:2])
    (row,) = find_texts(config).held_out_rows(2)
    assert (row.real, len(row.starts)) == (162, 2)  # the other 94 of 256 are padding
    ids = torch.from_numpy(row.ids[: row.real])[None]
    rows = [ids] if documents == "joined" else ids.split([row.starts[1], 162 - row.starts[1]], 1)

    def loss(**section: Any) -> float:
        given = ModelSection(checkpoint=checkpoint, init="dense", nsa=config.model.nsa, **section)
        model = build_model(given, config.data, BYTES).eval()
        with torch.no_grad():
            losses = [(model(row, labels=row).loss.item(), row.shape[1] - 1) for row in rows]
        return sum(each * count for each, count in losses) / sum(count for _, count in losses)

    before = loss(attention="dense")
    expected = [loss(dense_layers=tuple({0, 1, 2, 3} - {i})) - before for i in range(4)]
    assert list(found.values()) == pytest.approx(expected, abs=1e-5)
    assert max(map(abs, expected)) > 1e-3


def test_recall_of_conversations_is_of_all_their_tokens(dense: str, tmp_path: Path) -> None:
    """Of which a part is not learned from."""
    from training.test_data_sources import write_chats, write_tokenizer  # which need datasets

    result = convert(
        dense,
        tmp_path / "out",
        [str(write_chats(tmp_path / "chats"))],
        tokenizer=str(write_tokenizer(tmp_path / "words")),
        stages=[Stage("1-chat", 1, 64, 1e-3)],
        overrides=settings(**{"data.format": "chat", "training.batch_size": 1}),
    )
    assert 0 < result["recall"]["1-chat"]["score_recall"][0] <= 1


def test_recall_of_a_compiled_model_compiles_nothing() -> None:
    config = small_config(Path("run"), Path("text"), model={"nsa": NSA})
    model = build_model(config.model, config.data, BYTES)
    compiled: list[Any] = []

    def compiler(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(graph)
        return graph

    for layer in decoder_layers(model):
        layer.compile(dynamic=False, backend=compiler)
    ids = torch.randint(1, 256, (1, 64))
    found = recalls(model, ids)
    assert len(found) == len(decoder_layers(model))
    assert not compiled
    with torch.no_grad():
        model(ids)
    assert compiled


@pytest.mark.gpu
def test_a_conversion_on_the_kernels(texts: Path, tmp_path: Path) -> None:
    data = {"documents": "joined", "seq_len": 1024}
    run = {"log_every": 2, "gates_every": 0, "eval_every": 0, "save_every": 0}
    dense = small_config(
        tmp_path / "dense",
        texts,
        **CUDA | {"model": CUDA["model"] | {"attention": "dense"}},
        data=data,
        training={"steps": 2},
        run=run,
    )
    sizes = {f"model.nsa.{name}": value for name, value in CUDA["model"]["nsa"].items()}
    own: dict[str, Any] = {"engine.device": "cuda", "engine.compile": "true", **sizes}
    overrides = [each for each in settings() if not each.startswith("model.nsa.")]
    overrides += [f"{name}={value}" for name, value in own.items()]
    stages = (
        Stage("1-align", 20, 1024, 1e-2, frozen=True, alignment=1.0),
        Stage("2-sparse", 2, 1024, 1e-3),
    )
    result = convert(
        train(dense)["model"],
        tmp_path / "converted",
        [str(texts)],
        tokenizer="bytes",
        stages=stages,
        overrides=overrides,
    )
    assert result["loss"] < 6.0  # ln 256 is 5.5: no stage broke the model
    for stage in ("1-align", "2-sparse"):
        counters = read_rows(tmp_path / "converted" / stage, "fallback_counters")
        assert {row["backend"] for row in counters} <= {"sdpa", "triton"}


def test_the_base_is_frozen_for_a_while() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight.requires_grad_(False)
    with base_frozen(model):
        assert not any(p.requires_grad for p in model.parameters())
    assert [p.requires_grad for p in model.parameters()] == [True, True, False, True]


@pytest.mark.parametrize(
    ("stage", "changes", "text"),
    [
        (Stage("a", 1, 32, 1e-3, frozen=True, alignment=1.0), {}, "more than n \\* l' = 32"),
        (
            Stage("a", 1, 128, 1e-3, alignment=1.0),
            {"data.documents": "separate"},
            'expected "joined"',
        ),
    ],
)
def test_stages_that_cannot_be_are_refused(
    stage: Stage, changes: dict[str, Any], text: str, texts: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=text):
        convert(
            "nowhere",
            tmp_path / "out",
            [str(texts)],
            tokenizer="bytes",
            stages=[stage],
            overrides=settings(**changes),
        )
    assert not (tmp_path / "out").exists()


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="start it without torchrun"):
        convert("nowhere", tmp_path, ["text"])


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf")])
def test_an_alignment_that_weighs_nothing_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match=r"alignment=.* must be at least 0, and finite"):
        Stage("a", 1, 1, 1.0, alignment=weight)
