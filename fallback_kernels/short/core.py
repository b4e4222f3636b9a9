"""The core where every query selects every block of its document: three launches, one forward.

No block is scored or chosen: the selected branch is causal attention within the document.
"""

from __future__ import annotations

from torch import Tensor

from nsa_flex.config import NSAConfig
from nsa_flex.fallback_kernels.short.bwd_dkdv import key_gradients
from nsa_flex.fallback_kernels.short.bwd_dq import query_gradients
from nsa_flex.fallback_kernels.short.fwd import ShortResults


def selects_every_block(num_tokens: int, config: NSAConfig) -> bool:
    """Whether each query of a document of so many tokens has all blocks up to its own."""
    return num_tokens <= config.num_selected_blocks * config.select_block_size


def run_backward(
    grad: Tensor,
    tensors: tuple[Tensor, ...],
    own: tuple[Tensor, Tensor] | None,
    results: ShortResults,
    document_start: Tensor | None,
    config: NSAConfig,
    scale: float,
    reach: int,
) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, compressed key and value, gates, and of `own` if given.

    Those of compressed keys and values are (B, Hkv, N, D), the others have memory (B, S, H, D)
    and that shape. Arguments as of `short_forward`; grad (B, Hq, S, Dv).
    """
    query, *keys, compressed_key, compressed_value, gates = tensors
    of_queries = query_gradients(
        grad, tensors, own, results, document_start, config, scale, reach
    )
    rest = (of_queries.stats, document_start, config, scale, reach)
    selected, compressed = (keys[0], keys[1]), (compressed_key, compressed_value)
    of_keys = key_gradients(
        grad, query, selected, compressed, *rest, near=own is None, far=True
    )
    of_window = [] if own is None else key_gradients(
        grad, query, own, None, *rest, near=True, far=False
    )
    return (of_queries.query, *of_keys, of_queries.gates, *of_window)
