"""One decode step on CUDA: append, compress, score, select top-k blocks, attend, combine.

All that changes from step to step is in `lengths`, on the device: grids and shapes are constant,
nothing synchronises with the host, and a step can be captured in a CUDA graph.
`lengths` counts each row's tokens before the new ones; new token i of row b has position
lengths[b] + i. No function changes it.

Needs triton; import it only where it is to run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_flex.config import NSAConfig
from nsa_flex.fallback_kernels.decode import checks, operators
from nsa_flex.fallback_kernels.decode.config import DecodePlan
from nsa_flex.fallback_kernels.decode.launch import Cache, Gating, Phi, run
from nsa_flex.fallback_kernels.launch.direct import directly, is_plain


class DecodeAux(NamedTuple):
    """What `return_aux=True` adds.

    blocks: int32 (B, Hkv, T, n), selected blocks, ascending, -1 past the last; n is 0 without a
        selected branch.
    lse: float32 (B, Hq, T, C), natural log-sum-exp of the config's branches in its order; -inf
        where nothing is seen.
    """

    blocks: Tensor
    lse: Tensor


unsupported_reason = checks.unsupported_reason
_step = directly(operators.step)


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    compressed_key: Tensor,
    compressed_value: Tensor,
    gates: Tensor,
    lengths: Tensor,
    **options: Any,
) -> Tensor | tuple[Tensor, DecodeAux]:
    """`step` over a cache that holds the T tokens already, and what they completed.

    Args:
        key, value: tokens from slot 0 of each row, those of the queries included. Nothing behind
            them is read.
        lengths: int32 (B,), tokens of each row before those of the queries.
        options: config, scale, gate_offset, gate_bias, num_sets and return_aux of `step`.
    """
    cache = (key, value, compressed_key, compressed_value)
    return step(query, None, None, *cache, gates, lengths, **options)


def step(
    query: Tensor,
    new_key: Tensor | None,
    new_value: Tensor | None,
    key: Tensor,
    value: Tensor,
    compressed_key: Tensor,
    compressed_value: Tensor,
    gates: Tensor,
    lengths: Tensor,
    *,
    config: NSAConfig,
    scale: float | None = None,
    phi: Phi | None = None,
    may_complete: bool = True,
    gate_offset: Tensor | None = None,
    gate_bias: Tensor | None = None,
    num_sets: int = 1,
    return_aux: bool = False,
) -> Tensor | tuple[Tensor, DecodeAux]:
    """Stores T new tokens a row, compresses the blocks that they complete, and attends.

    New token i of row b goes into slot lengths[b] + i; block i is complete once token i·d + l - 1
    is stored. Then `o = sum_c g_c · Attention_c(q)` over the config's branches, as
    `nsa_flex.nsa_attention` computes it for the queries at positions lengths ... lengths + T - 1.
    All query heads of a group share each read of a key or value. One new token a row takes four
    kernels, or fewer without some branches, and two more for φ of the kinds linear and mlp where
    a branch reads compressed keys.

    Args:
        query: (B, Hq, T, D), T of 1 ... 16, dtype of the cache, any strides.
        new_key: (B, H, T, D), new_value: (B, H, T, Dv), any strides and float dtype; rounded to
            the cache's. Both None: `decode_attention`.
        key: (B, H, C, D), value: (B, H, C, Dv), tokens from slot 0 of each row, last dimension
            contiguous. Nothing behind them is read; slots from C on are left out.
        compressed_key: (B, Hkv, Ncap, D), compressed_value: (B, Hkv, Ncap, Dv), with
            Ncap >= (C - l) // d + 1. Without a compressed branch one row of values will do, which
            takes anything; without a selected one as well Ncap may be 0.
        gates: (B, Hq, T, C), of the config's branches in its order; any float dtype and strides.
        lengths: int32 (B,), tokens of each row before the T new ones.
        scale: factor of the logits, 1/sqrt(D) unless given.
        phi: mean unless given.
        may_complete: False where the caller knows that no row completes a block; φ linear and mlp
            then need no parameters.
        gate_offset: (C,); `gates` are then logits, and a gate is their sigmoid plus the offset,
            rounded to their dtype.
        gate_bias: (C · Hq,), added to the logits in float32, C a head; with `gate_offset`.
        num_sets: 3 for keys and values of the compressed, selected and sliding branch side by side
            (H = 3 · Hkv), or 1 for all branches (H = Hkv).
        return_aux: also return `DecodeAux`.

    Returns:
        (B, Hq, T, Dv) in query's dtype and (B, T, Hq, Dv) memory. Softmax and sums are float32.
        Compressed attention is 0 for a query that sees no compressed block; a token at a position
        from C on is all 0. Equal inputs give equal bits.

    Raises:
        ValueError: a shape, dtype, device or option that the kernels do not take; nothing is
            written then.
    """
    phi = Phi() if phi is None else phi
    cache = (key, value, compressed_key, compressed_value)
    parameters, new = [*phi.key, *phi.value], (new_key, new_value)
    # The operator checks, but not what is compared here; and compiled code should not get there.
    is_known = len(phi.key) == len(phi.value) and checks.are_together(
        query, *new, *cache, gates, gate_offset, gate_bias, lengths, *parameters
    )
    if torch.compiler.is_compiling() or not is_known:
        checks.check_step(
            *(query, *new, cache, gates, (gate_offset, gate_bias), lengths, config, num_sets),
            *(phi.kind, (phi.key, phi.value), may_complete),
        )
    args = (
        query,
        *new,
        *cache,
        gates,
        gate_offset,
        gate_bias,
        lengths,
        parameters,
        phi.kind,
        may_complete,
        num_sets,
        query.shape[3] ** -0.5 if scale is None else scale,
        config.counts,
    )
    if not return_aux and is_plain(query) and not torch.is_grad_enabled():
        return operators.output(*args)
    result = _step(*args)
    return _result(result, return_aux)


def replay(
    query: Tensor,
    new: tuple[Tensor, Tensor] | None,
    stored: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    gating: tuple[Tensor, Tensor | None, Tensor | None],
    phi: list[Tensor],
    options: tuple[str, bool, int, float],
    config: NSAConfig,
) -> Tensor | None:
    """What `step` gives, where a launch plan was made for such a step; else None.

    Nothing but that is checked: such a step passed all checks before. Without gradients, and only
    where nobody watches operators (`is_plain`).

    Args:
        new: keys and values. stored: the cache, and lengths. gating: gates, offset and bias.
        phi: parameters of keys, then those of values.
        options: kind of φ, may_complete, num_sets and scale.
    """
    gates, offset, bias = gating
    if new is not None and bias is not None and offset is not None:
        tensors = [query, *new, *stored[:4], gates, offset, bias, stored[4], *phi]
    else:
        given = (query, *(new or ()), *stored[:4], *gating, stored[4], *phi)
        tensors = [x for x in given if x is not None]

    def args() -> tuple[Any, ...]:
        new_key, new_value = (None, None) if new is None else new
        cache, lengths = stored[:4], stored[4]
        return (query, new_key, new_value, *cache, *gating, lengths, phi, *options, config.counts)

    # With the number of tensors, which tells those of φ, they tell all but the tensors. The config
    # by its address: a hash of all that it has takes longer.
    others = (new is None, offset is None, bias is None, id(config), *options)
    return operators.output.plans.replay(tensors, others, args, config)  # type: ignore[attr-defined]


def count_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    compressed_key: Tensor,
    compressed_value: Tensor,
    gates: Tensor,
    lengths: Tensor,
    *,
    config: NSAConfig,
) -> Tensor:
    """Rows of keys that `decode_attention` loads, counted by its kernels from their load masks:
    int32 (B, Hkv, T, 3), compressed, selected and sliding. As many rows of values are loaded.
    """
    tensors = (key, value, compressed_key, compressed_value)
    checks.check_step(query, None, None, tensors, gates, (None, None), lengths, config)
    plan = DecodePlan.of(query, key, value, compressed_key, config)
    rows = torch.zeros((plan.units, plan.num_splits), dtype=torch.int32, device=query.device)
    cache = Cache(key, value, compressed_key, compressed_value, lengths)
    run(plan, query, cache, Gating(gates), query.shape[3] ** -0.5, rows_read=rows)
    compressed, sliding, selected = rows.split(
        (plan.compressed_splits, plan.window_splits, plan.selected_splits), 1
    )
    counts = torch.stack([x.sum(1) for x in (compressed, selected, sliding)], 1).int()
    return counts.view(plan.batch, plan.kv_heads, plan.tokens, 3)


def _result(
    result: tuple[Tensor, Tensor, Tensor], return_aux: bool
) -> Tensor | tuple[Tensor, DecodeAux]:
    out, blocks, lse = result
    out = out.transpose(1, 2)
    if not return_aux:
        return out
    largest = torch.iinfo(torch.int32).max
    ascending = torch.where(blocks < 0, largest, blocks).sort(-1).values
    return out, DecodeAux(torch.where(ascending == largest, -1, ascending), lse)
