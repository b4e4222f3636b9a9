"""Tokenizers: bytes, or those of transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nsa_flex.training.errors import blamed_on
from nsa_flex.training.files import Conversation, Document


@dataclass(frozen=True)
class Tokenizer:
    """Ids of a document.

    Args:
        vocab_size: ids are below it.
        end: id that ends a document.
        processing_class: the tokenizer of transformers, saved with checkpoints; None for bytes.
        chat_template: of conversations, with marks around what the assistant says.
    """

    vocab_size: int
    end: int
    processing_class: Any = None
    chat_template: str | None = None

    def encode(self, text: Document) -> np.ndarray:
        """int64 (tokens,): the document, then the end token.

        Of a conversation there is no further token, and what nothing is learned from is ~id.
        """
        if isinstance(text, list):
            return self._encode_chat(text)
        if self.processing_class is None:
            data = text.encode() if isinstance(text, str) else text
            ids = np.frombuffer(data, np.uint8)
        else:
            if isinstance(text, bytes):
                text = text.decode(errors="replace")
            ids = np.asarray(
                self.processing_class(text, add_special_tokens=False, verbose=False)["input_ids"]
            )
        return np.append(ids.astype(np.int64), self.end)

    def _encode_chat(self, messages: Conversation) -> np.ndarray:
        found = self.processing_class.apply_chat_template(
            messages,
            chat_template=self.chat_template,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        ids = np.asarray(found["input_ids"], np.int64)
        return np.where(np.asarray(found["assistant_masks"], bool), ids, ~ids)

    def decode(self, ids: list[int]) -> str:
        """The text of ids, without those that end documents.

        A model may have more ids than there are bytes, and write them: they are left out.
        """
        if self.processing_class is None:
            own = (each for each in ids if each != self.end and each < self.vocab_size)
            return bytes(own).decode(errors="replace")
        return self.processing_class.decode(ids, skip_special_tokens=True)


def plain_ids(tokens: np.ndarray) -> np.ndarray:
    """Ids, whether something is learned from them or not."""
    return np.maximum(tokens, ~tokens)


BYTES = Tokenizer(vocab_size=256, end=0)  # text holds no zero byte

END_TEXT = "<|end_of_text|>"


def bytes_tokenizer() -> Any:
    """transformers' tokenizer with the ids of `BYTES`, for whoever reads the finished model.

    >>> tokenizer = bytes_tokenizer()
    >>> ids = tokenizer("né", add_special_tokens=False)["input_ids"]
    >>> ids, tokenizer.decode(ids), tokenizer.eos_token_id
    ([110, 195, 169], 'né', 0)
    """
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    # The characters that stand for bytes in byte-level vocabularies since GPT-2.
    vocabulary = {chr(byte): byte for byte in plain}
    vocabulary |= {chr(256 + place): byte for place, byte in enumerate(others) if byte}
    vocabulary[END_TEXT] = BYTES.end
    found = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    found.decoder = tokenizers.decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=found, eos_token=END_TEXT, clean_up_tokenization_spaces=False
    )


# A folder with a tokenizer may hold a model too.
_OTHERS = {"config.json", "generation_config.json", "trainer_state.json"}


def tokenizer_files(name: str) -> list[Path]:
    """The files that `load_tokenizer(name)` reads, and perhaps some more; none for bytes."""
    if name == "bytes":
        return []
    return sorted(
        path
        for path in Path(name).iterdir()
        if path.suffix in (".json", ".txt", ".model", ".tiktoken")
        and path.name not in _OTHERS
        and not path.name.endswith(".index.json")
        and path.is_file()
    )


def load_tokenizer(name: str) -> Tokenizer:
    """`BYTES`, or the tokenizer in directory `name`.

    Raises:
        ValueError: there is none, or it has no token that ends a text.
    """
    if name == "bytes":
        return BYTES
    if not Path(name).is_dir():
        raise ValueError(
            f"data.tokenizer is {name}; expected bytes or the directory of a tokenizer that "
            "save_pretrained wrote"
        )
    from transformers import AutoTokenizer

    with blamed_on(f"data.tokenizer: the tokenizer in {name} cannot be loaded"):
        found = AutoTokenizer.from_pretrained(name)
    if found.eos_token_id is None:
        raise ValueError(f"the tokenizer in {name} has no eos_token: set one and save it again")
    return Tokenizer(len(found), found.eos_token_id, found)
