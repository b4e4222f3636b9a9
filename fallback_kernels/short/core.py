"""The core where every query selects every block of its document: three launches in all.

In small calls a fourth adds up what the query heads of a group have each computed of dK and dV.

No block is scored or chosen: the selected branch is causal attention within the document.
"""

from __future__ import annotations

from torch import Tensor

from nsa_flex.config import NSAConfig
from nsa_flex.fallback_kernels.short.bwd_dkdv import Some, has_one_split, key_gradients
from nsa_flex.fallback_kernels.short.bwd_dq import Deltas, query_gradients
from nsa_flex.fallback_kernels.short.fwd import ShortResults


def short_backward(
    grad: Tensor,
    tensors: tuple[Tensor, ...],
    own: tuple[Tensor, Tensor] | None,
    results: ShortResults,
    document_start: Tensor | None,
    config: NSAConfig,
    scale: float,
    reach: int,
    blocks: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, compressed key and value, gates, and of `own` if given.

    Those of compressed keys and values are (B, N, Hkv, D), the others (B, S, H, D). Arguments as
    of `short_forward`; grad (B, Hq, S, Dv). With `blocks`, int32 (B, Hkv, S, n), contiguous,
    queries selected these, where `is_masked_backward`.
    """
    query, key, value, compressed_key, compressed_value, _ = tensors
    of_call = (document_start, config, scale, reach)
    of_queries = query_gradients(grad, tensors, own, results, *of_call, blocks)
    assert of_queries.gates is not None
    rest = (of_queries.stats, *of_call)
    compressed = (compressed_key, compressed_value)
    if blocks is not None and document_start is not None and has_one_split(query, key, value):
        like = (key, value, *compressed, *(own or ()))
        grads = [x.new_empty(x.transpose(1, 2).shape, dtype=query.dtype) for x in like]
        _by_length(grad, tensors, own, rest, grads, query.shape[2])
        return (of_queries.query, *grads[:4], of_queries.gates, *grads[4:])
    of_keys = key_gradients(
        grad, query, (key, value), compressed, *rest,
        near=own is None, far=True, masked=blocks is not None,
    )  # fmt: skip
    of_window: list[Tensor] = []
    if own is not None:
        of_window = key_gradients(grad, query, own, None, *rest, near=True, far=False)
    return (of_queries.query, *of_keys, of_queries.gates, *of_window)


def overwrite_gradients(
    grad: Tensor,
    tensors: tuple[Tensor, ...],
    own: tuple[Tensor, Tensor] | None,
    deltas: Deltas,
    document_start: Tensor,
    config: NSAConfig,
    scale: float,
    reach: int,
    blocks: Tensor,
    grads: tuple[Tensor, ...],
) -> None:
    """Into `grads` those of documents of up to `reach` tokens, of whatever lengths others are.

    Arguments as of `short_backward`; grads: what that returns but for the gates, contiguous.
    """
    of_call = (document_start, config, scale, reach)
    grad_query, *of_keys = grads
    results = query_gradients(grad, tensors, own, deltas, *of_call, blocks, grad_query)
    _by_length(grad, tensors, own, (results.stats, *of_call), of_keys, reach)


def _by_length(
    grad: Tensor,
    tensors: tuple[Tensor, ...],
    own: tuple[Tensor, Tensor] | None,
    rest: tuple[Tensor, Tensor | None, NSAConfig, float, int],
    grads: list[Tensor],
    most: int,
) -> None:
    """Into `grads` what keys get of documents of up to `most` tokens, masked by a choice.

    Of documents of no more than n * l' tokens queries chose all blocks: they take a kernel that
    knows of no choice, whose loops have registers to spare. rest: stats and what follows them.
    """
    query, key, value, compressed_key, compressed_value, _ = tensors
    whole = rest[2].num_selected_tokens
    for masked, least, up_to in ((False, 0, min(whole, most)), (True, whole, most)):
        if least < most:
            key_gradients(
                grad, query, (key, value), (compressed_key, compressed_value), *rest,
                near=own is None, far=True, masked=masked,
                some=Some(grads[:4], least, up_to),
            )  # fmt: skip
    if own is not None:
        some = Some(grads[4:], 0, most)
        key_gradients(grad, query, own, None, *rest, near=True, far=False, some=some)
