"""What the caller of a patched transformers decoder passed: padding, documents, cache.

Read before transformers turns it into a mask, from shapes alone, and handed down to attention as
the keyword argument `nsa_call`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nsa_flex.cache.layer import LayerCache, advance
from nsa_flex.config import NSAConfig
from nsa_flex.documents import align_packed, align_positions
from nsa_flex.patching.hf_attention import check_parallelism
from nsa_flex.patching.hf_cache import adopt, holds_nsa, layers_in_use, num_layers
from nsa_flex.patching.hf_config import KeptLayers
from nsa_flex.patching.hf_edited import PatchedLayers
from nsa_flex.patching.hf_generation import read_paged_call
from nsa_flex.patching.hf_head_shards import head_shards_of, whole_rows
from nsa_flex.patching.hf_layers import (
    IMPLEMENTATIONS,
    Attention,
    Decoder,
    refuse_attention_weights,
)
from nsa_flex.patching.hf_refusals import refuse_unknown_bounds
from nsa_flex.patching.hf_shards import shard_rows, shards_of, take_sharded_cache
from nsa_flex.patching.hf_tokens import (
    assert_cached_positions,
    assert_padded_positions,
    assert_positions,
    expect,
    new_positions,
    next_positions,
    real_past,
)
from nsa_flex.patching.hf_versions import cache_of, is_checkpointing
from nsa_flex.patching.rows import CallContext, Rows, packed_rows, padded_rows

_CACHED_DOCUMENTS = "a cache cannot tell documents apart: pass use_cache=False"


@dataclass(frozen=True)
class CallHook:
    """Forward pre-hook of a decoder: reads padding, documents and cache from the call.

    Of its own it takes `nsa_max_documents`, the bound on packed documents of `align_positions`.

    Args:
        arguments: names of the decoder's parameters in order.
        patched: the patched attention modules; the first one's layer of the cache tells how many
            tokens came before.
        config: for the block size that documents are aligned to.
        kept_masks: kinds of mask, "full" and "local", that unpatched attention modules read.
        mixing: why a row can hold but one document (`mixing_of_documents`), or None.
        kept: the unpatched attention modules, if there are some.
        rotates: whether positions rotate keys, and count from any start as well.
    """

    arguments: tuple[str, ...]
    patched: PatchedLayers
    config: NSAConfig
    kept_masks: tuple[str, ...]
    mixing: str | None
    kept: KeptLayers | None
    rotates: bool

    @property
    def modules(self) -> tuple[Attention, ...]:
        """The patched attention modules."""
        return self.patched.modules

    def __call__(
        self, decoder: Decoder, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        call = {**dict(zip(self.arguments, args, strict=False)), **kwargs} if args else {**kwargs}
        config = decoder.config
        if not torch.compiler.is_compiling():
            self.patched.look(decoder)
        if self.kept is not None:
            self.kept.follow(config._attn_implementation)
        if config._attn_implementation not in IMPLEMENTATIONS:
            self._refuse_nsa_cache(call)
            return args, kwargs  # switched by set_attn_implementation, for a while
        head_shards = head_shards_of(self.modules[0])
        check_parallelism(config._attn_implementation, head_shards, training=decoder.training)
        refuse_attention_weights(config, call)
        refuse_unknown_bounds(call)
        max_documents = call.pop("nsa_max_documents", None)
        # Without `_replace`: torch 2.11 cannot return what that makes from a graph of this hook.
        told: dict[str, Any] = {"passed": tuple(call), "full_masks": "full" in self.kept_masks}
        shards = shards_of(self.modules[0])
        if shards is not None:
            told["sharded"] = take_sharded_cache(call, _tokens(call))
            told["rows"] = shard_rows(call, _tokens(call), shards, self.config, told["sharded"])
            call["nsa_call"] = CallContext(**told)
            return (), _with_plain_mask(call)
        if head_shards is not None and head_shards.hold(training=decoder.training):
            read = functools.partial(self._rows, decoder, max_documents=max_documents)
            told["rows"] = whole_rows(call, _tokens(call), head_shards, read)
            call["nsa_call"] = CallContext(**told)
            return (), _with_plain_mask(call)
        paged = read_paged_call(call)
        if paged is not None:
            self.patched.check_places(num_layers(config))
            call["nsa_call"] = CallContext(paged=paged, **told)
            return (), _with_plain_mask(call)
        caches = self._caches(decoder, call)
        if caches:
            self._expect(caches, call)
            call["nsa_call"] = CallContext(cache=cache_of(call), **told)
            return (), call
        call["nsa_call"] = CallContext(rows=self._rows(decoder, call, max_documents), **told)
        if self._would_search_documents(decoder, call):
            return (), _with_plain_mask(call)
        return (), call

    def _refuse_nsa_cache(self, call: dict[str, Any]) -> None:
        cache = cache_of(call)
        if cache is not None and holds_nsa(cache, self.modules[0].layer_idx):
            raise ValueError(
                "the cache holds NSA's layers, and the attention implementation is another now: "
                "start with a new cache"
            )

    def _caches(self, decoder: Decoder, call: dict[str, Any]) -> list[LayerCache]:
        """NSA's layers of the cache that came, exchanged for transformers' if need be."""
        cache, limit = cache_of(call), layers_in_use(decoder)
        modules = [module for module in self.modules if module.layer_idx < limit]
        if cache is None or not modules:
            return []
        if not hasattr(cache, "get_mask_sizes") or hasattr(cache, "self_attention_cache"):
            raise ValueError(
                f"the cache is a {type(cache).__name__}; NSA runs with DynamicCache, StaticCache "
                "and NSACache"
            )
        # The flag, since is_exporting() is True under any torch.compile of torch 2.11.
        if torch.compiler._is_exporting_flag and not torch.is_grad_enabled():
            raise ValueError(
                "exporting (torch.export) a call with a cache is not supported: the exported "
                "program would lose what NSA adds to the cache; compile the model with "
                "torch.compile, or export it with use_cache=False"
            )
        if is_checkpointing(decoder):
            raise ValueError("a cache with gradient checkpointing: leave the cache out")
        self.patched.check_places(num_layers(decoder.config))
        if not holds_nsa(cache, modules[0].layer_idx):
            if torch.is_grad_enabled():
                return []  # keys and values as they are: gradients flow through them
            if torch.compiler.is_compiling() and not cache.is_compileable:
                return []
            self._adopt(cache, decoder, self._mask(call))
        layers = cache.layers
        held = [m for m in modules if holds_nsa(cache, m.layer_idx)]  # others were taken out
        if not torch.compiler.is_compiling():
            for module in held:
                _use_phi(module, layers[module.layer_idx])
        return [layers[module.layer_idx] for module in held]

    @torch.compiler.disable(
        reason="it makes NSA's static cache: pass an nsa_flex.NSACache, or call the model once "
        "before it is compiled"
    )
    def _adopt(self, cache: Any, decoder: Decoder, mask: Tensor | None) -> None:
        adopt(cache, decoder, real_past(mask, int(cache.get_seq_length())))

    def _mask(self, call: dict[str, Any]) -> Tensor | None:
        """The padding mask, or what transformers made of it for layers left unpatched."""
        mask = call.get("attention_mask")
        if isinstance(mask, dict):
            mask = mask.get("full_attention")
        prepared = self.kept_masks and isinstance(mask, Tensor) and mask.dim() == 4
        return mask if prepared else _padding_mask(mask)

    def _expect(self, caches: list[LayerCache], call: dict[str, Any]) -> None:
        """Tell NSA's layers what comes, or raise before any of them changed."""
        tokens, position_ids = _tokens(call), _document_positions(call)
        if call.get("cu_seq_lens_q") is not None:
            raise ValueError("cu_seq_lens_q with a cache is not supported: pass use_cache=False")
        mask = self._mask(call)
        expect(caches, tokens, mask)
        if self._counts_padding(call) and not (mask is None and caches[0].columns.even):
            call["position_ids"] = next_positions(caches[0], tokens, mask)
        elif position_ids is not None:
            assert_cached_positions(call, position_ids, caches[0], tokens, mask)
        if mask is None and position_ids is not None and tokens.shape[1] > 1:
            _assert_one_document(position_ids, _CACHED_DOCUMENTS)

    def _rows(self, decoder: Decoder, call: dict[str, Any], max_documents: int | None) -> Rows:
        """Rows without a cache of NSA's, by what tells their tokens apart."""
        mask = _padding_mask(call.get("attention_mask"))
        if call.get("cu_seq_lens_q") is not None:
            return self._rows_of_bounds(decoder, call, mask)
        if mask is not None:
            return self._rows_of_mask(call, mask)
        return self._rows_of_positions(decoder, call, max_documents)

    def _rows_of_bounds(self, decoder: Decoder, call: dict[str, Any], mask: Tensor | None) -> Rows:
        """One row of packed documents, whose bounds `cu_seq_lens_q` are."""
        batch, length = _tokens(call).shape[:2]
        self._check_packed(call, batch, _uses_cache(decoder, call))
        if mask is not None:
            _assert_no_padding(mask, length)
        if mask is call.get("attention_mask"):  # unpatched layers' mask knows documents then
            call["attention_mask"] = None
        layout = align_packed(call["cu_seq_lens_q"], length, self.config, _longest(call))
        position_ids = _document_positions(call)
        if call.get("position_ids") is None:  # the decoder would count on from one to the next
            self._check_masks_to_come(call)
            call["position_ids"] = layout.positions
        elif position_ids is not None:
            assert_positions(call, position_ids)
            _assert_restart(position_ids, layout.positions)
        return packed_rows(layout)

    def _rows_of_mask(self, call: dict[str, Any], mask: Tensor) -> Rows:
        """Rows with padding."""
        batch, length = _tokens(call).shape[:2]
        num_keys, cached = self._cache_sizes(call, length)
        mask = _fit(mask, batch, num_keys, cached, length)
        position_ids = _document_positions(call)
        if self._counts_padding(call):
            call["position_ids"] = new_positions(mask, cached, length)
        elif position_ids is not None:
            assert_padded_positions(call, position_ids, mask, cached, length)
        return padded_rows(mask, length, cached)

    def _rows_of_positions(
        self, decoder: Decoder, call: dict[str, Any], max_documents: int | None
    ) -> Rows:
        """Rows of one document, or of packed ones, at each of which `position_ids` restart.

        Without positions, rows of one document.
        """
        batch, length = _tokens(call).shape[:2]
        num_keys, cached = self._cache_sizes(call, length)
        position_ids = _document_positions(call)
        if position_ids is None:
            return _unpadded_rows(batch, num_keys, cached, length)
        one_document = _CACHED_DOCUMENTS if _uses_cache(decoder, call) else self.mixing
        if one_document is not None or length == 1:
            assert_positions(call, position_ids, cached)
            if one_document is not None:
                _assert_one_document(position_ids, one_document)
            return _unpadded_rows(batch, num_keys, cached, length)
        if position_ids.dim() != 2:
            raise ValueError(
                f"position_ids has shape {tuple(position_ids.shape)}; without attention_mask "
                "expected (batch, tokens)"
            )
        position_ids = position_ids.expand(batch, length)
        layout = align_positions(
            position_ids, self.config, max_documents, bound_name="nsa_max_documents"
        )
        return packed_rows(layout)

    def _counts_padding(self, call: dict[str, Any]) -> bool:
        """Whether the decoder would count padding among the positions.

        Attention to rotated keys is the same from any start. Compressed ones are not, once φ is
        more than a mean.
        """
        takes_positions = "position_ids" in self.arguments
        return self.rotates and takes_positions and call.get("position_ids") is None

    def _cache_sizes(self, call: dict[str, Any], length: int) -> tuple[int, int | Tensor]:
        """How many keys attention will get, and the index of the first new one."""
        cache, layer_idx = cache_of(call), self.modules[0].layer_idx
        if cache is None:
            return length, 0
        num_keys, _ = cache.get_mask_sizes(length, layer_idx)
        return num_keys, cache.get_seq_length(layer_idx)

    def _check_packed(self, call: dict[str, Any], batch: int, uses_cache: bool) -> None:
        keys = call.get("cu_seq_lens_k")
        if self.mixing is not None:
            raise ValueError(f"cu_seq_lens_q is not supported here: {self.mixing}")
        if uses_cache:
            raise ValueError("cu_seq_lens_q with a cache is not supported: pass use_cache=False")
        if batch != 1:
            raise ValueError(f"cu_seq_lens_q describes one row of tokens, got a batch of {batch}")
        queries, differs = call["cu_seq_lens_q"], "cu_seq_lens_k differs from cu_seq_lens_q"
        if keys is None or keys is queries:
            return
        if keys.shape != queries.shape:
            raise ValueError(f"{differs}; expected self-attention")
        torch._assert_async((keys == queries).all(), differs)

    def _check_masks_to_come(self, call: dict[str, Any]) -> None:
        if self.kept_masks and call.get("attention_mask") is not None:
            raise ValueError(
                "cu_seq_lens_q without position_ids: the model around the decoder made the masks "
                "of its unpatched attention layers already, for one document; pass position_ids "
                "that restart at each document too"
            )

    def _would_search_documents(self, decoder: Decoder, call: dict[str, Any]) -> bool:
        no_mask = call.get("attention_mask") is None
        return no_mask and not self.kept_masks and not _uses_cache(decoder, call)


