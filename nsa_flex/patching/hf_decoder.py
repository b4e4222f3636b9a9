"""Decoders of transformers 5, patched behind the library's own attention interface.

The attention modules of a patched decoder call `hf_attention.attention_forward` with queries,
keys and values after position embedding and cache update. What that call lacks comes by forward
pre-hooks, in the keyword arguments that decoders hand down to their attention: the layer's input,
for the gates, and what the caller of the decoder said of padding, documents and cache
(`hf_calls.RowsHook`). Attention modules that stay unpatched get the implementation that the
decoder had before, and its masks.

Checked against transformers 5.17 and 5.23.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from nsa_flex.patching import hf_attention, hf_init  # noqa: F401 -- registers the implementation
from nsa_flex.patching.hf_calls import RowsHook, count_tokens
from nsa_flex.patching.hf_layers import (
    IMPLEMENTATION,
    Attention,
    Decoder,
    is_attention,
    is_recurrent,
    local_attention,
)


def install(decoder: Decoder, modules: list[Attention]) -> None:
    """Route attention `modules` of `decoder`, which have their `nsa`, through NSA.

    The decoder's config gets a record of it, plain JSON, which `save_pretrained` writes.
    """
    config, layer = decoder.config, modules[0].nsa
    kept = kept_masks(decoder, set(modules))
    for module in modules:
        module.nsa.hook = module.register_forward_pre_hook(_pass_hidden_states, with_kwargs=True)
    hook = RowsHook(
        arguments=tuple(inspect.signature(decoder.forward).parameters),
        layer_indices=tuple(module.layer_idx for module in modules),
        config=layer.config,
        keeps_masks=bool(kept),
        recurrent=is_recurrent(decoder),
    )
    decoder.nsa_hook = decoder.register_forward_pre_hook(hook, with_kwargs=True)
    decoder.nsa_after = decoder.register_forward_hook(count_tokens, with_kwargs=True)
    config.nsa_flex = {
        "config": layer.config.to_dict(),
        "init": layer.init,
        "backend": layer.backend,
        "layers": [name for name, module in decoder.named_modules() if module in modules],
        "attn_implementation": config._attn_implementation,
        "kept_masks": kept,
    }
    config._attn_implementation_internal = IMPLEMENTATION
    hf_init.install(decoder)


def remove(decoder: Decoder, modules: list[Attention]) -> None:
    """Undo `install`."""
    hf_init.remove(decoder)
    for module in modules:
        module.nsa.hook.remove()
    decoder.nsa_hook.remove()
    decoder.nsa_after.remove()
    del decoder.nsa_hook, decoder.nsa_after
    decoder.config._attn_implementation_internal = decoder.config.nsa_flex["attn_implementation"]
    del decoder.config.nsa_flex


def kept_masks(decoder: Decoder, patched: set[nn.Module]) -> list[str]:
    """Kinds of mask, of "full" and "local", that the unpatched attention modules read."""
    kinds = {
        "full" if local_attention(module) is None else "local"
        for module in decoder.modules()
        if is_attention(module) and module not in patched
    }
    return sorted(kinds)


def check_decoder(decoder: Decoder, patched: set[nn.Module]) -> None:
    """ValueError if the unpatched attention modules of `decoder` could not run beside NSA."""
    implementation = decoder.config._attn_implementation
    if not kept_masks(decoder, patched) or implementation in ("eager", "sdpa"):
        return
    raise ValueError(
        f"some attention layers stay unpatched, and {implementation!r} cannot run beside NSA: "
        "call model.set_attn_implementation('sdpa') before patch"
    )


def _pass_hidden_states(
    module: Attention, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    hidden_states = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    return args, {**kwargs, "nsa_hidden_states": hidden_states}
