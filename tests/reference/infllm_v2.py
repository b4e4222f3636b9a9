"""InfLLM-V2 attention and the MiniCPM4 around it in float64 NumPy, forward and backward.

Written from what upstream's attention and kernels compute, and from nothing else: no torch, none
of the package's code. One row without padding; queries are its last tokens. Every block set is an
explicit Python set, every mask an explicit boolean array.

Arrays are (heads H, tokens S, head dim D); G = Hq / Hkv query heads share a KV head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from reference import nsa_1b
from reference.nsa_1b import Weights

Floats: TypeAlias = NDArray[np.float64]
Backward: TypeAlias = Callable[[Floats], tuple[Floats, Floats, Floats]]


@dataclass(frozen=True)
class Sizes:
    """`sparse_config` by upstream's names; `coarse` is 4 as trained, 1 for the exact lse."""

    kernel_size: int = 8
    kernel_stride: int = 4
    init_blocks: int = 1
    block_size: int = 16
    window_size: int = 32
    topk: int = 3
    dense_len: int = 0
    coarse: int = 4

    @property
    def forced_local(self) -> int:
        """Blocks up to the query's own, that one included."""
        return self.window_size // self.block_size + 1

    @property
    def num_blocks(self) -> int:
        """Blocks of a query, forced ones among them."""
        return self.topk + self.window_size // self.block_size


def window_means(x: Floats, size: int, stride: int) -> Floats:
    """Means of `size` tokens, one every `stride`; whole windows only."""
    starts = range(0, x.shape[1] - size + 1, stride)
    means = [x[:, start : start + size].mean(1) for start in starts]
    return np.stack(means, 1) if means else np.zeros((x.shape[0], 0, x.shape[2]))


