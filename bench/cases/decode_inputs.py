"""Caches and inputs of a decode step, and the gate its output must pass before it is timed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nsa_flex.config import NSAConfig
from nsa_flex.fallback_kernels.decode.interface import DecodeAux, step
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
    """What `step` takes, in its order, on CUDA in bfloat16."""

    query: Tensor
    new_key: Tensor
    new_value: Tensor
    key: Tensor
    value: Tensor
    compressed_key: Tensor
    compressed_value: Tensor
    gates: Tensor
    lengths: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(vars(self).values())


def make_inputs(shape: Shape) -> Inputs:
    """Random numbers; the compressed rows too, which is all the same to the kernels."""

    def normal(heads: int, tokens: int) -> Tensor:
        size = (shape.batch, heads, tokens, HEAD_DIM)
        return torch.randn(size, device="cuda", dtype=torch.bfloat16)

    heads, blocks = shape.kv_heads, CONFIG.num_compressed_blocks(shape.seq_len)
    return Inputs(
        query=normal(shape.query_heads, 1),
        new_key=normal(heads, 1),
        new_value=normal(heads, 1),
        key=normal(heads, shape.seq_len),
        value=normal(heads, shape.seq_len),
        compressed_key=normal(heads, blocks),
        compressed_value=normal(heads, blocks),
        gates=torch.rand(shape.batch, shape.query_heads, 1, 3, device="cuda").bfloat16(),
        lengths=torch.full((shape.batch,), shape.seq_len - 1, dtype=torch.int32, device="cuda"),
    )


def check(inputs: Inputs) -> None:
    """Before timing: the last row's output in float64 from its choice, and the choice itself."""
    result = step(*inputs.tensors(), config=CONFIG, return_aux=True)
    assert isinstance(result, tuple)
    out, aux = result
    group = inputs.query.shape[1] // inputs.key.shape[1]
    q = inputs.query[-1, :, 0].double().unflatten(0, (-1, group))
    gates = inputs.gates[-1, :, 0].double().unflatten(0, (-1, group))
    want = torch.zeros_like(q)
    position = torch.arange(inputs.key.shape[2], device="cuda")
    chosen = aux.blocks[-1, :, 0, :, None] == position // CONFIG.select_block_size
    near = (position > position[-1] - CONFIG.window_size)[None, None]
    branches = (
        (inputs.compressed_key, inputs.compressed_value, None),
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


def check_choice(p: Tensor, aux: DecodeAux, length: int) -> None:
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
