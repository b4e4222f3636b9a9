"""Which tokens of a call are real and where they stand, by its mask and its `position_ids`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa_flex.cache.columns import IncomingBatch, incoming_batch
from nsa_flex.cache.layer import LayerCache
from nsa_flex.documents import POSITIONS_RULE, real_positions
from nsa_flex.patching.hf_versions import cache_of


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
        same = real == cache.lengths
    else:
        real = mask[:, :columns] != 0
        same = real.sum(1) == cache.lengths
        told = cache.columns.told()
        if told is not None:
            same = same & (real[:, : told.shape[1]] == told.to(real.device)).all(1)
    torch._assert_async(
        same.all(), "attention_mask hides or shows other cached tokens than when they came in"
    )


def _allowed(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask == 0


def assert_positions(
    call: dict[str, Any],
    position_ids: Tensor,
    start: int | Tensor = 0,
    *,
    counted: Tensor | None = None,
    padding: Tensor | None = None,
) -> None:
    """That the positions of a call follow `POSITIONS_RULE`.

    A shard of a sequence (context or sequence parallelism) looks like a short sequence, and
    attention over it alone would be wrong without a word. Its positions give it away. They are
    compared on the device, and the host does not wait for the result.

    Args:
        call: arguments of the decoder, whose `position_ids` these are or contain.
        position_ids: (B or 1, T).
        start: number of columns in the cache, padding included.
        counted: (B, T), position of each token among the real ones of its row; the other way to
            count where there is padding.
        padding: bool (B or 1, T), tokens that may have any position.
    """
    for other in (counted, start):
        if isinstance(other, Tensor):
            position_ids = position_ids.to(other.device)
    position_ids = torch.atleast_2d(position_ids)
    holds = _follow(position_ids, start)
    if counted is not None:
        holds = holds | (position_ids == counted)
    if padding is not None:
        holds = holds | padding
    holds = holds.all()
    if torch.compiler.is_compiling() and cache_of(call) is not None:
        call["position_ids"] = asserted(call["position_ids"], holds)
    else:
        torch._assert_async(holds, POSITIONS_RULE)


def assert_cached_positions(
    call: dict[str, Any],
    position_ids: Tensor,
    cache: LayerCache,
    tokens: Tensor,
    mask: Tensor | None,
) -> None:
    """The same for new tokens of NSA's cache; `tokens` and `mask` are those of `expect`."""
    columns, length = cache.columns, tokens.shape[1]
    start = columns.on_device if columns.known is None else columns.known
    start = 0 if start is None else start  # of an empty static cache
    if mask is None and columns.even:
        assert_positions(call, position_ids, start)
        return
    is_step = length == 1 and cache.is_initialized
    counted = cache.lengths[:, None] if is_step else next_positions(cache, tokens, mask)
    padding = None if mask is None else new_tokens(mask, cache, length) == 0
    assert_positions(call, position_ids, start, counted=counted, padding=padding)


def assert_padded_positions(
    call: dict[str, Any],
    position_ids: Tensor,
    mask: Tensor,
    cached: int | Tensor,
    length: int,
) -> None:
    """The same for the `length` tokens behind `cached` ones; mask: (B, all of them)."""
    padding = _new_columns(mask, cached, length) == 0
    counted = new_positions(mask, cached, length)
    assert_positions(call, position_ids, cached, counted=counted, padding=padding)


def new_positions(mask: Tensor, cached: int | Tensor, length: int) -> Tensor:
    """Position (B, length) of each new token among the real ones of its row."""
    return _new_columns(real_positions(mask), cached, length)


def _new_columns(x: Tensor, cached: int | Tensor, length: int) -> Tensor:
    if isinstance(cached, int):
        return x[:, cached : cached + length]
    return x.index_select(1, cached + torch.arange(length, device=x.device))


def _follow(position_ids: Tensor, start: int | Tensor) -> Tensor:
    """Whether each is the one before plus one or 0, and the first is `start`: bool (B or 1, T)."""
    first = position_ids[:, :1] == start
    if position_ids.shape[1] == 1:
        return first
    before, later = position_ids[:, :-1], position_ids[:, 1:]
    return torch.cat((first, (later == before + 1) | (later == 0)), 1)


# An operator whose result the decoder reads: an assertion by itself could be moved behind the
# write that raises the count of the cache in place (see `count_within` in `cache/columns.py`).
@torch.library.custom_op("nsa_flex::asserted_positions", mutates_args=())
def asserted(position_ids: Tensor, holds: Tensor) -> Tensor:
    """A copy of `position_ids`, asserted on the device to follow the rule."""
    torch._assert_async(holds, POSITIONS_RULE)
    return position_ids.clone()


@asserted.register_fake
def _(position_ids: Tensor, holds: Tensor) -> Tensor:
    return torch.empty_like(position_ids)
