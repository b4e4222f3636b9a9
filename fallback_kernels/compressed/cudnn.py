"""The compressed branch of the core operator: cuDNN's causal attention by residue range.

Nothing is copied on the way in: queries are strided views. Going forward, a range's output stays
in its own memory, where the gated sum finds it (`fold.fold_position`). Residues are cuDNN's
batch, over which keys expand. A batch of several rows needs that dimension itself: there residues
join the heads, and keys are repeated once a residue.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nsa_flex.fallback_kernels.common.strides import rows_contiguous
from nsa_flex.fallback_kernels.compressed.cudnn_op import causal, causal_gradients
from nsa_flex.fallback_kernels.compressed.fold import ResidueRange, range_rows_view


def attend_range(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    residues: ResidueRange,
    scale: float,
    reach: int,
    stride: int,
) -> tuple[Tensor, Tensor]:
    """The branch for one residue range.

    Args:
        query: (B, S, Hq, D), contiguous.
        key: (B, Hkv, N, D) and value (B, Hkv, N, Dv), any strides but the last.

    Returns:
        (B, rows, width * Hq, Dv) and float32 (B, width * Hq, rows), contiguous.
    """
    batch, _, heads, _ = query.shape
    width, dim = residues.width * heads, value.shape[3]
    if residues.is_empty:
        out = query.new_empty((batch, residues.rows, width, dim))
        return out, query.new_empty((batch, width, residues.rows), dtype=torch.float32)
    q = _problems(range_rows_view(query, residues, reach, stride), residues)
    k, v = (_keys(x, residues) for x in (key, value))
    if residues.rows == 1:
        out, lse = _one_key(q, k, v, scale)
    else:
        out, lse = causal(q, k, v, scale)
    return _rows(out, batch), lse.reshape(batch, width, residues.rows).contiguous()


class RangeGradients(NamedTuple):
    """What `range_gradients` returns."""

    query: Tensor  # (B, rows, width * Hq, D), contiguous
    key: Tensor  # (B, width, Hkv, rows, D), the last dimension contiguous
    value: Tensor  # (B, width, Hkv, rows, Dv), likewise


def range_gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    residues: ResidueRange,
    scale: float,
    reach: int,
    stride: int,
) -> RangeGradients:
    """Gradients of a range's queries, and of its keys and values residue by residue.

    Args:
        grad, out: (B, S, Hq, Dv), contiguous: all ranges.
        query: (B, S, Hq, D), contiguous.
        lse: float32 (B, width * Hq, rows), of the range. Less ln|gate| it gives the gradients of
            `|gate| * grad`.
    """
    batch, _, heads, dim = query.shape
    if residues.is_empty:
        of_query = query.new_empty((batch, residues.rows, residues.width * heads, dim))
        return RangeGradients(
            of_query, *(x.new_empty((batch, 0, *x.shape[1:])) for x in (key, value))
        )
    do, q, o = (
        _problems(range_rows_view(x, residues, reach, stride), residues)
        for x in (grad, query, out)
    )
    k, v = (_keys(x, residues) for x in (key, value))
    lse = lse.view(q.shape[:3])
    if residues.rows == 1:
        of_query, *of_keys = _one_key_gradients(do, q, k, v, o, lse, scale)
    else:
        of_query, *of_keys = causal_gradients(do, q, k, v, o, lse, scale)
    # Residues are the batch of one row, or among the heads of several.
    partials = (rows_contiguous(x) for x in of_keys)
    by_residue = (x.unflatten(1, (residues.width, -1)) if batch > 1 else x[None] for x in partials)
    return RangeGradients(_rows(of_query, batch), *by_residue)


def _problems(rows: Tensor, residues: ResidueRange) -> Tensor:
    """(B, rows, width * H, D) as cuDNN's (batch, heads, rows, D); a view."""
    if rows.shape[0] > 1:
        return rows.transpose(1, 2)
    return rows[0].unflatten(1, (residues.width, -1)).permute(1, 2, 0, 3)


def _rows(problems: Tensor, batch: int) -> Tensor:
    """The inverse of `_problems`, contiguous."""
    if batch > 1:
        return problems.transpose(1, 2).contiguous()
    return problems.permute(2, 0, 1, 3).contiguous().flatten(1, 2)[None]


def _keys(key: Tensor, residues: ResidueRange) -> Tensor:
    """Keys of a range as `_problems` lays out its queries."""
    key = key[:, :, : residues.rows]
    if key.shape[0] > 1:
        return key.repeat(1, residues.width, 1, 1)
    return key.expand(residues.width, -1, -1, -1)


# cuDNN has no backward for one row and one key; the softmax of one key is 1.


def _one_key(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    group = query.shape[1] // key.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (key, value))  # [batch, heads, 1, D]
    return v, (query.float() * k.float()).sum(-1) * scale


def _one_key_gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    group = query.shape[1] // key.shape[1]
    k, v = (x.repeat_interleave(group, 1).float() for x in (key, value))
    do, q = grad.float(), query.float()
    # Below 1 where the softmax has keys of another part as well, or is multiplied by a gate.
    p = ((q * k).sum(-1) * scale - lse).exp()[..., None]  # [batch, heads, 1, 1]
    ds = p * (do * (v - out.float())).sum(-1, keepdim=True) * scale
    of_key, of_value = (x.unflatten(1, (key.shape[1], -1)).sum(2) for x in (ds * q, p * do))
    return (ds * k).to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)
