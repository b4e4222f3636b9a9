"""InfLLM-V2 as an attention function of transformers: what a MiniCPM4's layers call.

Blocks are counted from a row's first real token, or a packed document's, as if it were alone.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nsa_flex.infllm import InfLLMV2Config, infllm_v2_attention
from nsa_flex.patching.slot_masks import real_slots, rows_of_call


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    position_ids: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of such a model: query (B, Hq, Sq, D), key (B, Hkv, Sk, D).

    Args:
        attention_mask: of `slot_masks.mask_for_rows`.

    Returns:
        (B, Sq, Hq, Dv), contiguous, and None in the place of attention weights.

    Raises:
        ValueError: dropout, or cu_seq_lens_q beside a cache or padding.
    """
    if dropout:
        raise ValueError(f"dropout={dropout} is not supported in sparse layers")
    sizes = getattr(module, "infllm", None)
    config = InfLLMV2Config.from_dict(module.config.sparse_config) if sizes is None else sizes
    # Under autocast rotary embeddings leave queries and keys in float32, values in half.
    query, key = query.to(value.dtype), key.to(value.dtype)
    rows = rows_of_call(query, key, attention_mask, config.selection, position_ids, kwargs)
    if rows.keys is not None:
        key, value = rows.keys.align(key), rows.keys.align(value)
    start = longest = None
    if rows.queries is not None:
        query, start = rows.queries.align(query), rows.queries.start
    if attention_mask is not None and start is None:
        longest = real_slots(attention_mask).sum(1).amax()
    output = infllm_v2_attention(
        *(query, key, value),
        config=config,
        scale=scaling,
        query_offset=rows.query_offset,
        document_start=start,
        longest=longest,
    )
    if rows.queries is not None:
        output = rows.queries.restore(output)
    return output.transpose(1, 2).contiguous(), None
