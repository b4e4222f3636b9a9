"""The cache of one attention layer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nsa_flex.attention import NSAAux, nsa_attention
from nsa_flex.cache.buffers import num_rows
from nsa_flex.cache.columns import IncomingBatch, count
from nsa_flex.cache.state import CacheState, misfit
from nsa_flex.compression import Compression, compress_what_is_read, what_is_read
from nsa_flex.decoding import MAX_STEP, New, Stored, decode_step, store, store_by_kernel
from nsa_flex.dispatch import Backend
from nsa_flex.gates import GateLogits
from nsa_flex.storing import completes_a_block


class LayerCache(CacheState):
    """Raw and compressed keys and values of one layer, for a batch of rows of any lengths.

    The real tokens of a row lie from slot 0 on, so that slots are positions: padding is left out
    on the way in. A compressed key or value is written when the last token of its block comes in;
    how many of them count follows from the length of the row. So taking tokens back is a matter of
    lengths, and blocks that were cut are written anew.

    It is a layer of a transformers `Cache`, and needs no transformers. It carries no gradients.

    Args:
        compress_key: φ of keys; the config of NSA's sizes is its.
        compress_value: φ of values.
        max_length: C, tokens to make room for at once (static: the tensors stay where they are,
            as compiled code and CUDA graphs want); None grows by a quarter when full.
        num_sets: keys (and values) of the compressed, selected and sliding branch side by side in
            the head dimension (3), or one for all branches (1).
    """

    def __init__(
        self,
        compress_key: Compression,
        compress_value: Compression,
        *,
        max_length: int | None = None,
        num_sets: int = 1,
    ) -> None:
        same = (compress_key.config, compress_key.num_kv_heads)
        if same != (compress_value.config, compress_value.num_kv_heads):
            raise ValueError(
                "φ of keys and of values differ in their NSAConfig, or their KV heads"
            )
        super().__init__(compress_key.config, max_length, num_sets)
        self.compress_key = compress_key
        self.compress_value = compress_value
        heads = num_sets * compress_key.num_kv_heads
        self.sizes = (heads, compress_key.head_dim, compress_value.head_dim)

    def use_phi(self, compress_key: Compression, compress_value: Compression) -> None:
        """Compress with these from now on: those of the module whose layer of the cache it is.

        Another adapter of the module, or another patch, has others than the cache was made with;
        a cache that was read from a file has copies, which are compared once.

        Raises:
            ValueError: the cache holds tokens that were compressed by others, or memory for
                blocks of another size.
        """
        if self.compress_key is compress_key and self.compress_value is compress_value:
            return
        heads = self.num_sets * compress_key.num_kv_heads
        sizes = (heads, compress_key.head_dim, compress_value.head_dim)
        if self.is_initialized and sizes != self.sizes:
            return  # which `update` refuses
        if self.is_initialized and compress_key.config != self.config:
            raise ValueError(
                "this layer of the cache was made for another NSAConfig: use a new one"
            )
        given, own = (compress_key, compress_value), (self.compress_key, self.compress_value)
        same = all(_is_copy(*pair) for pair in zip(given, own, strict=True))
        if self.is_initialized and self.columns.known != 0 and not same:
            raise ValueError(
                "this layer of the cache holds tokens that another φ compressed, that of another "
                "module, another adapter or a patch since undone: reset the cache, or use a new "
                "one"
            )
        self.config, self.sizes = compress_key.config, sizes
        self.compress_key, self.compress_value = compress_key, compress_value

    def expect(self, incoming: IncomingBatch) -> None:
        """Say what the next `update` brings; `advance` must follow once it has been attended.

        Raises:
            ValueError: there is no room, or the batch has another size. Nothing changed.
        """
        self.columns.check_room(incoming.num_tokens)
        self.begin(incoming)

    def begin(self, incoming: IncomingBatch, may_complete: bool | None = None) -> None:
        """`expect`, where the room has been checked.

        may_complete: what this layer's own would be, if it is known.
        """
        self.incoming, self.expects_blocks = incoming, may_complete
        self.handed_out = self.pending = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store keys and values of new tokens, and compress the blocks that they complete.

        Those of an expected step `attend` stores: one operator stores and attends.

        Args:
            key_states: (B, sets * Hkv, T, D), after position embedding.
            value_states: (B, sets * Hkv, T, Dv); its dtype is the cache's.

        Returns:
            keys and values of all tokens so far, those of a row from slot 0 on; of an expected
            step the buffers, which `attend` has yet to add the new ones to.

        Raises:
            ValueError: they do not fit what is cached, there is no room, gradients are being
                recorded, keys of the expected tokens came before, or padding did and nothing was
                expected. The cache is then as it was.
        """
        if self.handed_out is not None:
            raise ValueError(
                "this layer of the cache was given keys twice in one forward: a module that is "
                "used several times needs a layer of the cache for each use"
            )
        if key_states.dtype != value_states.dtype:
            key_states = key_states.to(value_states.dtype)
        problem = misfit(self, key_states, value_states)
        if problem is not None:
            self.incoming = None
            raise ValueError(problem)
        num_tokens = key_states.shape[2]
        if self.incoming is None:
            if not self.columns.even:
                raise ValueError(
                    "this layer of the cache holds a padded batch, which only a patched model "
                    "reads right: start with a new cache"
                )
            self.columns.check_room(num_tokens)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        incoming = IncomingBatch(num_tokens)
        if self.incoming is not None:
            incoming = self.incoming = self.incoming.to(key_states.device)
        key, value = key_states, value_states
        if incoming.layout is not None:
            key, value = incoming.align(key), incoming.align(value)
        start = self.columns.known
        self._reserve(num_tokens)
        if start == 0:
            self._store_at(0, key, value)
        elif self.incoming is not None and num_tokens <= MAX_STEP:
            self.pending = self._new(key, value, start)
            key, value = self.buffers.key, self.buffers.value
        else:
            key, value = self._store(self._new(key, value, start))
        if self.incoming is None:
            advance([self], incoming)
        else:
            self.handed_out = (key, value)
        return key, value

    def check_handed_back(self, name: str, key: Tensor, value: Tensor) -> None:
        """That attention gets what `update` returned, the very tensors, and gets it once.

        Args:
            name: whose attention it is, for the message.

        Raises:
            ValueError: it gets other keys or values, which the compressed ones are not of.
        """
        handed_out, self.handed_out = self.handed_out, ()
        if handed_out is None:
            problem = "attends keys that it did not put into its layer of the cache"
        elif not handed_out:
            problem = "attends twice over what it put into the cache once"
        elif key is not handed_out[0] or value is not handed_out[1]:
            problem = "attends other keys or values than it put into the cache"
        else:
            return
        raise ValueError(
            f"{name} {problem}, and NSA's compressed ones are made of those in the cache: leave "
            "such layers out with filter_fn, or call with use_cache=False"
        )

    def _store_at(self, start: int, key: Tensor, value: Tensor) -> None:
        """Tokens of all rows from slot `start` on: no place is to be computed."""
        config, buffers, stop = self.config, self.buffers, start + key.shape[2]
        tokens = blocks = False
        if not torch.compiler.is_compiling():
            phi = (self.compress_key, self.compress_value)
            tokens, blocks = store_by_kernel(New(key, value, phi), self._stored())
        if not tokens:
            buffers.key[:, :, start:stop] = key
            buffers.value[:, :, start:stop] = value
        before, after = (config.num_compressed_blocks(length) for length in (start, stop))
        if blocks or after == before or not config.compresses:
            return
        stride, size = config.compress_stride, config.compress_block_size
        fresh = slice(before * stride, (after - 1) * stride + size)
        if start:
            key, value = buffers.key, buffers.value
        source = (self._branch(x, 0)[:, :, fresh] for x in (key, value))
        new = compress_what_is_read(self.compress_key, self.compress_value, *source)
        for rows, blocks_of in zip(buffers.tensors[2:], new, strict=True):
            if blocks_of is not None:
                rows[:, :, before:after] = blocks_of[:, :, : after - before]

    def _new(self, key: Tensor, value: Tensor, start: int | None) -> New:
        """What is to be stored at `start`, the length if the host knows it."""
        may_complete: bool | None = None
        # Compiled code must not read what changes from step to step.
        if self.incoming is not None and not torch.compiler.is_compiling():
            may_complete = self.expects_blocks
        if may_complete is None:
            may_complete = self.may_complete(start, key.shape[2])
        return New(key, value, (self.compress_key, self.compress_value), may_complete)

    def may_complete(self, start: int | None, num_new: int) -> bool:
        """False where so many more tokens complete no block, or nothing would read it."""
        if not self.config.compresses:
            return False
        if start is None or torch.compiler.is_compiling():
            return True
        if not self.columns.even:
            on_cpu = self.device.type == "cpu" and not self.lengths.is_meta  # not rehearsed
            return not on_cpu or completes_a_block(self.lengths, num_new, self.config)
        count = self.config.num_compressed_blocks
        return count(start) < count(start + num_new) or self._is_captured()

    def _is_captured(self) -> bool:
        """Whether a CUDA graph records the call, which then serves other lengths too."""
        on_cuda = self.device.type == "cuda" and torch.cuda.is_initialized()
        return on_cuda and torch.cuda.is_current_stream_capturing()

    def _store(self, new: New) -> tuple[Tensor, Tensor]:
        """Store now; returns keys and values of all tokens so far."""
        start, num_tokens = self.known_length, new.key.shape[2]
        if start is not None and self.columns.even and not torch.compiler.is_compiling():
            self._store_at(start, new.key, new.value)
        else:
            store(new, self._stored())
        # On CUDA masks skip what no query sees, and constant shapes compile once.
        is_masked = start is None or self.device.type == "cuda"
        end = self.capacity if is_masked else self.columns.number() + num_tokens
        return self.buffers.key[:, :, :end], self.buffers.value[:, :, :end]

    def _stored(self) -> Stored:
        return Stored(*self.buffers.tensors, self.lengths)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        gates: Tensor | GateLogits,
        *,
        scale: float | None = None,
        backend: Backend = "auto",
        return_aux: bool = False,
    ) -> tuple[Tensor, NSAAux | None]:
        """NSA of the tokens that `update` got last, before `advance` counts them.

        Args:
            query: (B, Hq, T, D), in the order that the tokens came in.
            key, value: what `update` returned.
            gates: (B, Hq, T, C); as logits a step takes fewer operations.
            scale, backend: as of `nsa_attention`.
            return_aux: also the chosen blocks and log-sum-exps, of real tokens.

        Returns:
            (B, Hq, T, Dv), where padding tokens get anything, and the `NSAAux` if asked.
        """
        assert self.incoming is not None
        incoming, num_tokens = self.incoming, query.shape[2]
        if query.dtype != self.dtype:
            query = query.to(self.dtype)
        moves = incoming.layout is not None
        if moves:
            query = incoming.align(query)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        pending, self.pending = self.pending, None
        if self.is_step(num_tokens, backend):
            out, aux = decode_step(
                query,
                pending,
                self._stored(),
                incoming.align_gates(gates) if moves else gates,
                config=self.config,
                scale=scale,
                return_aux=return_aux,
            )
            return incoming.restore(out) if moves else out, aux
        if pending is not None:
            key, value = self._store(pending)
        gates = gates.gates() if isinstance(gates, GateLogits) else gates
        rows = num_rows(self.config, key.shape[2])
        compressed = (x[:, :, :rows] for x in self.buffers.tensors[2:])
        options: dict[str, Any] = {}
        if self.num_sets == 3:
            options["sliding_key"] = self._branch(key, 2)
            options["sliding_value"] = self._branch(value, 2)
        result: Any = nsa_attention(  # type: ignore[call-overload]  # there is none for bool
            query,
            self._branch(key, 1),
            self._branch(value, 1),
            *what_is_read(self.config, *compressed),
            incoming.align(gates),
            config=self.config,
            scale=scale,
            backend=backend,
            query_offset=self.query_offset(),
            return_aux=return_aux,
            **options,
        )
        out, aux = result if isinstance(result, tuple) else (result, None)
        return incoming.restore(out), aux

    @staticmethod
    def is_step(num_tokens: int, backend: Backend) -> bool:
        """Whether `attend` runs a decode step (`decode_attention`), else `nsa_attention`."""
        return num_tokens <= MAX_STEP and backend == "auto"

    def twin(self, device: torch.device, change: Callable[[Tensor], Tensor]) -> LayerCache:
        """A cache with as many tokens on `device`, its tensors and those of φ changed.

        For `rehearsal`, whose tensors hold nothing. Waits for the device after compiled steps.
        """
        twin = copy.copy(self)
        twin.incoming = twin.handed_out = twin.pending = None
        twin.compress_key = _changed(self.compress_key, change)
        twin.compress_value = _changed(self.compress_value, change)
        twin.columns = self.columns.mapped(change)
        if self.is_initialized:
            twin.buffers, twin.lengths = self.buffers.mapped(change), change(self.lengths)
            twin.device = device
        return twin

    def query_offset(self) -> int | Tensor:
        """Position of the first of the tokens that `update` stored last: one, or one a row."""
        known = self.known_length
        even = self.columns.even or known == 0
        return known if known is not None and even else self.lengths.long()

    def _branch(self, x: Tensor, which: int) -> Tensor:
        """Heads of the compressed (0), selected (1) or sliding (2) branch."""
        return x if self.num_sets == 1 else x.chunk(self.num_sets, dim=1)[which]