def group_scores(q: Floats, k: Floats, sizes: Sizes) -> Floats:
    """exp(q k1 - lse) summed over the heads of a group: (Hkv, Sq, windows); unseen ones are -1.

    `lse` is over the visible coarse windows. A query that sees none of them scores 0.
    """
    heads, num_queries, dim = q.shape
    kv_heads, num_keys = k.shape[:2]
    sums = None
    for head in range(heads):
        key = k[head // (heads // kv_heads)][None]
        fine = window_means(key, sizes.kernel_size, sizes.kernel_stride)[0]
        factor = sizes.coarse
        coarse = window_means(key, factor * sizes.kernel_size, factor * sizes.kernel_stride)[0]
        if sums is None:
            sums = np.zeros((kv_heads, num_queries, len(fine)))
        for row in range(num_queries):
            t = num_keys - num_queries + row
            seen = sizes.kernel_stride * np.arange(len(fine)) + sizes.kernel_size - 1 <= t
            ends = factor * (sizes.kernel_stride * np.arange(len(coarse)) + sizes.kernel_size) - 1
            logits = coarse[ends <= t] @ q[head, row] / np.sqrt(dim)
            if len(logits) == 0:
                sums[head // (heads // kv_heads), row, ~seen] = -1
                continue
            lse = logits.max() + np.log(np.exp(logits - logits.max()).sum())
            scores = np.exp(fine @ q[head, row] / np.sqrt(dim) - lse)
            target = sums[head // (heads // kv_heads), row]
            target[:] = np.where(seen, target + scores, -1)
    assert sums is not None
    return sums


def max_pooled(scores: Floats, num_blocks: int, sizes: Sizes) -> Floats:
    """Of block j the largest score of the windows that overlap it; -1 where none is seen.

    With kernel_size 2 kernel_stride that is a max-pool of kernel block_size / kernel_stride + 1,
    stride block_size / kernel_stride and padding 1.
    """
    per_block = sizes.block_size // sizes.kernel_stride
    before = sizes.kernel_size // sizes.kernel_stride - 1
    pooled = np.full((*scores.shape[:-1], num_blocks), -1.0)
    for j in range(num_blocks):
        windows = scores[..., max(0, per_block * j - before) : per_block * (j + 1)]
        if windows.shape[-1]:
            pooled[..., j] = windows.max(-1)
    return pooled


def selected_blocks(q: Floats, k: Floats, sizes: Sizes) -> list[list[set[int]]]:
    """For each KV head and query its blocks. Equal scores: the first block."""
    num_queries, num_keys = q.shape[1], k.shape[1]
    num_blocks = -(-num_keys // sizes.block_size)
    pooled = max_pooled(group_scores(q, k, sizes), num_blocks, sizes)
    found = []
    for of_head in pooled:
        sets = []
        for row, scores in enumerate(of_head):
            own = (num_keys - num_queries + row) // sizes.block_size
            first_local = own - sizes.forced_local + 1
            forced = {j for j in range(own + 1) if j < sizes.init_blocks or j >= first_local}
            others = sorted(set(range(own + 1)) - forced, key=lambda j: (-max(scores[j], 0), j))
            sets.append(forced | set(others[: max(0, sizes.num_blocks - len(forced))]))
        found.append(sets)
    return found


def attention(
    q: Floats, k: Floats, v: Floats, sizes: Sizes, *, length: int | None = None
) -> tuple[Floats, Backward]:
    """Output (Hq, Sq, Dv) and gradients of q, k and v from its own; the blocks carry none.

    Dense causal where `length`, tokens of the longest row of the batch, is below dense_len.
    """
    num_queries, num_keys = q.shape[1], k.shape[1]
    place = np.arange(num_keys)
    t = num_keys - num_queries + np.arange(num_queries)
    mask = np.broadcast_to(place <= t[:, None], (k.shape[0], num_queries, num_keys)).copy()
    if (num_keys if length is None else length) >= sizes.dense_len:
        for head, sets in enumerate(selected_blocks(q, k, sizes)):
            for row, blocks in enumerate(sets):
                mask[head, row] &= np.isin(place // sizes.block_size, list(blocks))
    return masked_attention(q, k, v, mask)


def masked_attention(
    q: Floats, k: Floats, v: Floats, mask: NDArray[np.bool_]
) -> tuple[Floats, Backward]:
    """softmax(q k^T / sqrt(D)) v under a mask (Hkv, Sq, Sk)."""
    group, scale = q.shape[0] // k.shape[0], q.shape[-1] ** -0.5
    wide_k, wide_v, wide_mask = (np.repeat(x, group, axis=0) for x in (k, v, mask))
    logits = np.where(wide_mask, scale * q @ wide_k.swapaxes(-1, -2), -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    p = weights / weights.sum(-1, keepdims=True)
    out = p @ wide_v

    def backward(grad: Floats) -> tuple[Floats, Floats, Floats]:
        of_p = grad @ wide_v.swapaxes(-1, -2)
        of_logits = p * (of_p - (grad * out).sum(-1, keepdims=True))
        of_k, of_v = scale * of_logits.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ grad
        sums = [x.reshape(k.shape[0], group, *x.shape[1:]).sum(1) for x in (of_k, of_v)]
        return scale * of_logits @ wide_k, sums[0], sums[1]

    return out, backward


@dataclass(frozen=True)
class Model:
    """What config.json says, by upstream's names; `sparse` is its sparse_config."""

    num_hidden_layers: int = 2
    hidden_size: int = 32
    intermediate_size: int = 48
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    vocab_size: int = 61
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 512
    original_max_position_embeddings: int = 512
    short_factor: tuple[float, ...] = (1.0, 1.1, 1.4, 2.0)
    long_factor: tuple[float, ...] = (1.2, 1.5, 2.5, 4.0)
    scale_emb: float = 12.0
    scale_depth: float = 1.4
    dim_model_base: int = 8
    tie_word_embeddings: bool = False
    attn_use_rope: bool = True
    attn_use_output_gate: bool = False
    sparse: Sizes | None = Sizes()

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


def shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Every weight of a checkpoint by name: a Llama's, and perhaps gates."""
    kept = {
        name: getattr(model, name)
        for name in nsa_1b.Sizes.__dataclass_fields__
        if hasattr(model, name)
    }
    llama = nsa_1b.shapes(nsa_1b.Sizes(**kept))
    found = {name: shape for name, shape in llama.items() if "g_proj" not in name}
    if model.attn_use_output_gate:
        of_gate = (model.num_attention_heads * model.head_dim, model.hidden_size)
        for i in range(model.num_hidden_layers):
            found[f"model.layers.{i}.self_attn.o_gate.weight"] = of_gate
    return found


def angles(model: Model, length: int) -> tuple[Floats, Floats]:
    """Cosines and sines (S, D / 2), scaled, as upstream's table has them.

    The table is made up to max_position_embeddings, and made anew for a longer sequence.
    """
    half = model.head_dim // 2
    original = model.original_max_position_embeddings
    is_long = max(length, model.max_position_embeddings) > original
    factor = np.array(model.long_factor if is_long else model.short_factor)
    angle = np.arange(length)[:, None] / factor * model.rope_theta ** (-np.arange(half) / half)
    scale = np.sqrt(1 + np.log(model.max_position_embeddings / original) / np.log(original))
    return np.cos(angle) * scale, np.sin(angle) * scale


def rotated(x: Floats, cos: Floats, sin: Floats) -> Floats:
    """Of (..., S, D): channels i and i + D/2 are turned."""
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def forward(
    weights: Weights, model: Model, ids: NDArray[np.int64]
) -> tuple[Floats, Callable[[Floats], Weights]]:
    """Logits (B, S, vocabulary), and the gradients of all weights from that of the logits."""
    grads = {name: np.zeros_like(weight) for name, weight in weights.items()}
    residual = model.scale_depth / np.sqrt(model.num_hidden_layers)
    x = model.scale_emb * weights["model.embed_tokens.weight"][ids]
    steps = []
    for i in range(model.num_hidden_layers):
        for part in (_attention_part, nsa_1b._mlp_part):
            change, back = part(weights, grads, model, f"model.layers.{i}", x)
            x = x + residual * change
            steps.append(back)
    normed, back_norm = nsa_1b._norm(weights, grads, "model.norm", x, model.rms_norm_eps)
    head = "model.embed_tokens" if model.tie_word_embeddings else "lm_head"
    divisor = model.hidden_size / model.dim_model_base
    logits, back_head = nsa_1b._linear(weights, grads, head, normed / divisor)

    def backward(grad_logits: Floats) -> Weights:
        grad = back_norm(back_head(grad_logits) / divisor)
        for back in reversed(steps):
            grad = grad + back(residual * grad)
        np.add.at(grads["model.embed_tokens.weight"], ids, model.scale_emb * grad)
        return grads

    return logits, backward


def _attention_part(
    weights: Weights, grads: Weights, model: Model, layer: str, x: Floats
) -> tuple[Floats, Callable[[Floats], Floats]]:
    """o_proj(attention) of the normed x, or o_proj(attention · sigmoid(o_gate))."""
    normed, back_norm = nsa_1b._norm(
        weights, grads, f"{layer}.input_layernorm", x, model.rms_norm_eps
    )
    maps = [
        nsa_1b._linear(weights, grads, f"{layer}.self_attn.{name}_proj", normed) for name in "qkv"
    ]
    flat, backs = zip(*maps, strict=True)
    batch, length, _ = x.shape
    q, k, v = (y.reshape(batch, length, -1, model.head_dim).swapaxes(1, 2) for y in flat)
    cos, sin = angles(model, length)
    if not model.attn_use_rope:
        cos, sin = np.ones_like(cos), np.zeros_like(sin)
    q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    sparse = Sizes(dense_len=length + 1) if model.sparse is None else model.sparse
    results = [attention(q[row], k[row], v[row], sparse) for row in range(batch)]
    attended = np.stack([each for each, _ in results]).swapaxes(1, 2).reshape(batch, length, -1)
    gate, back_gate = np.ones_like(attended), None
    if model.attn_use_output_gate:
        name = f"{layer}.self_attn.o_gate"
        logits, back_gate = nsa_1b._linear(weights, grads, name, normed)
        gate = 1 / (1 + np.exp(-logits))
    out, back_out = nsa_1b._linear(weights, grads, f"{layer}.self_attn.o_proj", attended * gate)

    def backward(grad: Floats) -> Floats:
        of_product = back_out(grad)
        grad = (of_product * gate).reshape(batch, length, -1, model.head_dim).swapaxes(1, 2)
        rows = [back(of_row) for (_, back), of_row in zip(results, grad, strict=True)]
        grad_q, grad_k, grad_v = (np.stack(each) for each in zip(*rows, strict=True))
        grad_q, grad_k = rotated(grad_q, cos, -sin), rotated(grad_k, cos, -sin)
        together = np.zeros_like(normed)
        if back_gate is not None:
            together = back_gate(of_product * attended * gate * (1 - gate))
        for back, y in zip(backs, (grad_q, grad_k, grad_v), strict=True):
            together = together + back(y.swapaxes(1, 2).reshape(batch, length, -1))
        return back_norm(together)

    return out, backward
