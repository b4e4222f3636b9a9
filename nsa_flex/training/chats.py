"""Tokenizers for conversations: their chat template, with marks around what the assistant says."""

from __future__ import annotations

import dataclasses
import re
from importlib.util import find_spec

from nsa_flex.training.tokenization import Tokenizer

_MARK = re.compile(r"\{%-?\s*generation\b")


def for_chat(tokenizer: Tokenizer) -> Tokenizer:
    """The same, and it encodes conversations.

    A template without `{% generation %}` is replaced by TRL's for training, where TRL is installed
    and knows it; the tokenizer itself stays as it is.

    Raises:
        ValueError: there is no template, or none that says where the assistant speaks.
    """
    found = tokenizer.processing_class
    template = None if found is None else found.chat_template
    if not isinstance(template, str):
        raise ValueError(
            "data.format chat needs a tokenizer with a chat template, and this has none: name the "
            "directory of an instruction-tuned model's in data.tokenizer"
        )
    if not _MARK.search(template):
        template = _of_trl(found)
    if template is None:
        raise ValueError(
            "the tokenizer's chat template does not mark what the assistant says: put "
            "{% generation %} and {% endgeneration %} around it in chat_template.jinja (TRL, if "
            "installed, knows the templates of some models)"
        )
    return dataclasses.replace(tokenizer, chat_template=template)


def _of_trl(tokenizer: object) -> str | None:
    if find_spec("trl") is None:
        return None
    from trl.chat_template_utils import get_training_chat_template

    try:
        return get_training_chat_template(tokenizer)
    except ValueError:  # a template that it does not know
        return None
