"""MiniMax-M3 (`minimax_m3_vl`) with `attn_implementation="nsa_flex"`: its own sparse attention.

Nothing is patched and nothing is learned anew: the model's indexer gives its queries and keys, the
blocks are the top-k of `indexer_topk`, and the sparse layers attend by `selected_attention`, so
that no tensor of queries by keys is made. Blocks are counted from a row's first real token or a
packed document's, as if it were alone; transformers counts them from the first slot of the row.
Layers with full attention, and those of the vision tower, run transformers' SDPA.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from nsa_flex.backends.gathered import gathered_attention
from nsa_flex.config import NSAConfig
from nsa_flex.indexer import indexer_topk
from nsa_flex.patching.hf_layers import refuse_attention_weights, refuse_continuous_batching
from nsa_flex.patching.rows import Rows
from nsa_flex.patching.slot_masks import dense_mask, rows_of_call
from nsa_flex.selected import selected_attention

MODEL_TYPE = "minimax_m3_vl"
FEW_QUERIES = 16  # with padding their blocks' keys are gathered; for more, all keys are moved


class IndexerInput(NamedTuple):
    """What an indexer scores with: in place of the blocks that it would select itself.

    query: (B, Hkv, Sq, D), key: (B, 1, Sk, D), cached keys first.
    """

    query: Tensor
    key: Tensor


def is_own(config: Any) -> bool:
    """Whether the config is of a MiniMax-M3 that no `patch` changed."""
    kind = getattr(config, "model_type", "")
    return kind.startswith(MODEL_TYPE) and getattr(config, "nsa_flex", None) is None


def use_indexer_input(implementations: tuple[str, ...]) -> None:
    """Has indexers hand over `IndexerInput` where the attention is one of `implementations`.

    And has such models refuse continuous batching.
    """
    from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as modeling

    select_blocks = modeling.MiniMaxM3VLIndexer.forward

    @functools.wraps(select_blocks)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.config._attn_implementation in implementations and is_own(self.config):
            return _indexer_input(self, modeling.apply_rotary_pos_emb, *args, **kwargs)
        return select_blocks(self, *args, **kwargs)

    modeling.MiniMaxM3VLIndexer.forward = forward
    for model_class in (
        modeling.MiniMaxM3VLForCausalLM,
        modeling.MiniMaxM3SparseForConditionalGeneration,
    ):
        model_class.init_continuous_batching = _refusing(model_class.init_continuous_batching)


def _refusing(init: Callable[..., Any]) -> Callable[..., Any]:
    """A model's `init_continuous_batching`, but not of one whose attention runs here."""

    @functools.wraps(init)
    def init_continuous_batching(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_own(self.config):
            refuse_continuous_batching(self)
        return init(self, *args, **kwargs)

    return init_continuous_batching


def _indexer_input(
    indexer: Any,
    rotate: Callable[..., tuple[Tensor, Tensor]],
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    cache: Any,
    position_ids: Tensor,
) -> IndexerInput:
    """The indexer's projections, normalized and rotated; the keys with those of its cache."""
    shape = (*hidden_states.shape[:2], -1, indexer.head_dim)
    query = indexer.q_norm(indexer.q_proj(hidden_states).view(shape)).transpose(1, 2)
    key = indexer.k_norm(indexer.k_proj(hidden_states).view(shape)).transpose(1, 2)
    query, key = rotate(query, key, *(x[..., : indexer.head_dim] for x in position_embeddings))
    if cache is not None:
        key = cache.layers[indexer.layer_idx].update_index(key)
    return IndexerInput(query, key)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    block_indices: Tensor | IndexerInput | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of an M3 model: query (B, Hq, Sq, D), key (B, Hkv, Sk, D).

    Args:
        attention_mask: of `slot_masks.mask_for_rows`.
        block_indices: what the indexer of a sparse layer returned: `IndexerInput`, or blocks int
            (B, Hkv, Sq, n), counted from the first slot of a row.

    Returns:
        (B, Sq, Hq, Dv), contiguous, and None in the place of attention weights.

    Raises:
        ValueError: dropout in a sparse layer; attention weights; cu_seq_lens_q beside a cache or
            padding; or blocks by slot of rows that have padding or packed documents.
    """
    refuse_attention_weights(module.config, kwargs)
    if block_indices is None:
        if module.config.model_type.endswith("text"):
            packed = kwargs.get("position_ids"), kwargs.get("cu_seq_lens_q")
            attention_mask = dense_mask(attention_mask, query, key, *packed)
        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        options = {"scaling": scaling, "dropout": dropout, **kwargs}
        return sdpa(module, query, key, value, attention_mask, **options)
    if dropout:
        raise ValueError(f"dropout={dropout} is not supported in sparse layers")
    indexer = module.indexer
    config = NSAConfig(
        compress_block_size=indexer.block_size,
        compress_stride=indexer.block_size,
        select_block_size=indexer.block_size,
        num_selected_blocks=indexer.topk_blocks,
        num_initial_blocks=0,
        num_local_blocks=indexer.local_blocks,
    )
    # Under autocast rotary embeddings leave queries and keys in float32, values in half.
    query, key = query.to(value.dtype), key.to(value.dtype)
    if isinstance(block_indices, IndexerInput):
        positions = kwargs.get("position_ids")
        rows = rows_of_call(query, key, attention_mask, config, positions, kwargs)
        output = _attend_rows(query, key, value, block_indices, rows, config, scaling)
    elif attention_mask is not None:
        raise ValueError(
            "block_indices of rows with padding, packed documents or a static cache count blocks "
            "from the first slot of a row: leave the indexer's forward as it is"
        )
    else:
        output = selected_attention(query, key, value, block_indices, config=config, scale=scaling)
    return output.transpose(1, 2).contiguous(), None


def _attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    indexer: IndexerInput,
    rows: Rows,
    config: NSAConfig,
    scale: float | None,
) -> Tensor:
    """Sparse attention with blocks counted from the first token of each row or document."""
    index_query, index_key = indexer
    if rows.keys is not None:
        index_key = rows.keys.align(index_key)
    if rows.queries is not None:
        index_query, query = rows.queries.align(index_query), rows.queries.align(query)
    start = None if rows.queries is None else rows.queries.start
    blocks = indexer_topk(
        index_query,
        index_key,
        block_size=config.select_block_size,
        num_blocks=config.num_selected_blocks,
        num_local_blocks=config.num_local_blocks,
        query_offset=rows.query_offset,
        document_start=start,
    )
    if rows.query_offset is not None and query.shape[2] <= FEW_QUERIES:
        output = _attend_gathered(query, key, value, blocks, rows, config, scale)
    else:
        if rows.keys is not None:
            key, value = rows.keys.align(key), rows.keys.align(value)
        output = selected_attention(
            *(query, key, value, blocks),
            config=config,
            scale=scale,
            query_offset=rows.query_offset,
            document_start=start,
        )
    return output if rows.queries is None else rows.queries.restore(output)


def _attend_gathered(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Tensor,
    rows: Rows,
    config: NSAConfig,
    scale: float | None,
) -> Tensor:
    """`selected_attention` of few queries, to keys that stay where padding put them."""
    assert rows.keys is not None
    assert isinstance(rows.query_offset, Tensor)
    (batch, _, num_queries, dim), num_keys = query.shape, key.shape[2]
    positions = rows.query_offset[:, None] + torch.arange(num_queries, device=query.device)
    row = torch.arange(batch, device=query.device)[:, None] * num_keys
    scale = dim**-0.5 if scale is None else scale
    return gathered_attention(
        *(query, key, value, blocks, positions, config.select_block_size, scale),
        slots=rows.keys.source - row,
    )
