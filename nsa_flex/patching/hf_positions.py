"""The guard of positions: `position_ids` that no plain sequence, batch or packed row has.

A shard of a sequence (context or sequence parallelism) looks like a short sequence, and attention
over it alone is wrong without a word. Its positions give it away. They are compared on the device,
and the host does not wait for the result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa_flex.cache.layer import LayerCache
from nsa_flex.documents import POSITIONS_RULE, real_positions
from nsa_flex.patching.hf_incoming import new_tokens, next_positions
from nsa_flex.patching.hf_versions import cache_of


def assert_positions(
    call: dict[str, Any],
    position_ids: Tensor,
    start: int | Tensor = 0,
    *,
    counted: Tensor | None = None,
    padding: Tensor | None = None,
) -> None:
    """That the positions of a call follow `POSITIONS_RULE`.

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
# write that raises the count of the cache in place (see `cache/room.py`).
@torch.library.custom_op("nsa_flex::asserted_positions", mutates_args=())
def asserted(position_ids: Tensor, holds: Tensor) -> Tensor:
    """A copy of `position_ids`, asserted on the device to follow the rule."""
    torch._assert_async(holds, POSITIONS_RULE)
    return position_ids.clone()


@asserted.register_fake
def _(position_ids: Tensor, holds: Tensor) -> Tensor:
    return torch.empty_like(position_ids)
