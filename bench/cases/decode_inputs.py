"""Caches and inputs of a decode step, and the gate its output must pass before it is timed."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nsa_flex.attention import NSAAux
from nsa_flex.bench.command_line import pair_of
from nsa_flex.bench.measure import reference
from nsa_flex.cache.columns import IncomingBatch
from nsa_flex.cache.layer import LayerCache, advance
from nsa_flex.compression import Compression
from nsa_flex.config import CompressionKind, NSAConfig
from nsa_flex.gates import GateLogits

HEAD_DIM = 128
CONFIG = NSAConfig()
TOUCHED = 200e6  # bytes that rotated copies of the inputs read in all: several times the L2


@dataclass(frozen=True)
class Shape:
    """One new token for each of `batch` rows that have `seq_len` tokens with it."""

    batch: int
    query_heads: int
    kv_heads: int
    seq_len: int

    @classmethod
    def of(cls, batch: int, heads: str, seq_len: int) -> Shape:
        """`heads` as "Hq/Hkv"."""
        return cls(batch, *pair_of(heads), seq_len)

    @property
    def stored(self) -> int:
        """Bytes of all keys and values."""
        return self.batch * self.kv_heads * self.seq_len * 2 * HEAD_DIM * 2

    @property
    def must_read(self) -> int:
        """Bytes: N_cmp + selected tokens + min(w, S) rows of keys and values a KV head."""
        selected = min(CONFIG.num_selected_blocks * CONFIG.select_block_size, self.seq_len)
        rows = CONFIG.num_compressed_blocks(self.seq_len) + selected
        rows += min(CONFIG.window_size, self.seq_len)
        return self.batch * self.kv_heads * rows * 2 * HEAD_DIM * 2

    @property
    def copies(self) -> int:
        """Sets of inputs that are used in turn, so that none is found in the L2."""
        return max(1, min(12, int(TOUCHED / self.must_read) + 1))


@dataclass(frozen=True)
class Inputs:
    """A layer's static cache, and what comes to it in one step, on CUDA in bfloat16.

    gates: logits, as a patched model gives them.
    """

    cache: LayerCache
    query: Tensor
    new_key: Tensor
    new_value: Tensor
    gates: GateLogits

    @property
    def key(self) -> Tensor:
        return self.cache.buffers.key

    @property
    def value(self) -> Tensor:
        return self.cache.buffers.value

    def arguments(self) -> tuple[LayerCache, Tensor, Tensor, Tensor, GateLogits]:
        """Of `step`."""
        return self.cache, self.query, self.new_key, self.new_value, self.gates

    def earlier(self, num_tokens: int) -> Inputs:
        """The same buffers with so many tokens fewer."""
        cache = copy.copy(self.cache)
        cache.lengths, cache.columns = self.cache.lengths.clone(), copy.deepcopy(cache.columns)
        cache.crop(-num_tokens)
        return replace(self, cache=cache)


def step(
    cache: LayerCache,
    query: Tensor,
    new_key: Tensor,
    new_value: Tensor,
    gates: GateLogits,
    *,
    return_aux: bool = False,
) -> Any:
    """One step of a layer as a patched model runs it, but for counting: once a token for all."""
    cache.begin(IncomingBatch(query.shape[2]))
    key, value = cache.update(new_key, new_value)
    out, aux = cache.attend(query, key, value, gates, return_aux=return_aux)
    return out if aux is None else (out, aux)


def make_inputs(shape: Shape, kind: CompressionKind = "mean", device: str = "cuda") -> Inputs:
    """Random numbers; the compressed rows too, which is all the same to the kernels."""

    def normal(heads: int, tokens: int) -> Tensor:
        size = (shape.batch, heads, tokens, HEAD_DIM)
        return torch.randn(size, device=device, dtype=torch.bfloat16)

    heads = shape.kv_heads
    phi = [
        Compression(CONFIG, heads, HEAD_DIM, kind, device=device, dtype=torch.bfloat16)
        for _ in range(2)
    ]
    for weight in itertools.chain(*(each.requires_grad_(False).parameters() for each in phi)):
        weight.normal_(std=0.02)  # at its start φ is the mean, whatever its kind
    cache = LayerCache(*phi, max_length=shape.seq_len)
    key, value = normal(heads, 1), normal(heads, 1)
    cache.lazy_initialization(key, value)
    for x in cache.buffers.tensors:
        x.normal_()
    advance([cache], IncomingBatch(shape.seq_len - 1))
    logits = torch.randn(shape.batch, 1, shape.query_heads, 3, device=device).bfloat16()
    offset = torch.zeros(3, device=device, dtype=torch.bfloat16)
    gates = GateLogits(logits.transpose(1, 2), offset)
    return Inputs(cache, normal(shape.query_heads, 1), key, value, gates)


def check(inputs: Inputs) -> None:
    """Before timing, in float64: what a step stores, its output and its choice.

    That is keys and values that came and the compressed row that they complete, of all rows; the
    output of the first and the last row of the batch from its choice; and that choice. Of the
    step that is timed, and of an earlier one, which completes no block.

    Raises:
        AssertionError: one is off by more than rounding to bfloat16 explains.
    """
    for each in (inputs, inputs.earlier(3)):
        out, aux = step(*each.arguments(), return_aux=True)
        length = int(each.cache.lengths[0]) + 1
        check_stored(each, length)
        for row in {0, out.shape[0] - 1}:
            check_output(each, row, length, out, aux)


def check_stored(inputs: Inputs, length: int) -> None:
    """The last of `length` tokens, and the compressed row that it completes, are in the cache."""
    cache, stored = inputs.cache, inputs.cache.buffers
    for raw, new in ((stored.key, inputs.new_key), (stored.value, inputs.new_value)):
        assert torch.equal(raw[:, :, length - 1], new[:, :, 0]), "a token was not stored"
    before, after = (CONFIG.num_compressed_blocks(n) for n in (length - 1, length))
    if before == after:
        return
    tokens = slice(length - CONFIG.compress_block_size, length)
    for phi, raw, compressed in (
        (cache.compress_key, stored.key, stored.compressed_key),
        (cache.compress_value, stored.value, stored.compressed_value),
    ):
        want = copy.deepcopy(phi).double()(raw[:, :, tokens].double())[:, :, 0]
        check_error("the compressed row", compressed[:, :, before], want)


def check_output(inputs: Inputs, row: int, length: int, out: Tensor, aux: NSAAux) -> None:
    """Of one row of the batch, from the blocks it chose, and that it chose well."""
    heads, stored = inputs.key.shape[1], inputs.cache.buffers
    position = torch.tensor([length - 1], device=out.device)
    ends = (length, length, *[CONFIG.num_compressed_blocks(length)] * 2)
    kept = (stored.key, stored.value, stored.compressed_key, stored.compressed_value)
    queries, gates = (
        x[row].double().unflatten(0, (heads, -1)) for x in (inputs.query, inputs.gates.gates())
    )  # [Hkv, G, 1, D], [Hkv, G, 1, 3]
    assert aux.blocks is not None
    wanted = []
    for head, blocks in enumerate(aux.blocks[row]):
        query, at = queries[head], (position, HEAD_DIM**-0.5)
        key, value, compressed_key, compressed_value = (
            x[row, head, :end].double() for x, end in zip(kept, ends, strict=True)
        )
        branches = (
            reference.compressed(query, compressed_key, compressed_value, *at, CONFIG),
            reference.selected(query, key, value, *at, blocks, CONFIG),
            reference.sliding(query, key, value, *at, CONFIG),
        )
        wanted.append(sum(gates[head, ..., i, None] * x for i, x in enumerate(branches)))
        check_choice(reference.scores(query, compressed_key, *at, CONFIG)[0], blocks[0])
    check_error("the step's output", out[row, :, 0], torch.cat(wanted)[:, 0])


def check_error(name: str, found: Tensor, want: Tensor) -> None:
    """Relative to the norm: a unit in the last place of bfloat16."""
    error = (found.double() - want).norm() / want.norm()
    assert error < 2**-7, f"{name} is off by {error:.1e}"


def check_choice(scores: Tensor, blocks: Tensor) -> None:
    """No block left out outscores one of `blocks` (n); scores (blocks) are summed over a group."""
    taken = blocks[blocks >= 0]
    own = int(taken.max())
    free = [j for j in taken.tolist() if 1 <= j <= own - 2]
    left = torch.ones_like(scores, dtype=torch.bool)
    left[taken] = False
    left[own - 1 :] = False
    if free and left.any():
        assert scores[left].max() - scores[free].min() < 1e-4, "a better block was left out"
