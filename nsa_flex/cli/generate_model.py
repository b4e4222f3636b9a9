"""What `nsa-flex generate` runs: a model, its text as token ids and back, and as it is written."""

from __future__ import annotations

import codecs
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

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
        """The UTF-8 bytes of `text`."""
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


@dataclass
class Stream:
    """What `generate` tells of each token: a streamer of transformers.

    Args:
        decode: from token ids, and whether they are the last, to the characters they complete.
        write: gets each piece of text.
        stop: ids that end a text, and are no part of it.
    """

    decode: Callable[[list[int], bool], str]
    write: Callable[[str], None]
    stop: frozenset[int] = frozenset()
    ids: list[int] = field(default_factory=list)
    text: str = ""
    times: list[float] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)
    _prompt_seen: bool = False

    def put(self, tokens: Tensor) -> None:
        """The prompt first, then each new token."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        new = tokens.flatten().tolist()
        self.times += [time.perf_counter()] * len(new)
        self.ids += new
        self._tell(self.decode([token for token in new if token not in self.stop], False))

    def end(self) -> None:
        """A character that was begun is all that may be left."""
        self._tell(self.decode([], True))

    def _tell(self, piece: str) -> None:
        self.text += piece
        self.write(piece)

    @property
    def seconds_to_first(self) -> float | None:
        """From the call to the first new token."""
        return self.times[0] - self.started if self.times else None

    @property
    def tokens_per_second(self) -> float | None:
        """After the first new token; None if there is no other."""
        if len(self.times) < 2 or self.times[-1] == self.times[0]:
            return None
        return (len(self.times) - 1) / (self.times[-1] - self.times[0])
