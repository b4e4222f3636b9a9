"""Which of the tokens that a call brings to a cache are real."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_flex.cache.incoming import IncomingBatch, incoming_batch
from nsa_flex.cache.layer import LayerCache
from nsa_flex.documents import real_positions


def expect(caches: list[LayerCache], tokens: Tensor, mask: Tensor | None) -> None:
    """Tell every layer what the call brings.

    Args:
        caches: NSA's layers, which hold the same tokens.
        tokens: (B, T, ...), ids or embeddings.
        mask: (B, tokens so far and T, or C), nonzero at real tokens; or what transformers made of
            that for layers that stay as they are, (B or 1, 1, T, keys), boolean or additive.

    Raises:
        ValueError: the batch or the mask does not fit, or there is no room. No layer changed.
    """
    batch, num_tokens = tokens.shape[:2]
    first = caches[0]
    if first.is_initialized and batch != first.batch_size:
        raise ValueError(
            f"the call brings {batch} rows, the cache holds {first.batch_size}: use a new cache, "
            "or batch_select_indices or batch_repeat_interleave"
        )
    first.columns.check_room(num_tokens)  # all of them have the same
    incoming = IncomingBatch(num_tokens)
    if mask is not None:
        _check_width(mask, first, num_tokens)
        incoming = incoming_batch(new_tokens(mask, first, num_tokens).expand(batch, num_tokens))
        if first.is_initialized and not torch.compiler.is_compiling():
            _assert_same_past(mask, first, num_tokens)
    may_complete = None
    if first.is_initialized and not torch.compiler.is_compiling():
        may_complete = first.may_complete(first.known_length, num_tokens)
    if mask is not None and not torch.compiler.is_compiling():
        # A copy: the caller may go on in the same memory.
        incoming = IncomingBatch(*incoming[:3], _of_columns(mask).clone())
    for cache in caches:
        cache.columns.agree(first.columns)  # where compiled steps ran, the first asked the device
        known = may_complete is not None and _completes_alike(cache, first)
        cache.begin(incoming, may_complete if known else None)


def next_positions(cache: LayerCache, tokens: Tensor, mask: Tensor | None) -> Tensor:
    """Position (B, T) of each new token in its row, which padding has no part in.

    Args: as of `expect`.
    """
    batch, num_tokens = tokens.shape[:2]
    if mask is None:
        place = torch.arange(num_tokens, device=tokens.device).expand(batch, num_tokens)
    else:
        place = real_positions(new_tokens(mask, cache, num_tokens).expand(batch, num_tokens))
    return place + cache.lengths[:, None] if cache.is_initialized else place


def _completes_alike(cache: LayerCache, first: LayerCache) -> bool:
    """Whether both complete their blocks with the same tokens, as far as the host can tell."""
    columns, others = cache.columns, first.columns
    return (
        cache.config is first.config
        and columns.even == others.even
        and columns.known == others.known
    )


def real_past(mask: Tensor | None, num_cached: int) -> Tensor | None:
    """Bool (B, cached tokens): which of them are no padding, as `mask` says; None if all are."""
    if mask is None or num_cached == 0:
        return None
    return (_of_columns(mask) != 0)[:, :num_cached]


def _of_columns(mask: Tensor) -> Tensor:
    """(B, columns), nonzero where they are no padding."""
    return _allowed(mask[:, 0, -1]) if mask.dim() == 4 else mask


def _check_width(mask: Tensor, cache: LayerCache, num_tokens: int) -> None:
    known, width = cache.known_length, mask.shape[-1]
    if known is None or width == known + num_tokens:
        return
    if cache.max_length is None or not known + num_tokens < width <= cache.max_length:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}; expected one entry for each cached "
            f"and each new token, {known + num_tokens} a row"
        )


def new_tokens(mask: Tensor, cache: LayerCache, num_tokens: int) -> Tensor:
    """Entries of the new tokens: (B or 1, T), nonzero where they are real."""
    known = cache.known_length
    if known is not None:
        new = mask[..., known : known + num_tokens]
    elif mask.shape[-1] != cache.max_length:
        new = mask[..., mask.shape[-1] - num_tokens :]
    else:
        columns = cache.get_seq_length() + torch.arange(num_tokens, device=mask.device)
        new = mask.index_select(mask.dim() - 1, columns)
    if mask.dim() == 2:
        return new
    # A real token sees itself; transformers lets nobody see padding.
    return _allowed(new)[:, 0].diagonal(dim1=1, dim2=2)


def _assert_same_past(mask: Tensor, cache: LayerCache, num_tokens: int) -> None:
    """That the mask tells of the cached tokens what the cache was told when they came.

    Assertions on the device, which the host does not wait for. Not in compiled code: nothing there
    keeps an assertion before the write that changes the lengths it reads (torch 2.11 on CUDA).
    """
    if mask.dim() == 4:
        mask = _allowed(mask)
        places = torch.arange(mask.shape[-1], device=mask.device)
        rows = torch.arange(num_tokens, device=mask.device) + cache.get_seq_length()
        causal = (mask[:, 0, -1:] & (places <= rows[:, None]))[:, None]
        torch._assert_async(
            (mask == causal).all(),
            "attention_mask is a custom one: NSA chooses what each query attends",
        )
        mask = mask[:, 0, -1]
    columns = cache.known_length
    if columns is None:
        past = torch.arange(mask.shape[1], device=mask.device) < cache.get_seq_length()
        real = ((mask != 0) & past).sum(1)
    else:
        real = (mask[:, :columns] != 0).sum(1)
    torch._assert_async(
        (real == cache.lengths).all(),
        "attention_mask hides or shows other cached tokens than when they came in",
    )


def _allowed(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask == 0
