"""The cache of one attention layer, of whose tokens each rank holds a contiguous part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from nsa_flex.compression import Compression, compress_what_is_read
from nsa_flex.config import NSAConfig, checked_int
from nsa_flex.decoding import MAX_STEP, New, Stored, store_by_kernel
from nsa_flex.gates import GateLogits
from nsa_flex.parallel.decoding import step_over_ranks
from nsa_flex.parallel.parts import Part
from nsa_flex.parallel.sent import num_compressed
from nsa_flex.parallel.shards import SequenceShards
from nsa_flex.storing import compress_completed, write_slots

if TYPE_CHECKING:
    from jaxtyping import Float


class ShardedCache:
    """Raw and compressed keys and values of one layer, for a batch of rows of any lengths.

    Of compressed ones those that a branch of the config reads.

    Rank r of P has tokens r · C / P and the C / P - 1 following ones of each row, the compressed
    blocks that begin there, and the l - d tokens behind, which these reach into. Every rank must
    make the same calls, with the same new tokens: it stores those that are its own. All tensors
    stay where they are, and nothing waits for the host, as CUDA graphs want. It carries no
    gradients.

    Args:
        compress_key: φ of keys; the config of NSA's sizes is its. compress_value: φ of values.
        mesh: the P ranks, a mesh of one dimension or a process group.
        max_length: tokens that a row may have, rounded up to C, a multiple of P · l'.
        num_sets: as of `LayerCache`.
        prompt: tokens of each row that `fill_from_shards` brings, padding behind them left out;
            all if None.

    Raises:
        ValueError: φ do not fit one another, or max_length is less than 1.
    """

    def __init__(
        self,
        compress_key: Compression,
        compress_value: Compression,
        mesh: DeviceMesh | dist.ProcessGroup | SequenceShards,
        *,
        max_length: int,
        num_sets: int = 1,
        prompt: Sequence[int] | None = None,
    ) -> None:
        max_length = checked_int("max_length", max_length)
        if max_length < 1:
            raise ValueError(f"max_length={max_length} must be at least 1")
        if compress_key.config != compress_value.config:
            raise ValueError("φ of keys and of values differ in their NSAConfig")
        self.config: NSAConfig = compress_key.config
        self.phi = (compress_key, compress_value)
        self.shards = SequenceShards.of(mesh)
        size = self.config.select_block_size
        self.part = Part.of(self.shards, -(-max_length // (self.shards.size * size)) * size)
        self.num_sets, self.prompt = num_sets, prompt
        self._stored: Stored | None = None
        self._longest = 0  # of what the host knows of: replayed graphs count on the device alone

    @property
    def is_empty(self) -> bool:
        """Whether nothing was filled."""
        return self._stored is None

    @property
    def lengths(self) -> Tensor:
        """int32 (B,), tokens of each row, on the device."""
        return self.stored.lengths

    def positions(self, num_tokens: int) -> Tensor:
        """Of so many new tokens in each row, int64 (B, num_tokens)."""
        lengths = self.lengths.long()
        return lengths[:, None] + torch.arange(num_tokens, device=lengths.device)

    @property
    def stored(self) -> Stored:
        """What this rank holds."""
        if self._stored is None:
            raise ValueError("the cache is empty: fill it with the keys and values of a prompt")
        return self._stored

    def memory(self) -> int:
        """Bytes that this rank holds."""
        return sum(x.nbytes for x in self._held(self.stored))

    @torch.no_grad()
    def fill(
        self,
        key: Float[Tensor, "B H S D"],
        value: Float[Tensor, "B H S Dv"],
        lengths: Sequence[int] | None = None,
    ) -> None:
        """Store the tokens of whole rows in the place of all that there were, in the same memory.

        Args:
            key, value: (B, sets · Hkv, S, D or Dv), of all ranks' tokens, each row's from its
                first on; what lies behind a row's end may be anything finite.
            lengths: tokens of each row; S of all if None.

        Raises:
            ValueError: there is no room, or other heads than those of φ.
        """
        self._check(key, value)
        batch, _, num_tokens, _ = key.shape
        lengths = [num_tokens] * batch if lengths is None else lengths
        if len(lengths) != batch or not 0 <= min(lengths) <= max(lengths) <= num_tokens:
            raise ValueError(
                f"lengths are {tuple(lengths)}; expected {batch} of 0 to {num_tokens}, the tokens "
                "of each row of the prompt"
            )
        if max(lengths) > self.part.total:
            raise ValueError(
                f"a prompt of {max(lengths)} tokens does not fit the {self.part.total} of the "
                "cache: raise max_length"
            )
        if self._stored is None:
            self._stored = self._allocate(key, value)
        stored = self._stored
        for x in self._held(stored):
            x.zero_()
        stored.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        self._longest = max(lengths)
        begin = self.part.base
        end = begin + self.part.tokens + self._halo
        own_key, own_value = (x[:, :, begin:end] for x in (key, value))
        number = own_key.shape[2]
        stored.key[:, :, :number], stored.value[:, :, :number] = own_key, own_value
        blocks = min(self.config.num_compressed_blocks(number), stored.compressed_key.shape[2])
        if blocks:
            first = (x[:, :, :number] for x in stored.branch(0))
            compressed = compress_what_is_read(*self.phi, *first)
            for rows, whole in zip(stored[2:4], compressed, strict=True):
                if whole is not None:
                    rows[:, :, :blocks] = whole[:, :, :blocks]

    def fill_from_shards(self, key: Tensor, value: Tensor) -> None:
        """`fill` from this rank's shards (B, H, T, D) of a prompt, as `shard_sequence` makes them.

        One KV head at a time.
        """
        heads = [
            self.shards.gather(*pair)
            for pair in zip(key.split(1, 1), value.split(1, 1), strict=True)
        ]
        whole_key, whole_value = (torch.cat(x, 1) for x in zip(*heads, strict=True))
        self.fill(whole_key, whole_value, self.prompt)

    @torch.no_grad()
    def step(
        self,
        query: Float[Tensor, "B Hq T D"],
        new_key: Float[Tensor, "B H T D"],
        new_value: Float[Tensor, "B H T Dv"],
        gates: Float[Tensor, "B Hq T C"] | GateLogits,
        *,
        scale: float | None = None,
    ) -> Float[Tensor, "B Hq T Dv"]:
        """Store T new tokens a row, attend them, and count them.

        Args:
            query: (B, Hq, T, D), T at most 16.
            new_key, new_value: (B, sets · Hkv, T, D or Dv), after position embedding.
            gates: (B, Hq, T, C), or their logits.
            scale: factor of query . key; 1/√D if None.

        Returns:
            (B, Hq, T, Dv), the same on every rank.

        Raises:
            ValueError: there is no room, nothing was filled, or shapes that do not fit.
        """
        stored, num_new = self.stored, new_key.shape[2]
        self._check(new_key, new_value)
        if not 1 <= num_new <= MAX_STEP:
            raise ValueError(f"a step has {num_new} tokens; expected 1 to {MAX_STEP}")
        if self._longest + num_new > self.part.total:
            raise ValueError(
                f"the cache holds {self._longest} of at most {self.part.total} tokens: no room "
                f"for {num_new} more; make one with a larger max_length"
            )
        own = stored._replace(lengths=stored.lengths - self.part.base)
        self._store(new_key, new_value, own)
        gates = gates.gates() if isinstance(gates, GateLogits) else gates
        out = step_over_ranks(
            query.to(stored.value.dtype),
            stored,
            gates,
            shards=self.shards,
            tokens=self.part.tokens,
            config=self.config,
            scale=query.shape[3] ** -0.5 if scale is None else scale,
        )
        stored.lengths.add_(num_new)
        self._longest += num_new
        return out

    @property
    def _halo(self) -> int:
        """Tokens behind the part, for the compressed blocks that reach over its end."""
        return self.config.compress_block_size - self.config.compress_stride

    def _store(self, new_key: Tensor, new_value: Tensor, own: Stored) -> None:
        """New tokens at `own.lengths`, counted from the part; the kernel leaves others out, and
        operations store them in the slot behind it.
        """
        num_new, end = new_key.shape[2], self.part.tokens + self._halo
        held = own._replace(key=own.key[:, :, :end], value=own.value[:, :, :end])
        has_tokens, has_blocks = store_by_kernel(New(new_key, new_value, self.phi), held)
        if not has_tokens:
            slots = own.lengths[:, None] + torch.arange(num_new, device=own.key.device)
            slots = torch.where((slots >= 0) & (slots < end), slots, end)
            write_slots(own.key, slots, new_key)
            write_slots(own.value, slots, new_value)
        if not has_blocks:
            compressed = (own.compressed_key, own.compressed_value)
            compress_completed(*held.branch(0), *compressed, own.lengths, num_new, *self.phi)

    def _held(self, stored: Stored) -> tuple[Tensor, ...]:
        """Those of the four tensors that are read."""
        return stored[: 2 + num_compressed(self.config)]

    def _allocate(self, key: Tensor, value: Tensor) -> Stored:
        """`fill` zeroes them: what no query sees must be finite. l' > l - d: there is a slot for
        the others.
        """
        batch, heads = key.shape[:2]
        slots = self.part.tokens + self.config.select_block_size
        rows = self.part.tokens // self.config.compress_stride
        read = num_compressed(self.config)
        raw = [value.new_empty(batch, heads, slots, x.shape[3]) for x in (key, value)]
        compressed = []
        for place, x in enumerate((key, value)):
            shape = (batch, heads // self.num_sets, rows if place < read else 1, x.shape[3])
            compressed.append(value.new_empty(shape))
        lengths = torch.zeros(batch, dtype=torch.int32, device=key.device)
        return Stored(raw[0], raw[1], compressed[0], compressed[1], lengths)

    def _check(self, key: Tensor, value: Tensor) -> None:
        heads, dims = self.num_sets * self.phi[0].num_kv_heads, [x.head_dim for x in self.phi]
        for name, x, dim in (("key", key, dims[0]), ("value", value, dims[1])):
            if x.dim() != 4 or (x.shape[1], x.shape[3]) != (heads, dim):
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)}; expected (B, {heads}, T, {dim})"
                )
        if self._stored is not None and key.shape[0] != self._stored.key.shape[0]:
            raise ValueError(f"key has {key.shape[0]} rows, the cache {self._stored.key.shape[0]}")
