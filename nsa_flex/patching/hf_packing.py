"""Where packed documents would mix in a patched model, in spite of NSA.

Patched layers keep documents apart. What lies around them may not: layers that carry a state,
unpatched layers whose masks know no documents, and models that keep `cu_seq_lens_q` from the
decoder they hold. The last two are read from the source of `forward`.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from nsa_flex.patching.hf_layers import Decoder, is_recurrent

_RECURRENT = (
    "the recurrent layers (linear attention, convolutions) carry their state from one document to "
    "the next: pass one document a row, padded"
)
_MASKS = (
    "the decoder makes the masks of its unpatched attention layers without position_ids, so that "
    "they mix documents: pass one document a row, padded"
)


def mixing_of_documents(decoder: Decoder, kept_masks: list[str]) -> str | None:
    """Why a row of `decoder` can hold but one document, or None.

    Args:
        kept_masks: kinds of mask that unpatched attention modules read.
    """
    if is_recurrent(decoder):
        return _RECURRENT
    return _MASKS if kept_masks and not _makes_masks_of_positions(decoder) else None


def refuse_dropped_bounds(model: nn.Module, decoder: Decoder) -> list[RemovableHandle]:
    """Hooks for models around `decoder` that would swallow `cu_seq_lens_q`: they refuse it."""
    around = [
        each
        for each in model.modules()
        if isinstance(each, PreTrainedModel) and each is not decoder and _holds(each, decoder)
    ]
    return [
        each.register_forward_pre_hook(_refuse_bounds, with_kwargs=True)
        for each in around
        if _drops_arguments(each)
    ]


def _refuse_bounds(module: nn.Module, args: tuple[Any, ...], call: dict[str, Any]) -> None:
    if call.get("cu_seq_lens_q") is not None and call.get("position_ids") is None:
        raise ValueError(
            f"{type(module).__name__} does not hand cu_seq_lens_q down to its decoder, which "
            "would take the row for one document: pass position_ids that restart at each document"
        )


def _holds(model: nn.Module, decoder: Decoder) -> bool:
    return any(each is decoder for each in model.modules())


def _makes_masks_of_positions(decoder: Decoder) -> bool:
    """Whether `forward` names position_ids among the arguments of a mask function."""
    return any(_names_positions(node) for node in _forward_nodes(decoder))


def _names_positions(node: ast.AST) -> bool:
    if isinstance(node, ast.Dict):
        names = {key.value for key in node.keys if isinstance(key, ast.Constant)}
        return {"attention_mask", "position_ids"} <= names
    if isinstance(node, ast.Call) and "mask" in ast.unparse(node.func):
        return any(each.arg == "position_ids" for each in node.keywords)
    return False


def _drops_arguments(model: nn.Module) -> bool:
    """Whether `forward` calls modules of the model, none of them with the `**` that it took."""
    children = {f"self.{name}" for name, _ in model.named_children()}
    calls = [
        node
        for node in _forward_nodes(model)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in children and node.keywords
    ]
    return bool(calls) and not any(each.arg is None for call in calls for each in call.keywords)


def _forward_nodes(module: nn.Module) -> Iterator[ast.AST]:
    try:
        source = inspect.getsource(inspect.unwrap(type(module).forward))
    except (OSError, TypeError):
        return
    yield from ast.walk(ast.parse(textwrap.dedent(source)))
