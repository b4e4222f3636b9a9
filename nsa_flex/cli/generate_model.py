"""What `nsa-flex generate` runs: a model, and its text as token ids and back."""

from __future__ import annotations

import codecs
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

import nsa_flex

BYTES = 256

# From the next ids of one text, and whether they are the last, to characters they complete.
Decode = Callable[[list[int], bool], str]


class Tokens(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str, *, follows: bool) -> list[int]:
        """Ids of `text`; `follows` if there are tokens before it."""
        ...

    def decoder(self) -> Decode:
        """What decodes one text."""
        ...


class ByteTokens:
    """Ids are bytes of UTF-8: what models without a tokenizer and 256 tokens read and write."""

    def encode(self, text: str, *, follows: bool) -> list[int]:
        """Its bytes."""
        return list(text.encode())

    def decoder(self) -> Decode:
        """A character is complete with its last byte; what is no text is replaced."""
        decode = codecs.getincrementaldecoder("utf-8")(errors="replace")
        return lambda ids, last: decode.decode(bytes(ids), final=last)


class TokenizerTokens:
    """Ids of a transformers tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def encode(self, text: str, *, follows: bool) -> list[int]:
        """With the tokens that begin a text, where it is one's beginning."""
        return self.tokenizer(text, add_special_tokens=not follows)["input_ids"]

    def decoder(self) -> Decode:
        """Decodes beside the tokens before, since spaces and characters span tokens."""
        ids: list[int] = []
        first, told = 0, 0  # ids[first:told] have been told, and stand beside the next

        def decode(new: list[int], last: bool) -> str:
            nonlocal first, told
            ids.extend(new)
            before = self.tokenizer.decode(ids[first:told], skip_special_tokens=True)
            whole = self.tokenizer.decode(ids[first:], skip_special_tokens=True)
            if whole.endswith("\N{REPLACEMENT CHARACTER}") and not last:
                return ""  # the rest of a character is still to come
            first, told = told, len(ids)
            return whole[len(before) :]

        return decode


@dataclass(frozen=True)
class Loaded:
    """A model in eval mode, and its tokens.

    patched: whether the checkpoint was of a patched model; if not it was patched now, with gates
        that leave short texts as they were.
    """

    model: Any
    tokens: Tokens
    patched: bool


def load(path: str, device: torch.device, dtype: torch.dtype | None) -> Loaded:
    """Read a checkpoint, on disk or on the hub.

    Raises:
        ValueError: there is none, or it holds no decoder that NSA can run in.
    """
    be_quiet()
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(path)
        patched = hasattr(config.get_text_config(), "nsa_flex")
        options: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
        if patched:
            model = nsa_flex.load(path, **options)
        else:
            model = AutoModelForCausalLM.from_pretrained(path, **options)
            nsa_flex.patch(model, init="dense")
    except (OSError, KeyError, json.JSONDecodeError, SafetensorError) as error:
        raise ValueError(f"{path}: {str(error).splitlines()[0]}") from error
    model = model.to(device).eval().requires_grad_(False)
    return Loaded(model, _tokens(path, model), patched)


def _tokens(path: str, model: Any) -> Tokens:
    from transformers import AutoTokenizer

    vocabulary = model.config.get_text_config().vocab_size
    if Path(path).is_dir() and not any(Path(path).glob("*token*")):
        if vocabulary != BYTES:
            raise ValueError(
                f"{path} has no tokenizer, and {vocabulary} tokens are not the {BYTES} bytes"
            )
        return ByteTokens()
    return TokenizerTokens(AutoTokenizer.from_pretrained(path))


def be_quiet() -> None:
    """transformers imports what quantizes models too, which warns of what it cannot load."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
    finally:
        logging.disable(before)
