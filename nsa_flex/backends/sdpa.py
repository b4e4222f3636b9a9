"""The compressed branch, folded, on cuDNN's fused attention through torch's SDPA operators."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa_flex.backends.branch import Branch
from nsa_flex.backends.fold import fold_queries, repeat_keys, unfold_outputs
from nsa_flex.fallback_kernels.compressed.cudnn_op import causal, causal_gradients


def compressed(branch: Branch) -> tuple[Tensor, Tensor]:
    """Branch 1 of one document whose queries are all the tokens; the log-sum-exp comes along."""
    config, query = branch.config, branch.query
    num_tokens = query.shape[2]
    side = max(branch.key.shape[2], 2)  # cuDNN has no backward for one row and one key
    folded = fold_queries(query, side, config)
    key, value = (
        repeat_keys(_lengthen(x, side), config).repeat_interleave(branch.group_size, 1)
        for x in (branch.key, branch.value)
    )
    out, lse = cudnn_causal(*(x.transpose(1, 2) for x in (folded, key, value)), branch.scale)
    return (
        unfold_outputs(out.transpose(1, 2), num_tokens, config, 0.0),
        unfold_outputs(lse, num_tokens, config, float("-inf")),
    )


def _lengthen(x: Tensor, length: int) -> Tensor:
    """Zero rows at the end of (B, H, N, D): keys behind every query that counts."""
    return F.pad(x, (0, 0, 0, length - x.shape[2]))


# An operator of its own fixes the strides on both sides. cuDNN's plans are cached by the shapes
# and strides of query, key and value alone: a backward whose incoming gradient has other strides
# than in the call that made the plan reads it wrongly (seen on torch 2.11: gradients off by 8 %
# after an eager and a compiled backward in one process).


@torch.library.custom_op("nsa_flex::cudnn_causal", mutates_args=())
def cudnn_causal(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Causal attention of square problems, fp16 or bf16 on CUDA.

    query, key: (B, N, H, D); value: (B, N, H, Dv). Returns output (B, N, H, Dv) and the natural
    log-sum-exp float32 (B, H, N), which carries no gradient.
    """
    q, k, v = (_heads_first(x) for x in (query, key, value))
    out, lse = causal(q, k, v, scale)
    return out.transpose(1, 2).contiguous(), lse.contiguous()


@cudnn_causal.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    batch, length, heads, _ = query.shape
    out = query.new_empty((batch, length, heads, value.shape[3]))
    return out, query.new_empty((batch, heads, length), dtype=torch.float32)


@torch.library.custom_op("nsa_flex::cudnn_causal_backward", mutates_args=())
def cudnn_causal_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value in their own shapes, (B, N, H, D)."""
    do, q, k, v, o = (_heads_first(x) for x in (grad, query, key, value, out))
    grads = causal_gradients(do, q, k, v, o, lse, scale)
    a, b, c = (x.transpose(1, 2).contiguous() for x in grads)
    return a, b, c


@cudnn_causal_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    a, b, c = (x.new_empty(x.shape) for x in (query, key, value))
    return a, b, c


def _heads_first(x: Tensor) -> Tensor:
    """(B, N, H, D) as (B, H, N, D) in (B, N, H, D) memory, copied only if it is not there yet."""
    return x.contiguous().transpose(1, 2)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, grad: Tensor | None, grad_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None, None
    return *cudnn_causal_backward(grad, *ctx.saved_tensors, ctx.scale), None


cudnn_causal.register_autograd(_differentiate, setup_context=_save)