def _is_copy(phi: Compression, other: Compression) -> bool:
    """Whether both compress alike. Waits for the device; tensors that hold nothing are alike."""
    if phi.kind != other.kind or phi.config != other.config:
        return False
    pairs = list(zip(phi.parameters(), other.parameters(), strict=True))
    if any(x.shape != y.shape for x, y in pairs):
        return False
    return all(_are_equal(x, y) for x, y in pairs)


def _are_equal(x: Tensor, y: Tensor) -> bool:
    if x.is_meta or y.is_meta:
        return True
    y = y.to(x.device)
    return torch.equal(x, y.to(x.dtype)) or torch.equal(x.to(y.dtype), y)


def _changed(phi: Compression, change: Callable[[Tensor], Tensor]) -> Compression:
    """A copy of φ whose parameters are changed, and none of them copied."""
    memo = {id(x): nn.Parameter(change(x.detach()), x.requires_grad) for x in phi.parameters()}
    return copy.deepcopy(phi, memo)


def advance(layers: list[LayerCache], incoming: IncomingBatch) -> None:
    """Count the tokens that were stored, in all layers of a model at once."""
    if not layers:
        return
    lengths = [layer.lengths for layer in layers]
    if incoming.num_real is None:
        torch._foreach_add_(lengths, incoming.num_tokens)
    else:
        torch._foreach_add_(lengths, [incoming.num_real.to(each.device) for each in lengths])
    count([layer.columns for layer in layers], incoming.num_tokens)
    for layer in layers:
        layer.incoming = layer.handed_out = layer.pending = None
        if incoming.num_real is not None:
            layer.columns.even = False
        if incoming.columns is not None:
            layer.columns.tell(incoming.columns, layer.columns.number())
