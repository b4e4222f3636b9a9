"""Native Sparse Attention in float64 NumPy: what every backend is held to.

Written from the definition (arXiv 2502.11089, section 3; its symbols l, d, l', n, w are the
fields of `NSAConfig`) and from nothing else: no torch, none of the package's code. Every mask is
an explicit boolean array and every softmax is written out, so that each function can be checked
by eye. Cost and memory grow with Sq x Sk; meant for up to some hundred tokens.

Arrays are (batch B, heads H, tokens S, head dim D). The masks are (B, H, queries, keys), where B
and H may be 1 and H may be the number of KV heads. A query's position is t = offset + its index;
`offset` is an int or one per batch row and defaults to Sk - Sq. `document_start` (B, Sq) is the
index of the first key of each query's document, a multiple of l': nothing before it is seen, and
initial blocks are counted from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from nsa_flex.config import NSAConfig

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

BRANCHES = ("compressed", "selected", "sliding")


@dataclass
class Forward:
    """Everything that one evaluation yields; Hq query heads, Hkv KV heads.

    Attributes:
        out: (B, Hq, Sq, Dv), the gated sum of the three branches.
        outputs: branch name to its own output (B, Hq, Sq, Dv), before the gate.
        lse: branch name to the natural log-sum-exp (B, Hq, Sq); -inf where nothing is seen.
        blocks: (B, Hkv, Sq, n), chosen blocks ascending, -1 behind the last.
        scores: (B, Hkv, Sq, ceil(Sk / l')), Eq. 10.
    """

    out: Floats
    outputs: dict[str, Floats]
    lse: dict[str, Floats]
    blocks: Ints
    scores: Floats


@dataclass
class Gradients:
    """Gradients of sum(out * grad_out), named and shaped as the arguments of `nsa_attention`.

    `sliding_key` and `sliding_value` are None where the sliding branch used key and value: its
    share is then part of `key` and `value`.
    """

    query: Floats
    key: Floats
    value: Floats
    compressed_key: Floats
    compressed_value: Floats
    gates: Floats
    sliding_key: Floats | None = None
    sliding_value: Floats | None = None


class Problem(NamedTuple):
    """Inputs of `forward`, in its order: `forward(*problem, cfg)`."""

    query: Floats
    key: Floats
    value: Floats
    compressed_key: Floats
    compressed_value: Floats
    gates: Floats


def positions(num_queries: int, offset: ArrayLike) -> Ints:
    """Position t of every query, (B or 1, Sq)."""
    return np.asarray(offset, np.int64).reshape(-1, 1) + np.arange(num_queries)


def document_starts(document_start: ArrayLike | None, t: Ints, cfg: NSAConfig) -> Ints:
    """First key of every query's document, (B or 1, Sq): 0 unless given."""
    if document_start is None:
        return np.zeros_like(t)
    start = np.asarray(document_start, np.int64)
    assert start.ndim == 2, f"document_start must be (B, Sq), got {start.shape}"
    assert start.shape[1] == t.shape[1], f"document_start {start.shape}, {t.shape[1]} queries"
    assert np.all(start % cfg.select_block_size == 0), "document_start must be a multiple of l'"
    return start


def compressed_mask(
    num_queries: int,
    num_keys: int,
    num_blocks: int,
    cfg: NSAConfig,
    offset: ArrayLike = 0,
    document_start: ArrayLike | None = None,
) -> Bools:
    """Block i, tokens [i*d, i*d + l), is seen once its last token is: (B or 1, 1, Sq, N).

    A last block that reaches past the keys does not exist, so nobody sees it.
    """
    t = positions(num_queries, offset)
    start = document_starts(document_start, t, cfg)[..., None]  # [B, Sq, 1]
    first = np.arange(num_blocks) * cfg.compress_stride
    last = first + cfg.compress_block_size - 1
    seen = (last <= t[..., None]) & (first >= start) & (last < num_keys)
    return seen[:, None]


def sliding_mask(
    num_queries: int,
    num_keys: int,
    cfg: NSAConfig,
    offset: ArrayLike = 0,
    document_start: ArrayLike | None = None,
) -> Bools:
    """Keys in [t - w + 1, t]: (B or 1, 1, Sq, Sk)."""
    t = positions(num_queries, offset)
    start = document_starts(document_start, t, cfg)[..., None]  # [B, Sq, 1]
    key = np.arange(num_keys)
    seen = (key <= t[..., None]) & (key > t[..., None] - cfg.window_size) & (key >= start)
    return seen[:, None]


def selected_mask(
    blocks: ArrayLike,
    num_keys: int,
    cfg: NSAConfig,
    offset: ArrayLike = 0,
    document_start: ArrayLike | None = None,
) -> Bools:
    """Keys up to t inside the chosen blocks (B, Hkv, Sq, n): (B, Hkv, Sq, Sk)."""
    chosen = np.asarray(blocks, np.int64)
    t = positions(chosen.shape[2], offset)
    start = document_starts(document_start, t, cfg)[:, None, :, None]  # [B, 1, Sq, 1]
    key = np.arange(num_keys)
    inside = np.zeros((*chosen.shape[:3], num_keys), bool)
    for slot in range(chosen.shape[3]):
        # The padding, -1, is no key's block.
        inside |= chosen[..., slot, None] == key // cfg.select_block_size
    return inside & (key <= t[:, None, :, None]) & (key >= start)


def per_query_head(x: NDArray[Any], num_query_heads: int) -> NDArray[Any]:
    """(B, H, ...) to (B, Hq, ...): query head h reads head h // (Hq / H)."""
    return np.repeat(x, num_query_heads // x.shape[1], axis=1)


def per_kv_head(x: Floats, num_kv_heads: int) -> Floats:
    """(B, Hq, ...) to (B, Hkv, ...): the sum over the query heads of each group."""
    batch, num_query_heads, *rest = x.shape
    return x.reshape(batch, num_kv_heads, num_query_heads // num_kv_heads, *rest).sum(axis=2)


def branch(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, mask: Bools, scale: float
) -> tuple[Floats, Floats, Floats]:
    """softmax(scale * q k^T) v over the keys that the mask shows.

    Args:
        q, k, v: (B, Hq, Sq, D), (B, Hkv, Sk, D), (B, Hkv, Sk, Dv).
        mask: True where seen, (B or 1; 1, Hkv or Hq; Sq; Sk).
        scale: factor of the logits.

    Returns:
        output (B, Hq, Sq, Dv), log-sum-exp (B, Hq, Sq), probabilities (B, Hq, Sq, Sk). A query
        that sees nothing gets 0, -inf and 0.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    heads = q.shape[1]
    logits = scale * (q @ np.swapaxes(per_query_head(k, heads), -1, -2))
    logits = np.where(per_query_head(mask, heads), logits, -np.inf)
    top = logits.max(axis=-1, keepdims=True, initial=-np.inf)
    top = np.where(top == -np.inf, 0.0, top)
    weights = np.exp(logits - top)
    total = weights.sum(axis=-1, keepdims=True)
    p = weights / np.where(total == 0.0, 1.0, total)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + top)[..., 0]
    return p @ per_query_head(v, heads), lse, p


def branch_backward(
    q: Floats, k: Floats, v: Floats, mask: Bools, scale: float, grad_out: Floats
) -> tuple[Floats, Floats, Floats]:
    """Gradients of sum(branch output * grad_out) for q, k and v; 0 where nothing is seen."""
    heads, kv_heads = q.shape[1], k.shape[1]
    out, _, p = branch(q, k, v, mask, scale)
    grad_p = grad_out @ np.swapaxes(per_query_head(v, heads), -1, -2)
    # d softmax: p * (grad_p - sum_k p_k grad_p_k), and that sum is grad_out . out.
    grad_logits = p * (grad_p - (grad_out * out).sum(axis=-1, keepdims=True))
    grad_q = scale * (grad_logits @ per_query_head(k, heads))
    grad_k = scale * (np.swapaxes(grad_logits, -1, -2) @ q)
    grad_v = np.swapaxes(p, -1, -2) @ grad_out
    return grad_q, per_kv_head(grad_k, kv_heads), per_kv_head(grad_v, kv_heads)


def dense_causal(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    scale: float | None = None,
    offset: ArrayLike | None = None,
) -> Floats:
    """Plain causal attention; the last query sees the last key unless `offset` says otherwise."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    offset = k.shape[2] - q.shape[2] if offset is None else offset
    t = positions(q.shape[2], offset)
    seen = np.arange(k.shape[2]) <= t[..., None]
    return branch(q, k, v, seen[:, None], scale)[0]


def block_scores(p_cmp: ArrayLike, cfg: NSAConfig, num_blocks: int, num_kv_heads: int) -> Floats:
    """Eq. 9 in its geometric reading, then Eq. 10: (B, Hq, Sq, N) to (B, Hkv, Sq, num_blocks).

    p_slc[j] = sum over m < l'/d and n < l/d of p_cmp[(l'/d) j + m - n], terms outside [0, N)
    being 0, summed over the query heads of each of the `num_kv_heads` groups.
    """
    p = np.asarray(p_cmp, np.float64)
    per_block = cfg.select_block_size // cfg.compress_stride
    overlap = cfg.compress_block_size // cfg.compress_stride
    p_slc = np.zeros((*p.shape[:-1], num_blocks))
    for j in range(num_blocks):
        for m in range(per_block):
            for n in range(overlap):
                i = per_block * j + m - n
                if 0 <= i < p.shape[-1]:
                    p_slc[..., j] += p[..., i]
    return per_kv_head(p_slc, num_kv_heads)


def candidate_blocks(t: int, cfg: NSAConfig, first_block: int = 0) -> range:
    """Blocks of the document up to the query's own; empty where it starts after t."""
    return range(first_block, t // cfg.select_block_size + 1)


def forced_blocks(t: int, cfg: NSAConfig, first_block: int = 0) -> set[int]:
    """The first `num_initial_blocks` and the last `num_local_blocks` candidates."""
    candidates = candidate_blocks(t, cfg, first_block)
    local = candidates[max(0, len(candidates) - cfg.num_local_blocks) :]
    return {*candidates[: cfg.num_initial_blocks], *local}


def parts_of_choice(t: int, cfg: NSAConfig, first_block: int = 0) -> list[tuple[range, int]]:
    """Candidates in parts that are chosen from apart, and how many each part gives.

    "top_k": all of them give n. "tiled_top_k": past the first n blocks of the document, its tiles
    of n blocks before the query's own tile give n/2, and that tile gives n/2.
    """
    candidates, n = candidate_blocks(t, cfg, first_block), cfg.num_selected_blocks
    if getattr(cfg, "selection", "top_k") == "top_k" or len(candidates) <= n:
        return [(candidates, n)]
    tile = (len(candidates) - 1) // n * n
    return [(candidates[:tile], n // 2), (candidates[tile:], n // 2)]


def choose(scores: ArrayLike, t: int, cfg: NSAConfig, first_block: int = 0) -> list[int]:
    """Blocks, ascending, of a query at position t whose document starts at `first_block`.

    Args:
        scores: Eq. 10 of this query, one per block.

    Returns:
        at most n candidates: the forced ones, then the best scores, ties to the lower index.
    """
    score = np.asarray(scores, np.float64)
    forced = forced_blocks(t, cfg, first_block)
    chosen: list[int] = []
    for part, count in parts_of_choice(t, cfg, first_block):
        chosen += sorted(part, key=lambda j: (j not in forced, -score[j], j))[:count]
    return sorted(chosen)


def choose_all(
    scores: Floats,
    cfg: NSAConfig,
    offset: ArrayLike = 0,
    document_start: ArrayLike | None = None,
) -> Ints:
    """`choose` for every query: (B, Hkv, Sq, blocks) to (B, Hkv, Sq, n), padded with -1."""
    batch, kv_heads, num_queries, _ = scores.shape
    t, first = _query_places(batch, num_queries, cfg, offset, document_start)
    blocks = np.full((batch, kv_heads, num_queries, cfg.num_selected_blocks), -1, np.int64)
    for b, h, s in np.ndindex(batch, kv_heads, num_queries):
        chosen = choose(scores[b, h, s], int(t[b, s]), cfg, int(first[b, s]))
        blocks[b, h, s, : len(chosen)] = chosen
    return blocks


def choice_excess(
    blocks: ArrayLike,
    scores: ArrayLike,
    cfg: NSAConfig,
    offset: ArrayLike = 0,
    document_start: ArrayLike | None = None,
) -> float:
    """How far a choice (B, Hkv, Sq, n) is from the best by these scores; 0 for a best one.

    A backend scores in float32 and may swap blocks whose scores agree to its rounding. The
    excess is the most, over all queries, by which a block left out outscores one freely taken.

    Raises:
        AssertionError: what rounding cannot excuse: blocks not ascending, repeated, future or of
            another document; a forced one missing; a wrong count; padding before the end.
    """
    blocks, scores = np.asarray(blocks, np.int64), np.asarray(scores, np.float64)
    batch, kv_heads, num_queries, slots = blocks.shape
    assert slots == cfg.num_selected_blocks, f"{slots} slots, expected {cfg.num_selected_blocks}"
    t, first = _query_places(batch, num_queries, cfg, offset, document_start)
    excess = 0.0
    for b, h, s in np.ndindex(batch, kv_heads, num_queries):
        place = int(t[b, s]), cfg, int(first[b, s])
        candidates, forced = set(candidate_blocks(*place)), forced_blocks(*place)
        parts = [(set(part), min(most, len(part))) for part, most in parts_of_choice(*place)]
        count = sum(number for _, number in parts)
        chosen = blocks[b, h, s, :count].tolist()
        got = f"row {b}, KV head {h}, query {s} has blocks {blocks[b, h, s].tolist()}"
        assert (blocks[b, h, s, count:] == -1).all(), f"{got}; expected {count}, then -1"
        assert chosen == sorted(set(chosen)), f"{got}; expected ascending, each once"
        assert candidates.issuperset(chosen), f"{got}; candidates are {sorted(candidates)}"
        assert forced.issubset(chosen), f"{got}; forced are {sorted(forced)}"
        for part, number in parts:
            assert len(part.intersection(chosen)) == number, f"{got}; {number} of {sorted(part)}"
            taken = [scores[b, h, s, j] for j in part.intersection(chosen) - forced]
            left_out = [scores[b, h, s, j] for j in part.difference(chosen)]
            if taken and left_out:
                excess = max(excess, float(max(left_out) - min(taken)))
    return excess


def _query_places(
    batch: int,
    num_queries: int,
    cfg: NSAConfig,
    offset: ArrayLike,
    document_start: ArrayLike | None,
) -> tuple[Ints, Ints]:
    """Every query's position and its document's first block, both (B, Sq)."""
    t = positions(num_queries, offset)
    first = document_starts(document_start, t, cfg) // cfg.select_block_size
    return np.broadcast_to(t, (batch, num_queries)), np.broadcast_to(first, (batch, num_queries))


def every_gate(gates: ArrayLike, branches: Sequence[str]) -> Floats:
    """Gates (B, Hq, Sq, 3) from those of some branches, in the order of `BRANCHES`: 0 else."""
    given = dict(zip(branches, np.moveaxis(np.asarray(gates, np.float64), -1, 0), strict=True))
    absent = np.zeros(np.shape(gates)[:-1])
    return np.stack([given.get(name, absent) for name in BRANCHES], -1)


def forward(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    ck: ArrayLike,
    cv: ArrayLike,
    gates: ArrayLike,
    cfg: NSAConfig,
    *,
    scale: float | None = None,
    sliding_key: ArrayLike | None = None,
    sliding_value: ArrayLike | None = None,
    offset: ArrayLike | None = None,
    document_start: ArrayLike | None = None,
    blocks: ArrayLike | None = None,
) -> Forward:
    """The three branches and their gated sum.

    Args:
        q, k, v: (B, Hq, Sq, D), (B, Hkv, Sk, D), (B, Hkv, Sk, Dv).
        ck, cv: compressed keys and values, (B, Hkv, N, D) and (B, Hkv, N, Dv).
        gates: (B, Hq, Sq, 3) in the order of `BRANCHES`.
        cfg: anything with the fields of `NSAConfig`.
        scale: factor of the logits, 1/sqrt(D) unless given.
        sliding_key, sliding_value: keys and values of the sliding branch, k and v unless given.
        offset: position of query 0, an int or (B,); Sk - Sq unless given.
        document_start: (B, Sq), first key of each query's document.
        blocks: (B, Hkv, Sq, n), a choice to use instead of making one.
    """
    q, k, v, ck, cv, gates = (np.asarray(x, np.float64) for x in (q, k, v, ck, cv, gates))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    offset = k.shape[2] - q.shape[2] if offset is None else offset
    sk = k if sliding_key is None else np.asarray(sliding_key, np.float64)
    sv = v if sliding_value is None else np.asarray(sliding_value, np.float64)
    num_queries, num_keys = q.shape[2], k.shape[2]
    outputs, lse = {}, {}

    mask = compressed_mask(num_queries, num_keys, ck.shape[2], cfg, offset, document_start)
    outputs["compressed"], lse["compressed"], p_cmp = branch(q, ck, cv, mask, scale)

    num_blocks = -(-num_keys // cfg.select_block_size)
    scores = block_scores(p_cmp, cfg, num_blocks, num_kv_heads=k.shape[1])
    if blocks is None:
        blocks = choose_all(scores, cfg, offset, document_start)
    blocks = np.asarray(blocks, np.int64)
    mask = selected_mask(blocks, num_keys, cfg, offset, document_start)
    outputs["selected"], lse["selected"], _ = branch(q, k, v, mask, scale)

    mask = sliding_mask(num_queries, num_keys, cfg, offset, document_start)
    outputs["sliding"], lse["sliding"], _ = branch(q, sk, sv, mask, scale)

    out = np.sum([gates[..., c, None] * outputs[name] for c, name in enumerate(BRANCHES)], axis=0)
    return Forward(out, outputs, lse, blocks, scores)


def backward(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    ck: ArrayLike,
    cv: ArrayLike,
    gates: ArrayLike,
    cfg: NSAConfig,
    grad_out: ArrayLike,
    *,
    scale: float | None = None,
    sliding_key: ArrayLike | None = None,
    sliding_value: ArrayLike | None = None,
    offset: ArrayLike | None = None,
    document_start: ArrayLike | None = None,
    blocks: ArrayLike | None = None,
) -> Gradients:
    """Gradients of sum(forward(...).out * grad_out); the choice of blocks carries none.

    Arguments as for `forward`, and grad_out (B, Hq, Sq, Dv).
    """
    q, k, v, ck, cv, gates = (np.asarray(x, np.float64) for x in (q, k, v, ck, cv, gates))
    grad_out = np.asarray(grad_out, np.float64)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    offset = k.shape[2] - q.shape[2] if offset is None else offset
    sk = k if sliding_key is None else np.asarray(sliding_key, np.float64)
    sv = v if sliding_value is None else np.asarray(sliding_value, np.float64)
    num_queries, num_keys = q.shape[2], k.shape[2]
    result = forward(
        *(q, k, v, ck, cv, gates, cfg),
        scale=scale,
        sliding_key=sk,
        sliding_value=sv,
        offset=offset,
        document_start=document_start,
        blocks=blocks,
    )

    mask = compressed_mask(num_queries, num_keys, ck.shape[2], cfg, offset, document_start)
    grad_branch = gates[..., 0, None] * grad_out
    q_compressed, grad_ck, grad_cv = branch_backward(q, ck, cv, mask, scale, grad_branch)

    mask = selected_mask(result.blocks, num_keys, cfg, offset, document_start)
    grad_branch = gates[..., 1, None] * grad_out
    q_selected, grad_k, grad_v = branch_backward(q, k, v, mask, scale, grad_branch)

    mask = sliding_mask(num_queries, num_keys, cfg, offset, document_start)
    grad_branch = gates[..., 2, None] * grad_out
    q_sliding, grad_sk, grad_sv = branch_backward(q, sk, sv, mask, scale, grad_branch)

    grad_gates = [(result.outputs[name] * grad_out).sum(axis=-1) for name in BRANCHES]
    return Gradients(
        query=q_compressed + q_selected + q_sliding,
        key=grad_k + grad_sk if sliding_key is None else grad_k,
        value=grad_v + grad_sv if sliding_value is None else grad_v,
        compressed_key=grad_ck,
        compressed_value=grad_cv,
        gates=np.stack(grad_gates, axis=-1),
        sliding_key=None if sliding_key is None else grad_sk,
        sliding_value=None if sliding_value is None else grad_sv,
    )


def compress_mean(x: ArrayLike, cfg: NSAConfig) -> Floats:
    """Mean of tokens [i*d, i*d + l) for every whole block: (B, H, S, D) to (B, H, N, D)."""
    x = np.asarray(x, np.float64)
    last_start = x.shape[2] - cfg.compress_block_size
    out = np.zeros((*x.shape[:2], len(range(0, last_start + 1, cfg.compress_stride)), x.shape[3]))
    for i, start in enumerate(range(0, last_start + 1, cfg.compress_stride)):
        out[:, :, i] = x[:, :, start : start + cfg.compress_block_size].mean(axis=2)
    return out


def forward_each_document(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    gates: ArrayLike,
    cfg: NSAConfig,
    lengths: Sequence[int],
    *,
    scale: float | None = None,
    sliding_key: ArrayLike | None = None,
    sliding_value: ArrayLike | None = None,
) -> list[Forward]:
    """Packed documents by definition: each one alone, compressed by the mean.

    Args:
        q, k, v, gates: as for `forward`, the documents one behind the other.
        lengths: tokens of each document, the same for every batch row, summing to S.
    """
    q, k, v, gates = (np.asarray(x, np.float64) for x in (q, k, v, gates))
    sk = k if sliding_key is None else np.asarray(sliding_key, np.float64)
    sv = v if sliding_value is None else np.asarray(sliding_value, np.float64)
    assert sum(lengths) == q.shape[2], f"lengths {list(lengths)} of {q.shape[2]} tokens"
    ends = np.cumsum(lengths)
    results = []
    for start, end in zip(ends - lengths, ends, strict=True):
        own_q, own_k, own_v, own_gates, own_sk, own_sv = (
            x[:, :, start:end] for x in (q, k, v, gates, sk, sv)
        )
        ck, cv = compress_mean(own_k, cfg), compress_mean(own_v, cfg)
        results.append(
            forward(
                *(own_q, own_k, own_v, ck, cv, own_gates, cfg),
                scale=scale,
                sliding_key=own_sk,
                sliding_value=own_sv,
            )
        )
    return results


def forward_documents(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    gates: ArrayLike,
    cfg: NSAConfig,
    lengths: Sequence[int],
    **options: Any,
) -> Floats:
    """The outputs (B, Hq, S, Dv) of `forward_each_document`, one behind the other."""
    documents = forward_each_document(q, k, v, gates, cfg, lengths, **options)
    return np.concatenate([document.out for document in documents], axis=2)


def relative_error(got: ArrayLike, want: ArrayLike) -> float:
    """||got - want|| / ||want||; 0 when both are zero (or empty), inf when only `want` is.

    Equal infinities (the log-sum-exp of a query that sees nothing) agree and are left out; any
    other value that is not finite, on either side, makes the error inf.

    Raises:
        ValueError: the shapes differ.
    """
    a, b = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if a.shape != b.shape:
        raise ValueError(f"got has shape {a.shape}, want has {b.shape}; they must be equal")
    counted = ~(np.isinf(b) & (a == b))
    a, b = a[counted], b[counted]
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("inf")
    difference, size = float(np.linalg.norm(a - b)), float(np.linalg.norm(b))
    if difference == 0.0:
        return 0.0
    return difference / size if size else float("inf")


def random_problem(
    rng: np.random.Generator,
    cfg: NSAConfig,
    num_keys: int,
    *,
    batch: int = 1,
    kv_heads: int = 2,
    group_size: int = 2,
    head_dim: int = 8,
    value_dim: int | None = None,
    num_queries: int | None = None,
    compression: str = "mean",
) -> Problem:
    """Normal q, k, v and gates uniform in (0, 1).

    Args:
        rng: source of the numbers.
        num_keys: Sk.
        num_queries: Sq, the last ones; Sk unless given.
        compression: "mean" compresses k and v by `compress_mean`, "random" draws ck and cv.
    """
    assert compression in ("mean", "random"), compression
    value_dim = head_dim if value_dim is None else value_dim
    num_queries = num_keys if num_queries is None else num_queries
    heads = kv_heads * group_size
    q = rng.standard_normal((batch, heads, num_queries, head_dim))
    k = rng.standard_normal((batch, kv_heads, num_keys, head_dim))
    v = rng.standard_normal((batch, kv_heads, num_keys, value_dim))
    gates = rng.uniform(size=(batch, heads, num_queries, len(BRANCHES)))
    ck, cv = compress_mean(k, cfg), compress_mean(v, cfg)
    if compression == "random":
        ck, cv = rng.standard_normal(ck.shape), rng.standard_normal(cv.shape)
    return Problem(q, k, v, ck, cv, gates)
