"""InfLLM-V2 as an attention function of transformers: what a MiniCPM4's layers call.

Blocks are counted from a row's first real token, or a packed document's, as if it were alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from nsa_flex.compression import mean_of_blocks, split_segments
from nsa_flex.config import NSAConfig
from nsa_flex.infllm import InfLLMV2Config, infllm_v2_attention
from nsa_flex.patching.hf_layers import refuse_attention_weights
from nsa_flex.patching.slot_masks import real_slots, rows_of_call


class KeptMeans(NamedTuple):
    """Means of windows of keys, kept with a growing cache so that a step makes the new ones alone.

    layer: of the cache. before: its keys when the call began, None for none.
    """

    layer: Any
    before: Tensor | None

    @classmethod
    def of_call(cls, cache: Any, layer_idx: int) -> KeptMeans | None:
        """Of an eager call with a cache that grows, before it is updated; None of any other."""
        if type(cache) is not DynamicCache or torch.compiler.is_compiling():
            return None
        if layer_idx >= len(cache.layers):
            return None
        layer = cache.layers[layer_idx]
        return cls(layer, layer.keys) if hasattr(layer, "keys") else None

    def update(self, key: Tensor, config: NSAConfig) -> Tensor:
        """The means of `key` (B, Hkv, Sk, D), all that the cache has now: (B, Hkv, N, D).

        Known ones count while the keys are those that they were made of: whoever reorders, crops
        or repeats a cache puts another tensor there.
        """
        held, means = getattr(self.layer, "nsa_means", (None, None))
        if held is None or held is not self.before:
            means = None
        known = 0 if means is None else means.shape[2]
        missing = config.num_compressed_blocks(key.shape[2]) - known
        if means is None or missing:
            rest = key.detach()[:, :, known * config.compress_stride :]
            new = mean_of_blocks(split_segments(rest, config), config).to(key.dtype)
            new = new[:, :, :missing]  # the last may not be whole
            means = new if means is None else torch.cat([means, new], 2)
        self.layer.nsa_means = (self.layer.keys, means)
        return means


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
    kept_means: KeptMeans | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of such a model: query (B, Hq, Sq, D), key (B, Hkv, Sk, D).

    Args:
        attention_mask: of `slot_masks.mask_for_rows`.
        kept_means: of the call, where a cache grows.

    Returns:
        (B, Sq, Hq, Dv), contiguous, and None in the place of attention weights.

    Raises:
        ValueError: dropout, attention weights, or cu_seq_lens_q beside a cache or padding.
    """
    refuse_attention_weights(module.config, kwargs)
    if dropout:
        raise ValueError(f"dropout={dropout} is not supported in sparse layers")
    sizes = getattr(module, "infllm", None)
    config = InfLLMV2Config.from_dict(module.config.sparse_config) if sizes is None else sizes
    # Under autocast rotary embeddings leave queries and keys in float32, values in half.
    query, key = query.to(value.dtype), key.to(value.dtype)
    rows = rows_of_call(query, key, attention_mask, config.selection, position_ids, kwargs)
    if rows.keys is not None:
        key, value = rows.keys.align(key), rows.keys.align(value)
    start = longest = means = None
    is_sparse = key.shape[2] >= max(config.dense_len, config.kernel_size)
    if kept_means is not None and rows.keys is None and is_sparse:
        means = kept_means.update(key, config.selection)
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
        compressed_key=means,
    )
    if rows.queries is not None:
        output = rows.queries.restore(output)
    return output.transpose(1, 2).contiguous(), None
