"""`nsa-flex generate`: one text or turns, streamed, with its speed; exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from typer.testing import CliRunner

import nsa_flex
from nsa_flex.cli.app import app
from nsa_flex.cli.demo_model import QUICK, build_models
from nsa_flex.cli.generate_model import ByteTokens, TokenizerTokens
from patching.tiny_models import NSA, tiny_model


def run(*arguments: str, stdin: str = "") -> Any:
    return CliRunner().invoke(app, ["generate", *arguments], input=stdin, prog_name="nsa-flex")


@pytest.fixture(scope="module")
def bytes_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of `nsa-flex demo --quick`, untrained: its tokens are bytes."""
    folder = tmp_path_factory.mktemp("bytes")
    build_models(QUICK, 0, torch.device("cpu"))[0].save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def words() -> Any:
    """A tokenizer of byte pairs, some of which are parts of characters."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["sparse attention reads sparsely", "größer"] * 9, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_one_text_is_what_the_model_writes(bytes_model: Path) -> None:
    result = run(str(bytes_model), "import ", "--max-new-tokens", "9", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    prompt = list(b"import ")
    model = nsa_flex.load(bytes_model).eval()
    written = model.generate(torch.tensor([prompt]), max_new_tokens=9, do_sample=False)
    assert report["text"] == bytes(written[0, 7:].tolist()).decode(errors="replace")
    assert (report["prompt_tokens"], report["new_tokens"], report["length"]) == (7, 9, 16)
    assert report["tokens_per_second"] > 0
    assert report["seconds_to_first_token"] > 0
    assert report["text"] in result.stderr  # as it came
    assert "7 tokens read" in result.stderr
    plain = run(str(bytes_model), "-", "--max-new-tokens", "9", stdin="import ")
    assert plain.stdout == report["text"] + "\n"


@pytest.mark.parametrize("cache", [[], ["--max-length", "90"]])
def test_turns_go_on_from_one_another(bytes_model: Path, cache: list[str]) -> None:
    options = ["--max-new-tokens", "5", "--json", *cache]
    result = run(str(bytes_model), *options, stdin="def f\n\nreturn\n")
    assert result.exit_code == 0, result.output
    first, second = map(json.loads, result.stdout.splitlines())
    assert first["length"] == 6 + 5
    assert second["length"] == first["length"] + 7 + 5
    assert first["static_cache"] == bool(cache)
    model = nsa_flex.load(bytes_model).eval()
    ids = list(b"def f\n")
    for line in (b"return\n", b""):
        out = model.generate(torch.tensor([ids]), max_new_tokens=5, do_sample=False)
        ids = out[0].tolist() + list(line)
    assert second["text"] == bytes(ids[-5:]).decode(errors="replace")


def test_samples_follow_the_seed(bytes_model: Path) -> None:
    options = ["import ", "--max-new-tokens", "12", "--temperature", "1.5", "--top-p", "0.9"]
    texts = [run(str(bytes_model), *options, "--seed", seed).stdout for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]


def test_a_dense_checkpoint_is_patched_and_said_so(tmp_path: Path, words: Any) -> None:
    model = tiny_model(vocab_size=300)
    model.save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    result = run(str(tmp_path), "sparse größer", "--max-new-tokens", "7", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["patched_on_loading"]
    assert "was not trained with NSA" in result.stderr
    ids = words("sparse größer", return_tensors="pt")["input_ids"]
    expected = model.generate(ids, max_new_tokens=7, do_sample=False)[0, ids.shape[1] :]
    assert report["text"] == words.decode(expected, skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_pieces_of_a_text_are_the_text(kind: str, words: Any) -> None:
    tokens = ByteTokens() if kind == "bytes" else TokenizerTokens(words)
    text = "sparse größer: 3 ≤ π, attention — ok"
    ids = tokens.encode(text, follows=False)
    decode = tokens.decoder()
    pieces = [*(decode([token], False) for token in ids), decode([], True)]
    assert "".join(pieces) == text
    assert len([piece for piece in pieces if piece]) > 12


def test_text_ends_before_the_token_that_ends_it(tmp_path: Path, words: Any) -> None:
    model = nsa_flex.patch(tiny_model(vocab_size=300), NSA)
    words.save_pretrained(tmp_path)
    ids = words("sparse", return_tensors="pt")["input_ids"]
    fourth = model.generate(ids, max_new_tokens=4, do_sample=False)[0, -1].item()
    model.generation_config.eos_token_id = fourth
    model.save_pretrained(tmp_path)
    report = json.loads(run(str(tmp_path), "sparse", "--json").stdout)
    assert report["new_tokens"] <= 4
    expected = model.generate(ids, max_new_tokens=9, do_sample=False)[0, ids.shape[1] : -1]
    assert report["text"] == words.decode(expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/such/model", "x"], "no/such/model"),
        (["{model}", ""], "the prompt is empty"),
        (["{model}", "x", "--max-new-tokens", "999"], "1 tokens and 999 new ones are more than"),
        (["{model}", "x", "--max-length", "50"], "more than 50, --max-length"),
        (["{model}", "x", "--dtype", "int8"], "'int8' is none of auto, bf16"),
        (["{model}", "x", "--device", "nowhere"], "is no device"),
        ([], "Missing argument"),
    ],
)
def test_wrong_usage_exits_with_2(
    bytes_model: Path, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = run(*(argument.format(model=bytes_model) for argument in arguments))
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())
