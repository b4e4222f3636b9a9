"""Perplexity of a checkpoint on WikiText-2, or on texts of one's own, as lm-evaluation-harness.

The `wikitext` task of that harness is what the authors of NSA-1B evaluate with, at 8192 tokens.
Every page is read alone, behind the tokenizer's first special token, in windows that each predict
the tokens that no window before has; the last one reaches back to its full length. Marks of
WikiText's own tokenizer (" @,@ ", spaces before punctuation) are taken out before, not quite as
the harness does; the words that a word's perplexity is of are counted with them.

The dataset comes from the hub, or with --text from files, a page each. Any causal language model
that transformers reads will do; a dense one beside shows what a figure is worth.

Example: python -m nsa_flex.bench.quality.perplexity zen-E/NSA-1B
Example: python -m nsa_flex.bench.quality.perplexity ./checkpoint --text a.txt b.txt --length 4096
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import nsa_flex  # noqa: F401 -- the Auto classes know its checkpoints from then on
from nsa_flex.bench.command_line import parser_of

DATASET = ("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1", "test", "page")
# Word perplexity as the authors give it, by selected tokens, to be compared with by eye. That with
# 1024 is of a config that was not seen.
PUBLISHED = {"NSA-1B": {"256": 16.02, "1024": 15.48}}
_MARKS = (
    (r" @([-,.])@ ", r"\1"),
    (r" ([.,:;?!)\]])", r"\1"),
    (r"([(\[]) ", r"\1"),
    (r" '(s|t|re|ve|ll|d|m)\b", r"'\1"),
    (r'" ([^"\n]*) "', r'"\1"'),
)


class Window(NamedTuple):
    """Tokens that a model reads, and the last of them and of what follows that it predicts."""

    read: Sequence[int]
    predicted: Sequence[int]


def windows(ids: Sequence[int], first: int, length: int) -> Iterator[Window]:
    """Of a page of tokens behind `first`: each is predicted once.

    >>> [tuple(each) for each in windows([5, 6, 7], 1, 2)]
    [([1, 5], [5, 6]), ([5, 6], [7])]
    """
    every = [first, *ids]
    for start in range(0, len(ids), length):
        end = min(start + length, len(ids))
        yield Window(every[max(0, end - length) : end], ids[start:end])


def plain(page: str) -> str:
    """The page without the marks of WikiText's tokenizer.

    >>> plain("about 1 @,@ 000 words ( or more ) , it 's said .")
    "about 1,000 words (or more), it's said."
    """
    for pattern, replacement in _MARKS:
        page = re.sub(pattern, replacement, page)
    return page


@torch.no_grad()
def nats(model: Any, window: Window) -> float:
    """Negative log-likelihood of what a window predicts."""
    read = torch.tensor([window.read], device=model.device)
    wanted = torch.tensor(window.predicted, device=model.device)
    logits: Tensor = model(read, use_cache=False, logits_to_keep=len(wanted)).logits[0]
    return float(F.cross_entropy(logits.float(), wanted, reduction="sum"))


def perplexities(
    model: Any, tokenizer: Any, pages: Iterable[str], length: int = 8192
) -> dict[str, Any]:
    """Of a token and of a word, and how many of each there were.

    Args:
        model: a causal language model of transformers, in eval mode.
        tokenizer: its own.
        pages: each is read alone.
        length: tokens of a window.

    Raises:
        ValueError: no text, or a tokenizer without a token to begin with.
    """
    special = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    first = next((token for token in special if token is not None), None)
    if first is None:
        raise ValueError("the tokenizer has no bos_token and no eos_token to begin a page with")
    total, tokens, words = 0.0, 0, 0
    for page in pages:
        ids = tokenizer(plain(page), add_special_tokens=False)["input_ids"]
        total += sum(nats(model, window) for window in windows(ids, first, length))
        tokens, words = tokens + len(ids), words + len(page.split())
    if not tokens:
        raise ValueError("the texts are empty")
    return {
        "token_perplexity": math.exp(total / tokens),
        "word_perplexity": math.exp(total / words),
        "tokens": tokens,
        "words": words,
        "length": length,
    }


def read_pages(files: Sequence[Path] | None) -> list[str]:
    """Of the files, or of WikiText-2's test part from the hub."""
    if files:
        return [file.read_text() for file in files]
    from datasets import load_dataset

    name, config, split, column = DATASET
    return list(load_dataset(name, config, split=split)[column])


def main(arguments: Sequence[str] | None = None) -> None:
    """Print perplexities as JSON, beside the published one if there is any."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = parser_of(__doc__)
    parser.add_argument("model", help="directory or hub name")
    parser.add_argument("--text", nargs="+", type=Path, help="files, a page each")
    parser.add_argument("--length", type=int, default=8192, help="tokens of a window")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="auto", help="bfloat16, float32, …")
    given = parser.parse_args(arguments)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=given.dtype)
    model = model.to(given.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    found = perplexities(model, tokenizer, read_pages(given.text), given.length)
    published = None if given.text else PUBLISHED.get(Path(given.model).name)
    print(json.dumps({"model": given.model, **found, "published_word_perplexity": published}))


if __name__ == "__main__":
    main()
