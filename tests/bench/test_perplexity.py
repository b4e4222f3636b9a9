"""Perplexity of a checkpoint on local texts, against one forward over a page."""

from __future__ import annotations

import json
import math
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy

import nsa_flex
from nsa_flex.bench.quality import perplexity

WORDS = ["<s>", *(f"w{i}" for i in range(30))]
NSA = nsa_flex.NSAConfig(8, 4, 8, 4, window_size=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A patched Llama with random weights, and a tokenizer of words."""
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path_factory.mktemp("checkpoint")
    words = tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<s>")
    backend = tokenizers.Tokenizer(words)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    fast.save_pretrained(path)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS), num_hidden_layers=1, num_key_value_heads=2, **sizes
    )
    nsa_flex.patch(transformers.LlamaForCausalLM(config), NSA).save_pretrained(path)
    return path


def page(number: int) -> str:
    return " ".join(WORDS[i] for i in torch.randint(1, len(WORDS), (number,)).tolist())


def test_a_checkpoint_on_local_texts(folder, tmp_path, capsys):
    files = [tmp_path / name for name in ("a.txt", "b.txt")]
    for file, number in zip(files, (70, 11), strict=True):
        file.write_text(page(number))
    perplexity.main([str(folder), "--text", *map(str, files), "--device", "cpu"])
    found = json.loads(capsys.readouterr().out)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    total = 0.0
    for file in files:
        ids = torch.tensor([[0, *(WORDS.index(word) for word in file.read_text().split())]])
        with torch.no_grad():
            total += float(cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="sum"))
    assert found["tokens"] == found["words"] == 81
    assert found["word_perplexity"] == pytest.approx(math.exp(total / 81), rel=1e-4)
    assert found["published_word_perplexity"] is None


def test_what_the_authors_report_is_printed_beside(folder, tmp_path, monkeypatch, capsys):
    (tmp_path / "NSA-1B").symlink_to(folder)
    monkeypatch.setattr(perplexity, "read_pages", lambda files: [page(9)])
    perplexity.main([str(tmp_path / "NSA-1B"), "--device", "cpu"])
    found = json.loads(capsys.readouterr().out)
    assert found["published_word_perplexity"] == {"256": 16.02, "1024": 15.48}


def test_every_token_is_predicted_once_by_what_comes_before():
    ids = list(range(100, 123))
    found = list(perplexity.windows(ids, 0, 10))
    assert [token for window in found for token in window.predicted] == ids
    for window in found:
        assert len(window.read) == 10
        following = [0, *ids].index(window.read[-1]) + 1
        assert window.predicted[-1] == [0, *ids][following]


def test_words_are_those_of_the_page_and_tokens_those_without_marks():
    class Tokenizer:
        bos_token_id, eos_token_id = None, 1

        def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
            return {"input_ids": [2] * len(text.split())}

    class Model:
        device = torch.device("cpu")

        def __call__(self, ids: torch.Tensor, **options: Any) -> Any:
            assert ids[0, 0] == 1
            return transformers.modeling_outputs.CausalLMOutput(
                logits=torch.zeros(1, options["logits_to_keep"], 8)
            )

    found = perplexity.perplexities(Model(), Tokenizer(), ["1 @,@ 000 words ."])
    assert (found["tokens"], found["words"]) == (2, 5)
    assert found["token_perplexity"] == pytest.approx(8)
    assert found["word_perplexity"] == pytest.approx(8 ** (2 / 5))


@pytest.mark.parametrize(
    ("eos", "message"), [(1, "the texts are empty"), (None, "has no bos_token and no eos_token")]
)
def test_what_there_is_no_perplexity_of(eos, message):
    tokenizer = types.SimpleNamespace(bos_token_id=None, eos_token_id=eos)
    with pytest.raises(ValueError, match=message):
        perplexity.perplexities(None, tokenizer, [])
