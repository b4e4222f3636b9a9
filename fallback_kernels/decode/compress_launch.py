"""Launches of the kernels that compress with the matrices of φ. Grids depend on shapes alone."""

from __future__ import annotations

from typing import NamedTuple

import torch

from nsa_flex.config import NSAConfig
from nsa_flex.fallback_kernels.common.arch import shared_memory_bytes, supports_pdl
from nsa_flex.fallback_kernels.common.tiles import cdiv, next_power_of_2, tile_width
from nsa_flex.fallback_kernels.decode import config as sizes_of_steps
from nsa_flex.fallback_kernels.decode.compress_blocks import (
    decode_project_kernel,
    decode_write_blocks_kernel,
)
from nsa_flex.fallback_kernels.decode.config import in_one_allocation
from nsa_flex.fallback_kernels.decode.launch import (
    Cache,
    Pair,
    Phi,
    launch,
    padded_batch,
    values_of_stored,
)

MAX_ROWS = 64  # of a tile of the products: more of them share a read of the weights
MAX_SPLITS = 16
RESERVED_BYTES = 16 * 1024  # of shared memory, for what is not a pipelined tile
LEAST_BYTES = 128 * 1024  # with less of it tiles are small
# Of a split; a loop of fewer is not pipelined for mlp (33 µs on an H200 where 3 stages take 40).
PIPELINED_TOKENS = 9
WRITTEN_ROWS = 16  # of a tile of what is written
WRITTEN_COLUMNS = 32


class ProductPlan(NamedTuple):
    """Sizes of both kernels.

    tensors: keys, and values where a branch reads them. blocks: how many a row of the batch may
    complete. parts: partial outputs of a token.
    splits: CTAs that share the tokens of a block. tiles: those of columns, over all parts.
    """

    tensors: int
    blocks: int
    parts: int
    block_m: int
    block_n: int
    row_tiles: int
    tiles: int
    tokens_per_split: int
    splits: int
    stages: int

    @classmethod
    def of(cls, source: Cache, num_new: int, phi: Phi, config: NSAConfig) -> ProductPlan:
        """For keys and values (B, Hkv, C, D) of the compressed branch."""
        batch, heads, _, head_dim = source.key.shape
        dims = (head_dim, source.value.shape[3])
        is_mlp, size = phi.kind == "mlp", max(x.element_size() for x in (source.key, *phi.key))
        blocks = cdiv(num_new, config.compress_stride)
        rows = batch * blocks * (heads if is_mlp else 1)
        room = shared_memory_bytes(source.key.device) - RESERVED_BYTES
        is_large = size == 4 or max(dims) > 128 or room < LEAST_BYTES
        block_m = min(16 if is_large else MAX_ROWS, max(16, next_power_of_2(rows)))
        block_n = min(32 if is_large else 64, tile_width(max(dims)))
        parts = 3 if is_mlp else 1
        tiles = cdiv(max(dims), block_n) * (parts if is_mlp else heads)
        row_tiles = cdiv(rows, block_m)
        length = config.compress_block_size
        most_splits = min(MAX_SPLITS, length)
        tensors = 2 if config.has("compressed") else 1
        ctas = tensors * tiles * row_tiles
        splits = max(1, min(most_splits, sizes_of_steps.TARGET_CTAS // ctas))
        tokens_per_split = cdiv(length, splits)
        # As Triton 3.6 takes it: cached and new tokens have buffers of their own, as have both
        # halves of the weights and their difference.
        stage_bytes = (3 * block_m + 4 * block_n) * tile_width(max(dims)) * size
        most_stages = 1 if is_mlp and tokens_per_split < PIPELINED_TOKENS else 3
        return cls(
            tensors,
            blocks,
            parts,
            block_m,
            block_n,
            row_tiles,
            tiles,
            tokens_per_split,
            cdiv(length, tokens_per_split),
            max(1, min(most_stages, tokens_per_split, room // stage_bytes)),
        )


def launch_compress(
    source: Cache, num_new: int, new: Pair | None, phi: Phi, config: NSAConfig
) -> None:
    """Writes the compressed rows of the blocks that `num_new` tokens complete.

    Of keys alone without a compressed branch.

    Args:
        source: the compressed branch's keys and values.
        new: the tokens, where they are still to be stored; None where they are in the cache.
        phi: of the kind linear or mlp.
    """
    plan = ProductPlan.of(source, num_new, phi, config)
    batch, heads, _, head_dim = source.key.shape
    shape = (plan.splits, batch * heads * plan.blocks, plan.parts)
    dims = (head_dim, source.value.shape[3])
    partial_key, partial_value = in_one_allocation(
        source.key.device, *((*shape, dim) for dim in dims)
    )
    pdl = supports_pdl(source.key.device)
    first = 1 if phi.kind == "mlp" else 0  # of the weights of the first product
    values = {
        **values_of_stored(new or source.tokens, source, config),
        "num_new": num_new,
        "batch_size": batch,
        "partial_key_ptr": partial_key,
        "partial_value_ptr": partial_value,
        "key_position_ptr": phi.key[0],
        "value_position_ptr": phi.value[0],
        "tokens_per_split": plan.tokens_per_split,
        "tiles": plan.tiles,
        "COUNT": plan.blocks,
        "MLP": phi.kind == "mlp",
        "READ_NEW": new is not None,
        "STAGES": plan.stages,
        "SPLITS": plan.splits,
        "PDL": pdl,
        "PADDED_BATCH": padded_batch(batch),
    }
    rows = cdiv(batch * heads * plan.blocks, WRITTEN_ROWS)
    with torch.cuda.device_of(source.key):
        launch(
            decode_project_kernel,
            (plan.splits * plan.tiles, plan.row_tiles, plan.tensors),
            values,
            num_warps=4,
            pdl=pdl,
            key_weight_ptr=phi.key[first],
            value_weight_ptr=phi.value[first],
            BLOCK_M=plan.block_m,
            BLOCK_N=plan.block_n,
        )
        launch(
            decode_write_blocks_kernel,
            (cdiv(max(dims), WRITTEN_COLUMNS), rows, plan.tensors),
            values,
            num_warps=8,
            pdl=pdl,
            key_weight_ptr=phi.key[-1],
            value_weight_ptr=phi.value[-1],
            BLOCK_M=WRITTEN_ROWS,
            BLOCK_N=WRITTEN_COLUMNS,
        )
