"""What the cache of a layer holds, and what is done to it apart from attention."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from nsa_flex.cache.buffers import (
    Buffers,
    Memory,
    allocate,
    lasting,
    mark_static,
    num_bytes,
    roomy,
)
from nsa_flex.cache.columns import Columns, IncomingBatch
from nsa_flex.config import NSAConfig, checked_int
from nsa_flex.decoding import New
from nsa_flex.sharded import is_sharded


class CacheState:
    """Tokens of a batch of rows of any lengths, as transformers asks for them and moves them.

    Args:
        config: NSA's sizes.
        max_length, num_sets: as of `LayerCache`.

    Attributes:
        buffers: the tensors; there are none before the first tokens.
        lengths: int32 (B,), real tokens of each row; likewise.
        columns: the number of columns of the batch that came in, padding included.
        incoming: what comes in, between `expect` and `advance`.
        expects_blocks: whether that may complete a compressed block; None where `begin` was not
            told.
        pending: what `update` got for `attend` to store.
        handed_out: keys and values that `update` returned since `expect`; empty once
            `check_handed_back` has seen them, None before `update`.
    """

    is_sliding = False
    is_croppable = True
    supports_early_init = True

    buffers: Buffers
    lengths: Tensor

    def __init__(self, config: NSAConfig, max_length: int | None, num_sets: int) -> None:
        if max_length is not None:
            max_length = checked_int("max_length", max_length)
        if max_length is not None and max_length < 1:
            raise ValueError(f"max_length={max_length} must be at least 1, or None to grow")
        if num_sets not in (1, 3):
            raise ValueError(f"num_sets={num_sets} must be 1, or 3 for keys of each branch")
        self.config = config
        self.max_length = max_length
        self.columns = Columns(max_length)
        self.num_sets = num_sets
        self.is_initialized = False
        self.incoming: IncomingBatch | None = None
        self.expects_blocks: bool | None = None
        self.pending: New | None = None
        self.handed_out: tuple[Tensor, ...] | None = None

    def __repr__(self) -> str:
        size = "growing" if self.max_length is None else f"max_length={self.max_length}"
        return f"{type(self).__name__}({size})"

    # What came in so far

    @property
    def is_compileable(self) -> bool:
        """Whether shapes and addresses stay: a static cache."""
        return self.max_length is not None

    @property
    def capacity(self) -> int:
        """C, tokens there is room for now."""
        if self.is_initialized:
            return self.buffers.key.shape[2]
        return 0 if self.max_length is None else self.max_length

    @property
    def known_length(self) -> int | None:
        """`get_seq_length` as the host knows it; None inside compiled code and after it."""
        return self.columns.known

    def get_seq_length(self) -> int | Tensor:
        """Tokens of the longest row that came in, padding included; a tensor where static."""
        return self.columns.number_or_tensor() if self.is_initialized else 0

    def get_max_length(self) -> int:
        """Tokens there may be in all; -1 for no limit."""
        return -1 if self.max_length is None else self.max_length

    def get_max_cache_shape(self) -> int:
        """`get_max_length` by its former name."""
        return self.get_max_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that a mask for `query_length` new tokens spans, and the first of them."""
        if self.max_length is not None:
            return self.max_length, 0
        return self.columns.number() + query_length, 0

    @property
    def keys(self) -> Tensor | None:
        """(B, sets * Hkv, T, D) of the columns that came in, as transformers' layers have them.

        Zeros at padding. None before any; where static the buffer, of tokens from slot 0 on.
        """
        return self._by_column(self.buffers.key) if self.is_initialized else None

    @property
    def values(self) -> Tensor | None:
        """(B, sets * Hkv, T, Dv), likewise."""
        return self._by_column(self.buffers.value) if self.is_initialized else None

    def _by_column(self, buffer: Tensor) -> Tensor:
        if self.max_length is not None:
            return buffer
        real = None if self.columns.even else self.columns.real(self.batch_size)
        if real is None:
            return buffer[:, :, : self.columns.number()]
        slots = (real.cumsum(1) - 1).clamp(min=0)[:, None, :, None].to(buffer.device)
        tokens = buffer.gather(2, slots.expand(-1, buffer.shape[1], -1, buffer.shape[3]))
        return tokens.masked_fill(~real[:, None, :, None].to(buffer.device), 0)

    def memory(self) -> Memory:
        """Bytes that are allocated now."""
        if not self.is_initialized:
            return Memory()
        key, value, compressed_key, compressed_value = self.buffers.tensors
        return Memory(
            num_bytes(key, value),
            num_bytes(compressed_key, compressed_value),
            num_bytes(self.lengths, self.columns.on_device),
        )

    # Room for them

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for rows like these, of which there may be no token yet."""
        capacity = roomy(key_states.shape[2]) if self.max_length is None else self.max_length
        self.batch_size = key_states.shape[0]
        self.dtype, self.device = value_states.dtype, value_states.device
        with lasting():
            self.buffers = allocate(key_states, value_states, capacity, self.num_sets, self.config)
            self.lengths = torch.zeros(self.batch_size, dtype=torch.int32, device=self.device)
            self.columns.use(self.device)
        self.is_initialized = True
        self._mark_static()

    def _reserve(self, num_tokens: int) -> None:
        if self.max_length is None:
            needed = self.columns.number() + num_tokens
            if needed > self.buffers.key.shape[2]:
                with lasting():
                    self.buffers = self.buffers.grown(roomy(needed), self.config)

    def _mark_static(self) -> None:
        if self.columns.on_device is not None:
            mark_static([*self.buffers.tensors, self.lengths, self.columns.on_device])

    # Tokens out, rows about

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` columns; 0 takes back none.

        Of a row whose last columns are padding so many fewer tokens. Compressed rows past the end
        no longer count; they are written again when their blocks are whole again.

        Raises:
            ValueError: a positive number, or more than there are. Nothing changed.
        """
        tokens_to_remove = self.check_crop(tokens_to_remove)
        if tokens_to_remove == 0:
            return
        removed = self.columns.real_among_last(-tokens_to_remove)
        if isinstance(removed, Tensor):
            removed = removed.to(self.device)
        self.columns.take_back(-tokens_to_remove)
        self.lengths.sub_(removed).clamp_(min=0)

    def check_crop(self, tokens_to_remove: int) -> int:
        """The number as an int; ValueError if `crop` could not do it."""
        tokens_to_remove = checked_int("tokens_to_remove", tokens_to_remove)
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}): pass a negative number, of tokens to take back from "
                "the end"
            )
        length = self.columns.number()
        if -tokens_to_remove > length:
            raise ValueError(
                f"crop({tokens_to_remove}) goes past the start: the cache holds {length} tokens"
            )
        return tokens_to_remove

    def reset(self) -> None:
        """Forget all tokens; static memory stays, and with it the number of rows."""
        self.incoming = self.handed_out = self.pending = None
        self.columns.reset()
        if self.max_length is None and self.is_initialized:
            self.is_initialized = False
            del self.buffers, self.lengths
        if self.is_initialized:
            self.lengths.zero_()
            for buffer in self.buffers.tensors:  # NaN would come through where nobody looks
                buffer.zero_()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row b becomes what row `beam_idx[b]` was, in the same memory."""
        if not self.is_initialized:
            return
        if beam_idx.shape != (self.batch_size,):
            raise ValueError(
                f"beam_idx has shape {tuple(beam_idx.shape)}; expected ({self.batch_size},), one "
                "a row of the cache"
            )
        index = beam_idx.to(self.device)
        self.buffers.reorder(index, self.columns.number(), self.config)
        self.lengths.copy_(self.lengths[index])
        self.columns.pick_rows(index)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        if self.is_initialized:
            index = torch.arange(self.batch_size * repeats, device=self.device) // repeats
            self.batch_select_indices(index)

    def batch_select_indices(self, indices: Tensor) -> None:
        """The rows `indices` alone, in memory of their own."""
        if not self.is_initialized:
            return
        indices = indices.to(self.device)
        with lasting():
            self.buffers, self.lengths = self.buffers.selected(indices), self.lengths[indices]
        self.columns.pick_rows(indices)
        self.batch_size = self.lengths.shape[0]
        self._mark_static()

    def offload(self) -> None:
        """Refused: compressed keys are read whole at every step."""
        raise ValueError("NSA's cache cannot be offloaded: use cache_implementation 'dynamic'")

    prefetch = offload

    def __deepcopy__(self, memo: dict[int, Any]) -> CacheState:
        """A copy of the tokens, with the same φ: to go on from one prefix in several ways."""
        twin = copy.copy(self)
        twin.incoming = twin.handed_out = twin.pending = None
        with lasting():
            twin.columns = copy.deepcopy(self.columns, memo)
            if self.is_initialized:
                twin.buffers = copy.deepcopy(self.buffers, memo)
                twin.lengths = copy.deepcopy(self.lengths, memo)
        if self.is_initialized:
            twin._mark_static()
        memo[id(self)] = twin
        return twin


def misfit(cache: Any, key: Tensor, value: Tensor) -> str | None:
    """Why a `LayerCache` cannot store such keys and values, or None. Looks at no values."""
    key_shape, value_shape = key.shape, value.shape
    heads, key_dim, value_dim = cache.sizes
    if (
        cache.is_initialized
        and len(key_shape) == 4
        and key_shape == (cache.batch_size, heads, tokens := key_shape[2], key_dim)
        and value_shape == (cache.batch_size, heads, tokens, value_dim)
        and value.dtype == cache.dtype
        and value.device == cache.device
        and not torch.is_grad_enabled()
    ):
        return None
    if len(key_shape) != 4 or len(value_shape) != 4 or key_shape[:3] != value_shape[:3]:
        return f"{_shapes(key, value)} must be (batch, heads, tokens, dim), alike but for dim"
    if (key_shape[1], key_shape[3], value_shape[3]) != cache.sizes:
        return (
            f"{_shapes(key, value)} are not those of this cache's layer: {heads} heads of "
            f"{key_dim} and {value_dim}"
        )
    wants_grad = torch.is_grad_enabled() and (
        key.requires_grad or value.requires_grad or any(x.requires_grad for x in _phi(cache))
    )
    if wants_grad:
        return "NSA's cache carries no gradients: call under torch.no_grad(), or without a cache"
    if not cache.is_initialized:
        return _sharded_phi(cache)
    for name, got, want in (
        ("batch size", key_shape[0], cache.batch_size),
        ("device", value.device, cache.device),
        ("dtype", value.dtype, cache.dtype),
    ):
        if got != want:
            return (
                f"the cache was filled with {name} {want}, the new tokens have {name} {got}: "
                "use a new cache"
            )
    return None


def _shapes(key: Tensor, value: Tensor) -> str:
    return f"keys {tuple(key.shape)} and values {tuple(value.shape)}"


def _phi(cache: Any) -> list[Tensor]:
    """Parameters of what compresses."""
    if not cache.config.compresses:
        return []
    both = (cache.compress_key, cache.compress_value)
    return [x for each in both for x in each.own_parameters().values()]


def _sharded_phi(cache: Any) -> str | None:
    if any(is_sharded(x) for x in _phi(cache)):
        return (
            "φ is sharded by itself (fully_shard on the nsa module), and a cache compresses "
            "outside of its forward: fully_shard the decoder layer, or pass use_cache=False"
        )
    return None
