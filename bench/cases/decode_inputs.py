"""Caches and inputs of a decode step, and the gate its output must pass before it is timed."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nsa_flex.attention import NSAAux
from nsa_flex.cache.incoming import IncomingBatch
from nsa_flex.cache.layer import LayerCache, advance
from nsa_flex.compression import Compression
from nsa_flex.config import CompressionKind, NSAConfig
from nsa_flex.gates import GateLogits
from nsa_flex.selection import block_scores

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
        query_heads, kv_heads = (int(x) for x in heads.split("/"))
        return cls(batch, query_heads, kv_heads, seq_len)

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

    def tensors(self) -> tuple[Tensor, ...]:
        """All of them."""
        cache = (*self.cache.buffers.tensors, self.cache.lengths)
        return *cache, self.query, self.new_key, self.new_value, *self.gates

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


def make_inputs(shape: Shape, kind: CompressionKind = "mean") -> Inputs:
    """Random numbers; the compressed rows too, which is all the same to the kernels."""

    def normal(heads: int, tokens: int) -> Tensor:
        size = (shape.batch, heads, tokens, HEAD_DIM)
        return torch.randn(size, device="cuda", dtype=torch.bfloat16)

    heads = shape.kv_heads
    phi = [
        Compression(CONFIG, heads, HEAD_DIM, kind, device="cuda", dtype=torch.bfloat16)
        for _ in range(2)
    ]
    cache = LayerCache(*(each.requires_grad_(False) for each in phi), max_length=shape.seq_len)
    key, value = normal(heads, 1), normal(heads, 1)
    cache.lazy_initialization(key, value)
    for x in cache.buffers.tensors:
        x.normal_()
    advance([cache], IncomingBatch(shape.seq_len - 1))
    logits = torch.randn(shape.batch, 1, shape.query_heads, 3, device="cuda").bfloat16()
    offset = torch.zeros(3, device="cuda", dtype=torch.bfloat16)
    gates = GateLogits(logits.transpose(1, 2), offset)
    return Inputs(cache, normal(shape.query_heads, 1), key, value, gates)


def check(inputs: Inputs) -> None:
    """Before timing: the last row's output in float64 from its choice, and the choice itself."""
    out, aux = step(*inputs.arguments(), return_aux=True)
    group = inputs.query.shape[1] // inputs.key.shape[1]
    q = inputs.query[-1, :, 0].double().unflatten(0, (-1, group))
    gates = inputs.gates.gates()[-1, :, 0].double().unflatten(0, (-1, group))
    want = torch.zeros_like(q)
    position = torch.arange(inputs.key.shape[2], device="cuda")
    chosen = aux.blocks[-1, :, 0, :, None] == position // CONFIG.select_block_size
    near = (position > position[-1] - CONFIG.window_size)[None, None]
    branches = (
        (inputs.cache.buffers.compressed_key, inputs.cache.buffers.compressed_value, None),
        (inputs.key, inputs.value, chosen.any(1)[:, None]),
        (inputs.key, inputs.value, near),
    )
    for branch, (keys, values, mask) in enumerate(branches):
        logits = q @ keys[-1].double().mT * HEAD_DIM**-0.5
        if mask is not None:
            logits = logits.masked_fill(~mask, float("-inf"))
        p = logits.softmax(-1)
        want += gates[:, :, branch, None] * (p @ values[-1].double())
        if branch == 0:
            check_choice(p.sum(1).float(), aux, inputs.key.shape[2])
    error = (out[-1, :, 0].double() - want.flatten(0, 1)).norm() / want.norm()
    assert error < 2**-7, f"the step's output is off by {error:.1e}"


def check_choice(p: Tensor, aux: NSAAux, length: int) -> None:
    """No block left out outscores a chosen one; p (Hkv, N) is summed over each group."""
    blocks = aux.blocks[-1, :, 0]
    scores = block_scores(p, CONFIG.num_select_blocks(length), CONFIG)
    for row, picked in zip(scores, blocks, strict=True):
        taken = picked[picked >= 0]
        own = int(taken.max())
        free = [j for j in taken.tolist() if 1 <= j <= own - 2]
        left = torch.ones_like(row, dtype=torch.bool)
        left[taken] = False
        left[own - 1 :] = False
        if free and left.any():
            assert row[left].max() - row[free].min() < 1e-4, "a better block was left out"