def count_tokens(
    decoder: Decoder, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    """Forward hook of a decoder: what its layers stored counts from now on.

    After the last of them, so that a call that fails on the way leaves the cache as it was.
    """
    context = kwargs.get("nsa_call")
    if context is None or context.cache is None:
        return
    layers = [layer for layer in context.cache.layers if isinstance(layer, LayerCache)]
    layers = [layer for layer in layers if layer.handed_out is not None]  # those that ran
    incoming = layers[0].incoming
    assert incoming is not None
    advance(layers, incoming)


def _tokens(call: dict[str, Any]) -> Tensor:
    embeds = call.get("inputs_embeds")
    tokens = call.get("input_ids") if embeds is None else embeds
    if tokens is None:
        raise ValueError("pass one of input_ids and inputs_embeds")
    return tokens


def _with_plain_mask(call: dict[str, Any]) -> dict[str, Any]:
    """A call whose documents are known, with a padding mask of ones.

    Without a mask transformers would look for documents itself, which reads position_ids on the
    host.
    """
    tokens = _tokens(call)
    mask = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    return {**call, "attention_mask": mask}


def _document_positions(call: dict[str, Any]) -> Tensor | None:
    """Positions (B, S) that restart at each packed document; None if a row can hold but one.

    Multimodal decoders take one position a token for each axis of a rotary embedding (3, B, S),
    which tells no documents apart, or these behind the plain ones (4, B, S).
    """
    position_ids = call.get("position_ids")
    if position_ids is None or position_ids.dim() != 3:
        return position_ids
    return position_ids[0] if position_ids.shape[0] == 4 else None


def _uses_cache(decoder: Decoder, call: dict[str, Any]) -> bool:
    if cache_of(call) is not None:
        return True
    if is_checkpointing(decoder):
        return False
    use_cache = call.get("use_cache")
    return bool(getattr(decoder.config, "use_cache", False) if use_cache is None else use_cache)


def _assert_one_document(position_ids: Tensor, reason: str) -> None:
    """That position_ids are plain positions, as `generate` passes them.

    An assertion on the device, which the host does not wait for.
    """
    torch._assert_async(
        (position_ids.diff(dim=-1) == 1).all(),
        f"position_ids restart, as those of packed documents do, but {reason}",
    )


def _assert_restart(position_ids: Tensor, positions: Tensor) -> None:
    """That position_ids do not count on from one document to the next; likewise.

    Args:
        positions: of each token in its own document (1, S).
    """
    goes_on, begins = position_ids.diff(dim=-1) == 1, positions[:, 1:] == 0
    torch._assert_async(
        (~(goes_on & begins)).all(),
        "position_ids count on where a document of cu_seq_lens_q begins: pass position_ids that "
        "restart at each document (some models make plain ones where none are passed)",
    )


def _use_phi(module: Attention, layer: LayerCache) -> None:
    """That a layer of the cache compresses with the φ of `module` that is in force."""
    nsa = module._modules["nsa"]
    assert nsa is not None
    own = nsa._modules  # read past `__getattr__`, at every step
    used = (layer.compress_key, layer.compress_value)
    if (own.get("compress_key"), own.get("compress_value")) != used:
        layer.use_phi(module.nsa.compress_key, module.nsa.compress_value)


def _fit(mask: Tensor, batch: int, num_keys: int, cached: int | Tensor, length: int) -> Tensor:
    """The padding mask of all rows, filled up over what a static cache has yet to use."""
    if mask.shape[0] not in (1, batch):
        raise ValueError(f"attention_mask has {mask.shape[0]} rows, and the call {batch}")
    mask = mask.expand(batch, -1)  # one row is that of all
    is_static = isinstance(cached, Tensor) or num_keys > cached + length
    if mask.shape[1] == num_keys:
        return mask
    if mask.shape[1] > num_keys or not is_static:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}; expected one entry for each cached "
            f"and each new token, {num_keys} a row"
        )
    return torch.nn.functional.pad(mask, (0, num_keys - mask.shape[1]))


def _assert_no_padding(mask: Tensor, length: int) -> None:
    """That a mask beside packed documents hides nothing, as a tokenizer's does; likewise."""
    if mask.shape != (1, length):
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}; expected {(1, length)}, ones alone, "
            "beside cu_seq_lens_q"
        )
    torch._assert_async(
        (mask != 0).all(), "attention_mask hides tokens of a row whose documents are packed"
    )


def _longest(call: dict[str, Any]) -> int | None:
    """Tokens of the longest document, if the caller says: reading a tensor would wait for it."""
    longest = call.get("max_length_q")
    return longest if isinstance(longest, int) and longest > 0 else None


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
        "what each query attends: custom masks are not supported"
    )
