"""NSA-1B, SSA-1B and MoBA-1B in float64 NumPy, forward and backward: the oracle of loaded models.

Written from what upstream's modelling code and kernels compute, and from nothing else: no torch,
none of the package's code. Every mask is an explicit boolean array. Weights are a dict under
upstream's names; `forward` gives logits and a function from their gradient to gradients of all
weights.

Arrays are (batch B, heads H, tokens S, head dim D); G query heads share a KV head, and scores
are (B, Hkv, S, blocks).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Weights: TypeAlias = dict[str, Floats]
Backward: TypeAlias = Callable[[Floats], Floats]


@dataclass(frozen=True)
class Sizes:
    """What config.json says, by upstream's names; `selects_only` is SSA and MoBA."""

    num_hidden_layers: int = 2
    hidden_size: int = 32
    intermediate_size: int = 48
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 8
    vocab_size: int = 61
    block_size: int = 4
    block_counts: int = 4
    window_size: int = 6
    rope_theta: float = 500000.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    selects_only: bool = False


def shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Every weight of a checkpoint by name; tied embeddings have no lm_head."""
    width, inner = sizes.hidden_size, sizes.intermediate_size
    heads, kv_heads = sizes.num_attention_heads, sizes.num_key_value_heads
    found = {"model.embed_tokens.weight": (sizes.vocab_size, width), "model.norm.weight": (width,)}
    if not sizes.tie_word_embeddings:
        found["lm_head.weight"] = (sizes.vocab_size, width)
    for i in range(sizes.num_hidden_layers):
        found |= {
            f"model.layers.{i}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (width,),
                "post_attention_layernorm": (width,),
                "self_attn.q_proj": (heads * sizes.head_dim, width),
                "self_attn.k_proj": (kv_heads * sizes.head_dim, width),
                "self_attn.v_proj": (kv_heads * sizes.head_dim, width),
                "self_attn.o_proj": (width, heads * sizes.head_dim),
                "self_attn.g_proj": (3 * heads, width),
                "mlp.gate_proj": (inner, width),
                "mlp.up_proj": (inner, width),
                "mlp.down_proj": (width, inner),
            }.items()
        }
    return found


def forward(
    weights: Weights, sizes: Sizes, ids: NDArray[np.int64]
) -> tuple[Floats, Callable[[Floats], Weights]]:
    """Logits (B, S, vocabulary), and the gradients of all weights from that of the logits."""
    grads = {name: np.zeros_like(weight) for name, weight in weights.items()}
    head = "model.embed_tokens" if sizes.tie_word_embeddings else "lm_head"
    x = weights["model.embed_tokens.weight"][ids]
    steps: list[Backward] = []
    for i in range(sizes.num_hidden_layers):
        for part in (_attention_part, _mlp_part):
            change, back = part(weights, grads, sizes, f"model.layers.{i}", x)
            x = x + change
            steps.append(back)
    normed, back_norm = _norm(weights, grads, "model.norm", x, sizes.rms_norm_eps)
    logits, back_head = _linear(weights, grads, head, normed)

    def backward(grad_logits: Floats) -> Weights:
        grad = back_norm(back_head(grad_logits))
        for back in reversed(steps):
            grad = grad + back(grad)
        np.add.at(grads["model.embed_tokens.weight"], ids, grad)
        return grads

    return logits, backward


def _linear(weights: Weights, grads: Weights, name: str, x: Floats) -> tuple[Floats, Backward]:
    weight = weights[f"{name}.weight"]

    def backward(grad: Floats) -> Floats:
        grads[f"{name}.weight"] += np.einsum("bsn,bse->ne", grad, x)
        return grad @ weight

    return x @ weight.T, backward


def _norm(
    weights: Weights, grads: Weights, name: str, x: Floats, eps: float
) -> tuple[Floats, Backward]:
    """x / sqrt(mean(x²) + eps) · weight."""
    weight = weights[f"{name}.weight"]
    scale = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + eps)

    def backward(grad: Floats) -> Floats:
        grads[f"{name}.weight"] += (grad * x * scale).sum((0, 1))
        grad = grad * weight
        return scale * (grad - x * scale**2 * (grad * x).mean(-1, keepdims=True))

    return x * scale * weight, backward


def _sigmoid(x: Floats) -> Floats:
    return 1 / (1 + np.exp(-x))


def _mlp_part(
    weights: Weights, grads: Weights, sizes: Sizes, layer: str, x: Floats
) -> tuple[Floats, Backward]:
    """down(silu(gate(x)) · up(x)) of the normed x."""
    normed, back_norm = _norm(
        weights, grads, f"{layer}.post_attention_layernorm", x, sizes.rms_norm_eps
    )
    gate, back_gate = _linear(weights, grads, f"{layer}.mlp.gate_proj", normed)
    up, back_up = _linear(weights, grads, f"{layer}.mlp.up_proj", normed)
    s = _sigmoid(gate)
    out, back_down = _linear(weights, grads, f"{layer}.mlp.down_proj", gate * s * up)

    def backward(grad: Floats) -> Floats:
        inner = back_down(grad)
        grad_gate = inner * up * (s + gate * s * (1 - s))
        return back_norm(back_gate(grad_gate) + back_up(inner * gate * s))

    return out, backward


def _attention_part(
    weights: Weights, grads: Weights, sizes: Sizes, layer: str, x: Floats
) -> tuple[Floats, Backward]:
    """o_proj(Σ gate · branch) of the normed x."""
    normed, back_norm = _norm(weights, grads, f"{layer}.input_layernorm", x, sizes.rms_norm_eps)
    maps = [_linear(weights, grads, f"{layer}.self_attn.{name}_proj", normed) for name in "qkvg"]
    (q, k, v, logits), backs = zip(*maps, strict=True)
    batch, length, _ = x.shape
    q, k, v = (y.reshape(batch, length, -1, sizes.head_dim).swapaxes(1, 2) for y in (q, k, v))
    q, k = (rotated(y, sizes.rope_theta) for y in (q, k))
    # Row 3h + c of g_proj: head h; compressed, selected, sliding.
    gates = _sigmoid(logits.reshape(batch, length, -1, 3)).swapaxes(1, 2)  # [B, H, S, 3]
    out, back_attention = attention(q, k, v, gates, sizes)
    out = out.swapaxes(1, 2).reshape(batch, length, -1)
    out, back_out = _linear(weights, grads, f"{layer}.self_attn.o_proj", out)

    def backward(grad: Floats) -> Floats:
        grad = back_out(grad).reshape(batch, length, -1, sizes.head_dim).swapaxes(1, 2)
        grad_q, grad_k, grad_v, grad_gates = back_attention(grad)
        grad_q, grad_k = (rotated(y, sizes.rope_theta, back=True) for y in (grad_q, grad_k))
        grad_logits = grad_gates * gates * (1 - gates)
        flat = [y.swapaxes(1, 2).reshape(batch, length, -1)
                for y in (grad_q, grad_k, grad_v, grad_logits)]  # fmt: skip
        return back_norm(sum(back(y) for back, y in zip(backs, flat, strict=True)))

    return out, backward


def rotated(x: Floats, theta: float, *, back: bool = False) -> Floats:
    """RoPE of the half-split form: channel i and i + D/2 turn by t · theta^(-2i/D)."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[2])[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angle), np.sin(-angle if back else angle)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def attention(
    q: Floats, k: Floats, v: Floats, gates: Floats, sizes: Sizes
) -> tuple[Floats, Callable[[Floats], tuple[Floats, Floats, Floats, Floats]]]:
    """Gated sum of the branches, and gradients of q, k, v and gates from its own."""
    batch, heads, length, dim = q.shape
    kv_heads, block = k.shape[1], sizes.block_size
    t, key, number = np.arange(length)[:, None], np.arange(length), length // block
    pooled_k, pooled_v = (
        y[:, :, : number * block].reshape(batch, kv_heads, number, block, dim).mean(3)
        for y in (k, v)
    )
    compressed = np.arange(number) < (t + 1) // block
    p, _, _ = attend(q, pooled_k, pooled_v, compressed[None, None])
    scores = p.reshape(batch, kv_heads, heads // kv_heads, length, number).sum(2)
    selected = np.zeros((batch, kv_heads, length, length), bool)
    for place in np.ndindex(batch, kv_heads, length):
        chosen = choose(scores[place], place[2], heads // kv_heads, sizes)
        selected[place] = np.isin(key // block, chosen) & (key <= place[2])
    sliding = (key <= t) & (key > t - sizes.window_size)
    masks = {1: selected} if sizes.selects_only else {
        0: compressed[None, None], 1: selected, 2: sliding[None, None]
    }  # fmt: skip
    keys = {0: (pooled_k, pooled_v), 1: (k, v), 2: (k, v)}
    results = {c: attend(q, *keys[c], mask) for c, mask in masks.items()}
    out = sum(gates[..., c, None] * result[1] for c, result in results.items())

    def backward(grad: Floats) -> tuple[Floats, Floats, Floats, Floats]:
        grads = [np.zeros_like(y) for y in (q, k, v, gates)]
        for c, (_, branch, back) in results.items():
            grads[3][..., c] = (grad * branch).sum(-1)
            of_q, of_k, of_v = back(grad * gates[..., c, None])
            if c == 0:
                of_k, of_v = (
                    np.pad(
                        np.repeat(y, block, axis=2) / block,
                        ((0, 0), (0, 0), (0, length - number * block), (0, 0)),
                    )
                    for y in (of_k, of_v)
                )
            for total, more in zip(grads, (of_q, of_k, of_v), strict=False):
                total += more
        return grads[0], grads[1], grads[2], grads[3]

    return out, backward


def attend(
    q: Floats, k: Floats, v: Floats, mask: NDArray[np.bool_]
) -> tuple[Floats, Floats, Callable[[Floats], tuple[Floats, Floats, Floats]]]:
    """Probabilities, output and backward of softmax(q k^T / sqrt(D)) v; 0 where all is hidden."""
    group, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
    wide_k, wide_v = (np.repeat(y, group, axis=1) for y in (k, v))
    if mask.shape[1] > 1:
        mask = np.repeat(mask, group, axis=1)
    logits = np.where(mask, scale * q @ wide_k.swapaxes(-1, -2), -np.inf)
    top = logits.max(-1, keepdims=True, initial=-np.inf)
    weights = np.exp(logits - np.where(np.isinf(top), 0.0, top))
    total = weights.sum(-1, keepdims=True)
    p = weights / np.where(total == 0, 1.0, total)
    out = p @ wide_v

    def backward(grad: Floats) -> tuple[Floats, Floats, Floats]:
        of_p = grad @ wide_v.swapaxes(-1, -2)
        of_logits = p * (of_p - (grad * out).sum(-1, keepdims=True))
        of_k, of_v = scale * of_logits.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ grad
        shape = (*k.shape[:2], group, *k.shape[2:])
        return scale * of_logits @ wide_k, of_k.reshape(shape).sum(2), of_v.reshape(shape).sum(2)

    return p, out, backward


def choose(scores: Floats, t: int, group: int, sizes: Sizes) -> list[int]:
    """Blocks of one query, as upstream's kernel finds them; scores are of whole blocks.

    It goes over tiles of `block_size` blocks, sorts each, and merges: half a tile of the best so
    far and half a tile of the newest. The first tile is taken as it is. The query's own block
    scores 1 per head.
    """
    own, tile = t // sizes.block_size, sizes.block_size
    score = np.zeros(own + 1)
    score[: min(own + 1, len(scores))] = scores[: own + 1]
    score[own] = group
    kept: list[int] = []
    for start in range(0, own + 1, tile):
        newest = sorted(range(start, min(start + tile, own + 1)), key=lambda j: (-score[j], j))
        if start:
            newest = sorted([*kept[: tile // 2], *newest[: tile // 2]], key=lambda j: -score[j])
        kept = newest
    return sorted(kept[: sizes.block_counts])
