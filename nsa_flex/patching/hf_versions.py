"""What differs between the versions of transformers: the rest of the package asks here.

Found by what is there (the name of an argument, a class, a line of its source) and not by version
numbers, so that a patch release or a checkout of the main branch counts as what it is.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from transformers import Cache
from transformers.cache_utils import StaticLayer
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer

_OLD_CACHE = "past_key_values"
_ALLOCATORS = "transformers.generation.continuous_batching.cache_allocators"


def _cache_argument() -> str:
    """5.24 renamed it; the old name is a deprecated alias since."""
    return "cache" if "cache" in inspect.signature(create_causal_mask).parameters else _OLD_CACHE


def _checkpoints_without_gradients() -> bool:
    """Before 5.24 gradient checkpointing took the cache from layers under `no_grad` too."""
    try:
        return "is_grad_enabled" not in inspect.getsource(GradientCheckpointingLayer)
    except OSError:  # no source was installed
        return CACHE == _OLD_CACHE


# How models, masks and `generate` name the argument that takes a cache.
CACHE = _cache_argument()
_CHECKPOINTS_WITHOUT_GRADIENTS = _checkpoints_without_gradients()


def cache_of(call: dict[str, Any]) -> Any:
    """The cache among the keyword arguments of a decoder, by either name; None if there is none.

    Under both names the new one counts, as in transformers. The engine's is none.
    """
    cache = call[CACHE] if CACHE in call else call.get(_OLD_CACHE)
    return None if _is_paged(cache) else cache


def take_paged_cache(call: dict[str, Any]) -> Any:
    """Take the cache of continuous batching out of the arguments of a decoder; None if none came.

    NSA reads and writes pages itself. Left in, attention modules since 5.24 would have it update
    what earlier ones hand down to the attention function.
    """
    return call.pop("cache") if _is_paged(call.get("cache")) else None


def _is_paged(cache: Any) -> bool:
    if cache is None or isinstance(cache, Cache):
        return False
    return any(base.__name__ == "PagedAttentionCache" for base in type(cache).__mro__)


def has_page_allocators() -> bool:
    """Whether the engine asks an allocator for each type of layer what a page holds (5.19)."""
    if importlib.util.find_spec(_ALLOCATORS) is None:
        return False
    from transformers.generation.continuous_batching import cache_allocators

    return hasattr(cache_allocators.FullAttentionCacheAllocator, "layer_type")


def is_checkpointing(decoder: Any) -> bool:
    """Whether a call of `decoder` now would checkpoint its layers, which then get no cache."""
    switched_on = decoder.training and getattr(decoder, "gradient_checkpointing", False)
    return switched_on and (_CHECKPOINTS_WITHOUT_GRADIENTS or torch.is_grad_enabled())


def check_crop(layer: Any, tokens_to_remove: int) -> None:
    """That a layer of transformers' caches can take back tokens. It is not changed.

    Raises:
        ValueError: it cannot: a sliding one past its window, a static one before 5.24.
    """
    if not isinstance(layer, StaticLayer):
        problem = _problem_of_cropping(layer, tokens_to_remove)
    elif getattr(layer, "is_croppable", False):
        problem = None  # not tried: it would crop in place
    else:
        problem = "it is static, or may have dropped tokens"
    if problem is not None:
        raise ValueError(f"a {type(layer).__name__} of the cache cannot crop: {problem}")


def _problem_of_cropping(layer: Any, tokens_to_remove: int) -> str | None:
    """Found by cropping a copy, which takes other tensors, one by one of some in lists."""
    twin = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, list | dict):
            setattr(twin, name, copy.copy(value))
    try:
        twin.crop(tokens_to_remove)
    except (AttributeError, RuntimeError, ValueError) as error:
        return str(error)
    return None


def is_custom_mask(mask_function: Callable[..., Any] | None) -> bool:
    """Whether a mask function shows more than causality does, as blocks of image tokens.

    Since 5.24 what keeps packed documents apart encloses it. Compiled code sees the outermost
    function alone.
    """
    if torch.compiler.is_compiling():
        return getattr(mask_function, "__name__", "") == "or_mask"
    return "or_mask" in _names(mask_function)


def _names(part: Any) -> Iterator[str]:
    """Names of a function and of those that it encloses."""
    if isinstance(part, tuple):
        for each in part:
            yield from _names(each)
    elif inspect.isfunction(part):
        yield part.__name__
        for cell in part.__closure__ or ():
            yield from _names(cell.cell_contents)


def check_known(module: Any, decoder: Any) -> None:
    """That calls of `decoder`, around the attention `module`, can be read.

    Raises:
        ValueError: they take other arguments than those of any version that was looked at.
    """
    missing = {CACHE, "attention_mask", "position_ids"} - {
        *inspect.signature(decoder.forward).parameters
    }
    if missing:
        raise ValueError(
            f"the attention of {type(module).__name__} in transformers {transformers.__version__} "
            f"is not one that this version of nsa_flex knows: {type(decoder).__name__}.forward "
            f"has no {', '.join(sorted(missing))}"
        )


def other_serving_handlers(models: Any, state: Any) -> dict[str, Any]:
    """Handlers that transformers' server wants beside those of text; 5.19 has no SystemOne."""
    from transformers.cli.serving.transcription import TranscriptionHandler

    handlers: dict[str, Any] = {"transcription_handler": TranscriptionHandler(models, state)}
    if importlib.util.find_spec("transformers.cli.serving.systemone") is not None:
        from transformers.cli.serving.systemone import SystemOneHandler

        handlers["systemone_handler"] = SystemOneHandler(models, state)
    return handlers
