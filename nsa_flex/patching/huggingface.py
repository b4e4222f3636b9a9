"""Decoders of transformers 5: NSA behind the library's own attention interface.

A patched decoder has `nsa_flex` as its attention implementation. Each of its attention modules
then calls `attention_forward` with queries, keys and values after position embedding and cache
update. What that call lacks arrives by two forward pre-hooks, through the keyword arguments that
decoders hand down to their attention: the layer's input (for the gates), and the padding, packed
documents and cached keys of the call, read from what the caller of the decoder passed, before
transformers turns it into a mask. Attention modules that stay unpatched get the implementation
that the model had before, and its masks.

Checked against transformers 5.17 and 5.23.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from nsa_flex.config import NSAConfig
from nsa_flex.documents import align_packed, align_positions
from nsa_flex.patching.layer import AttentionShape
from nsa_flex.patching.rows import Rows, packed_rows, padded_rows

IMPLEMENTATION = "nsa_flex"

# Attention modules of transformers share attributes, not a type.
Attention: TypeAlias = Any
# A PreTrainedModel, whose attributes type checkers know no better.
Decoder: TypeAlias = Any

# Keyword arguments of attention functions that ask for more than softmax(scale * q k) v.
_REFUSED_ARGUMENTS = {
    "softcap": "logit soft-capping (softcap)",
    "s_aux": "attention sinks (s_aux)",
    "sinks": "attention sinks (sinks)",
    "position_bias": "a position bias (position_bias)",
    "cache": "continuous batching (a paged cache)",
}


# --- which modules -----------------------------------------------------------------------------


def is_attention(module: nn.Module) -> bool:
    """Whether `module` looks like the self-attention of a decoder layer."""
    is_attention = type(module).__name__.endswith("Attention")
    return is_attention and hasattr(module, "layer_idx") and hasattr(module, "config")


def decoder_of(model: nn.Module, name: str) -> Decoder:
    """The innermost transformers model that holds the module called `name`."""
    while name:
        name = name.rpartition(".")[0]
        owner = model.get_submodule(name)
        if isinstance(owner, PreTrainedModel):
            return owner
    return None


def local_attention(module: Attention) -> str | None:
    """How the config limits this layer's context, or None if it sees all of it.

    A window at least as long as the context the model was made for is no limit.
    """
    config = module.config
    layer_types = getattr(config, "layer_types", None)
    kind = layer_types[module.layer_idx] if layer_types else "full_attention"
    window = getattr(module, "sliding_window", None)
    if kind == "full_attention" and window is None and not layer_types:
        window = getattr(config, "sliding_window", None)
    if kind not in ("full_attention", "sliding_attention"):
        return f"layer type {kind}"
    if kind == "sliding_attention" and window is None:
        window = getattr(config, "sliding_window", None)
    if window is None or window >= getattr(config, "max_position_embeddings", float("inf")):
        return None
    return f"sliding_window={window}"


def attention_shape(module: Attention, decoder: Decoder) -> AttentionShape:
    """Sizes of a transformers attention module.

    Raises:
        ValueError: the module computes something that NSA cannot stand in for; the message names
            the feature.
    """
    feature = _unsupported_feature(module, decoder)
    if feature is not None:
        raise ValueError(
            f"{type(module).__name__} has {feature}, which NSA does not compute: leave such "
            "layers out with filter_fn"
        )
    config = module.config
    heads, dim = config.num_attention_heads, getattr(module, "head_dim", 0)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    expected, found = _projection_widths(module, heads * dim, kv_heads * dim)
    if expected != found or dim == 0:
        raise ValueError(
            f"{type(module).__name__} has projections {found}, expected {expected} for "
            f"{heads} query heads, {kv_heads} key-value heads and head_dim {dim}: register an "
            "adapter for it (nsa_flex.register_adapter)"
        )
    first = getattr(module, next(iter(expected)))
    return AttentionShape(first.in_features, heads, kv_heads, dim)


def _projection_widths(
    module: Attention, query: int, key: int
) -> tuple[dict[str, int], dict[str, int | None]]:
    expected = {"q_proj": query, "k_proj": key, "v_proj": key}
    if hasattr(module, "qkv_proj"):
        expected = {"qkv_proj": query + 2 * key}
    found = {name: getattr(getattr(module, name, None), "out_features", None) for name in expected}
    return expected, found


def _unsupported_feature(module: Attention, decoder: Decoder) -> str | None:
    config = module.config
    softcap = getattr(config, "attn_logit_softcapping", None)
    if softcap is not None:
        return f"logit soft-capping (attn_logit_softcapping={softcap})"
    if getattr(module, "sinks", None) is not None:
        return "attention sinks (sinks)"
    if not getattr(module, "is_causal", True) or not getattr(config, "is_causal", True):
        return "bidirectional attention (is_causal=False)"
    if getattr(config, "is_encoder_decoder", False):
        return "an encoder beside it (is_encoder_decoder=True)"
    if decoder is None or not _hands_down_arguments(module, decoder):
        return "a way to attention other than transformers' attention interface"
    if config is not decoder.config:
        return "a config other than its decoder's"
    return None


def _hands_down_arguments(module: Attention, decoder: Decoder) -> bool:
    """Whether what the hooks add reaches the attention function."""
    wanted = {"attention_mask", "position_ids", "past_key_values"}
    return (
        getattr(decoder, "_supports_attention_backend", False)
        and wanted <= set(inspect.signature(decoder.forward).parameters)
        and all(_takes_any_argument(part) for part in (decoder, module))
    )


def _takes_any_argument(module: Attention) -> bool:
    parameters = inspect.signature(module.forward).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


# --- installing --------------------------------------------------------------------------------


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
        layer_idx=modules[0].layer_idx,
        config=layer.config,
        keeps_masks=bool(kept),
    )
    decoder.nsa_hook = decoder.register_forward_pre_hook(hook, with_kwargs=True)
    config.nsa_flex = {
        "config": layer.config.to_dict(),
        "init": layer.init,
        "backend": layer.backend,
        "layers": [name for name, module in decoder.named_modules() if module in modules],
        "attn_implementation": config._attn_implementation,
        "kept_masks": kept,
    }
    config._attn_implementation_internal = IMPLEMENTATION


def remove(decoder: Decoder, modules: list[Attention]) -> None:
    """Undo `install`."""
    for module in modules:
        module.nsa.hook.remove()
    decoder.nsa_hook.remove()
    del decoder.nsa_hook
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


# --- running -----------------------------------------------------------------------------------


def _pass_hidden_states(
    module: Attention, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    hidden_states = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    return args, {**kwargs, "nsa_hidden_states": hidden_states}


@dataclass(frozen=True)
class RowsHook:
    """Forward pre-hook of a decoder: reads padding, documents and cache from the call.

    Of its own it takes `nsa_max_documents`, the bound on packed documents of `align_positions`.

    Args:
        arguments: names of the decoder's parameters in order.
        layer_idx: first patched layer, whose cache tells how many tokens came before.
        config: for the block size that documents are aligned to.
        keeps_masks: whether some attention modules stay unpatched.
    """

    arguments: tuple[str, ...]
    layer_idx: int
    config: NSAConfig
    keeps_masks: bool

    def __call__(
        self, decoder: Decoder, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        call = {**dict(zip(self.arguments, args, strict=False)), **kwargs}
        if call.get("output_attentions") or getattr(decoder.config, "output_attentions", False):
            raise ValueError(
                "output_attentions=True is not supported: NSA never forms attention weights; "
                "unpatch the model to look at them"
            )
        max_documents = call.pop("nsa_max_documents", None)
        call["nsa_rows"] = self._rows(decoder, call, max_documents)
        if self._would_search_documents(decoder, call):
            # Documents are known by now. Without a mask transformers would look for them itself,
            # which reads position_ids on the host.
            tokens = _tokens(call)
            call["attention_mask"] = torch.ones(
                tokens.shape[:2], dtype=torch.bool, device=tokens.device
            )
        return (), call

    def _rows(self, decoder: Decoder, call: dict[str, Any], max_documents: int | None) -> Rows:
        batch, length = _tokens(call).shape[:2]
        mask = _padding_mask(call.get("attention_mask"))
        num_keys, cached = self._cache_sizes(decoder, call, length)
        if mask is not None:
            return padded_rows(_fit(mask, num_keys, cached, length), length, cached)
        cu_seqlens, position_ids = call.get("cu_seq_lens_q"), call.get("position_ids")
        uses_cache = _uses_cache(decoder, call)
        if cu_seqlens is not None:
            self._check_packed(call, batch, uses_cache)
            return packed_rows(align_packed(cu_seqlens, length, self.config))
        if position_ids is None or length == 1:
            return _unpadded_rows(batch, num_keys, cached, length)
        if uses_cache:
            _assert_one_document(position_ids)
            return _unpadded_rows(batch, num_keys, cached, length)
        if position_ids.dim() != 2:
            raise ValueError(
                f"position_ids has shape {tuple(position_ids.shape)}; without attention_mask "
                "expected (batch, tokens)"
            )
        position_ids = position_ids.expand(batch, length)
        return packed_rows(align_positions(position_ids, self.config, max_documents))

    def _cache_sizes(
        self, decoder: Decoder, call: dict[str, Any], length: int
    ) -> tuple[int, int | Tensor]:
        """How many keys attention will get, and the index of the first new one."""
        cache = call.get("past_key_values")
        if cache is None:
            return length, 0
        if not hasattr(cache, "get_mask_sizes") or hasattr(cache, "self_attention_cache"):
            raise ValueError(
                f"past_key_values is a {type(cache).__name__}; NSA runs with DynamicCache and "
                "StaticCache"
            )
        if _is_checkpointing(decoder):
            raise ValueError("past_key_values with gradient checkpointing: leave the cache out")
        num_keys, _ = cache.get_mask_sizes(length, self.layer_idx)
        return num_keys, cache.get_seq_length(self.layer_idx)

    def _check_packed(self, call: dict[str, Any], batch: int, uses_cache: bool) -> None:
        keys = call.get("cu_seq_lens_k")
        if uses_cache:
            raise ValueError("cu_seq_lens_q with a cache is not supported: pass use_cache=False")
        if batch != 1:
            raise ValueError(f"cu_seq_lens_q describes one row of tokens, got a batch of {batch}")
        if keys is not None and keys.shape != call["cu_seq_lens_q"].shape:
            raise ValueError("cu_seq_lens_k differs from cu_seq_lens_q; expected self-attention")
        if self.keeps_masks and call.get("position_ids") is None:
            raise ValueError(
                "cu_seq_lens_q without position_ids: the unpatched attention layers would mix "
                "the documents; pass position_ids that restart at each of them too"
            )

    def _would_search_documents(self, decoder: Decoder, call: dict[str, Any]) -> bool:
        no_mask = call.get("attention_mask") is None
        return no_mask and not self.keeps_masks and not _uses_cache(decoder, call)


def _tokens(call: dict[str, Any]) -> Tensor:
    embeds = call.get("inputs_embeds")
    tokens = call.get("input_ids") if embeds is None else embeds
    if tokens is None:
        raise ValueError("pass one of input_ids and inputs_embeds")
    return tokens


def _uses_cache(decoder: Decoder, call: dict[str, Any]) -> bool:
    if call.get("past_key_values") is not None:
        return True
    if _is_checkpointing(decoder):
        return False
    use_cache = call.get("use_cache")
    return bool(getattr(decoder.config, "use_cache", False) if use_cache is None else use_cache)


def _assert_one_document(position_ids: Tensor) -> None:
    """With a cache, position_ids are plain positions (`generate` passes them): check just that.

    An assertion on the device, which the host does not wait for.
    """
    torch._assert_async(
        (position_ids.diff(dim=-1) == 1).all(),
        "position_ids restart, as those of packed documents do, but a cache cannot tell documents "
        "apart: pass use_cache=False",
    )


def _is_checkpointing(decoder: Decoder) -> bool:
    return decoder.training and getattr(decoder, "gradient_checkpointing", False)


def _fit(mask: Tensor, num_keys: int, cached: int | Tensor, length: int) -> Tensor:
    """The padding mask, filled up over the places that a static cache has yet to use."""
    is_static = isinstance(cached, Tensor) or num_keys > cached + length
    if mask.shape[1] == num_keys:
        return mask
    if mask.shape[1] > num_keys or not is_static:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}; expected one entry for each cached "
            f"and each new token, {num_keys} a row"
        )
    return torch.nn.functional.pad(mask, (0, num_keys - mask.shape[1]))


def _unpadded_rows(batch: int, num_keys: int, cached: int | Tensor, length: int) -> Rows:
    if isinstance(cached, Tensor):
        # A static cache counts in a tensor that it changes in place: take a copy.
        return Rows(query_offset=cached.repeat(batch))
    return Rows(query_offset=None if cached + length == num_keys else cached)


def _padding_mask(mask: Any) -> Tensor | None:
    """The 2-D mask among what callers (and `generate`, ahead of a static cache) pass."""
    if isinstance(mask, dict):
        mask = mask.get("full_attention")
    if mask is None or (isinstance(mask, Tensor) and mask.dim() == 2):
        return mask
    shape = tuple(getattr(mask, "shape", ()))
    raise ValueError(
        f"attention_mask has shape {shape}; expected a padding mask (batch, tokens). NSA chooses "
        "what each query attends: custom masks are not supported, nor is a static cache while "
        "filter_fn leaves full-attention layers unpatched"
    )


def attention_forward(
    module: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    nsa_hidden_states: Tensor | None = None,
    nsa_rows: Rows | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers' attention modules call: query (B, Hq, Sq, D), key (B, Hkv, Sk, D).

    Returns:
        (B, Sq, Hq, Dv), and None in the place of attention weights.

    Raises:
        ValueError: the call asks for dropout, soft-capping, sinks or another thing that NSA does
            not compute.
    """
    layer = getattr(module, "nsa", None)
    if layer is None:
        attend = _former_attention(module)
        return attend(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    _refuse(dropout, kwargs)
    if nsa_hidden_states is None or nsa_rows is None:
        raise RuntimeError(
            f"{type(module).__name__} was not told of padding and packed documents: it was called "
            "outside its decoder, or its decoder layer does not hand keyword arguments down; call "
            "the decoder, or unpatch the model"
        )
    output = layer(nsa_hidden_states, query, key, value, scale=scaling, rows=nsa_rows)
    return output.transpose(1, 2), None


def _refuse(dropout: float, kwargs: dict[str, Any]) -> None:
    if dropout:
        raise ValueError(
            f"attention dropout is not supported, got {dropout}: set attention_dropout of the "
            "attention modules (and of the config) to 0, or call model.eval()"
        )
    if kwargs.get("is_causal") is False:
        raise ValueError("is_causal=False is not supported: NSA is causal attention")
    for name, feature in _REFUSED_ARGUMENTS.items():
        if kwargs.get(name) is not None:
            raise ValueError(f"{feature} is not something that NSA computes")


def _former_attention(module: Attention) -> Callable[..., tuple[Tensor, Tensor | None]]:
    eager = sys.modules[type(module).__module__].eager_attention_forward
    name = module.config.nsa_flex["attn_implementation"]
    return eager if name == "eager" else ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)


def mask_for_attention(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """What transformers makes masks with while the attention implementation is `nsa_flex`.

    Unpatched layers get the mask of the implementation that they run. Patched layers need none:
    the padding mask goes through as it is, so that masks which `generate` prepares ahead of a
    static cache still tell the padding.
    """
    record = kwargs["config"].nsa_flex
    if ("full" if kwargs.get("local_size") is None else "local") in record["kept_masks"]:
        former = ALL_MASK_ATTENTION_FUNCTIONS[record["attn_implementation"]]
        return former(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            **kwargs,
        )
    if kwargs.get("use_vmap") or getattr(mask_function, "__name__", "") == "or_mask":
        raise ValueError(
            "a custom mask function (bidirectional image or prefix tokens, for example) is not "
            "supported: NSA is causal attention"
        )
    if attention_mask is not None and attention_mask.shape[1] < kv_length:
        missing = kv_length - attention_mask.shape[1]
        attention_mask = torch.nn.functional.pad(attention_mask, (0, missing))
    return attention_mask


AttentionInterface.register(IMPLEMENTATION, attention_forward)
AttentionMaskInterface.register(IMPLEMENTATION, mask_for_attention)
