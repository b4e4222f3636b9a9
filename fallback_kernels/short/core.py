"""The core where every query selects every block of its document: three launches in all.

In small calls a fourth adds up what the query heads of a group have each computed of dK and dV.

No block is scored or selected: the selected branch is causal attention within the document.
"""

from __future__ import annotations

from torch import Tensor

from nsa_flex.config import NSAConfig
from nsa_flex.fallback_kernels.common.block_kinds import (
    MASKED_DOCUMENT,
    SHORT_DOCUMENT,
    UNMASKED_DOCUMENT,
)
from nsa_flex.fallback_kernels.short.bwd_dkdv import key_gradients
from nsa_flex.fallback_kernels.short.bwd_dq import query_gradients
from nsa_flex.fallback_kernels.short.config import MANY_CTAS, num_key_tiles
from nsa_flex.fallback_kernels.short.fwd import ShortResults


def short_backward(
    grad: Tensor,
    tensors: tuple[Tensor, ...],
    own: tuple[Tensor, Tensor] | None,
    results: ShortResults,
    document_start: Tensor | None,
    config: NSAConfig,
    scale: float,
    longest: int,
    blocks: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, compressed key and value, gates, and of `own` if given.

    Those of compressed keys and values are (B, N, Hkv, D), the others (B, S, H, D). Arguments as
    of `short_forward`; grad (B, Hq, S, Dv). With `blocks`, int32 (B, Hkv, S, n), contiguous,
    queries selected these, where the backward route is "masked".
    """
    of_call = (document_start, config, scale, longest)
    of_queries = query_gradients(grad, tensors, own, results, *of_call, blocks)
    of_keys, of_window = all_key_gradients(
        grad, tensors, own, of_queries.stats, *of_call, masked=blocks is not None
    )
    return (of_queries.query, *of_keys, of_queries.gates, *of_window)


def all_key_gradients(
    grad: Tensor,
    tensors: tuple[Tensor, ...],
    own: tuple[Tensor, Tensor] | None,
    stats: Tensor,
    document_start: Tensor | None,
    config: NSAConfig,
    scale: float,
    longest: int,
    *,
    masked: bool,
) -> tuple[list[Tensor], list[Tensor]]:
    """Of `short_backward` those of keys and values, compressed ones too, and those of `own`.

    stats: of `query_gradients`. masked: whether that was given blocks that queries selected.
    """
    query, key, value, *compressed, _ = tensors
    shared = (stats, document_start, config, scale, longest)
    of_keys = key_gradients(
        grad, query, (key, value), (compressed[0], compressed[1]), *shared,
        near=own is None, far=True, masked=masked,
    )  # fmt: skip
    of_window: list[Tensor] = []
    if own is not None:
        of_window = key_gradients(grad, query, own, None, *shared, near=True, far=False)
    return of_keys, of_window


def overwrite_key_gradients(
    grad: Tensor,
    tensors: tuple[Tensor, ...],
    own: tuple[Tensor, Tensor] | None,
    stats: Tensor,
    document_start: Tensor,
    kinds: Tensor,
    config: NSAConfig,
    scale: float,
    longest: int,
    grads: tuple[Tensor, ...],
) -> None:
    """Overwrites the rows of short documents in `grads`.

    Arguments as of `short_backward`; stats: of `query_gradients`, with blocks. kinds: of
    `block_kinds`. grads: of key, value, compressed key and value, and of `own` if given, laid out
    as that returns them.
    """
    query, key, value, compressed_key, compressed_value, _ = tensors
    of_call = (stats, document_start, config, scale, longest)
    launches = [(True, SHORT_DOCUMENT)]
    if query.shape[1] == key.shape[1] and num_key_tiles(query, key, value) >= MANY_CTAS:
        # Of one head a tile has few iterations. Documents whose queries selected all have a kernel
        # without masks: twice as many CTAs that leave cost less than it saves.
        launches = [(False, UNMASKED_DOCUMENT), (True, MASKED_DOCUMENT)]
    for masked, kind in launches:
        key_gradients(
            grad, query, (key, value), (compressed_key, compressed_value), *of_call,
            near=own is None, far=True, masked=masked,
            kinds=kinds, kind=kind, grads=list(grads[:4]),
        )  # fmt: skip
    if own is not None:
        key_gradients(
            grad, query, own, None, *of_call,
            near=True, far=False, kinds=kinds, grads=list(grads[4:]),
        )  # fmt: skip
