"""Chunked prefill of patched transformers models: chunks run eagerly, steps compiled.

With a static cache on a GPU `generate` compiles the chunks of a prefill with the step. Compiled
code must not depend on the number of cached tokens, so that each chunk would attend at an offset
that only the device knows, the first one too. Run eagerly, as `generate` runs a whole prompt, the
first chunk takes the kernels of a whole call and the others an offset that the host knows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from nsa_flex.patching.hf_layers import IMPLEMENTATIONS, Decoder, holders_of


def install(model: nn.Module, decoders: set[Decoder]) -> None:
    """Let models in `model` that hold a patched decoder run chunks eagerly."""
    for holder in holders_of(model, decoders, "get_compiled_call"):
        held = tuple(each for each in holder.modules() if each in decoders)
        holder.get_compiled_call = functools.partial(_get_compiled_call, holder, held)


def remove(model: nn.Module, decoders: set[Decoder]) -> None:
    """Undo `install`."""
    for holder in holders_of(model, decoders, "get_compiled_call"):
        vars(holder).pop("get_compiled_call", None)


def _get_compiled_call(
    model: Any, decoders: tuple[Decoder, ...], compile_config: Any
) -> Callable[..., Any]:
    """As the class's own, which compiles the calls of one token alone."""
    compiled = type(model).get_compiled_call(model, compile_config)
    if not any(each.config._attn_implementation in IMPLEMENTATIONS for each in decoders):
        return compiled  # switched by set_attn_implementation for a while, or unpatched alone
    return functools.partial(_call, model, compiled)


def _call(model: Any, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    embeds = kwargs.get("inputs_embeds")
    tokens = kwargs.get("input_ids") if embeds is None else embeds
    # A short last chunk too: each length would be one more graph.
    is_chunk = tokens is not None and tokens.shape[1] > 1
    return (model if is_chunk else compiled)(*args, **kwargs)
