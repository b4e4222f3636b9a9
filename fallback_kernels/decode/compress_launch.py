"""Launches of the kernels that compress with the matrices of φ. Grids depend on shapes alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_flex.config import NSAConfig
from nsa_flex.fallback_kernels.common.arch import shared_memory_bytes
from nsa_flex.fallback_kernels.common.strides import strides
from nsa_flex.fallback_kernels.common.tiles import cdiv, next_power_of_2, tile_width
from nsa_flex.fallback_kernels.decode import config as sizes_of_steps
from nsa_flex.fallback_kernels.decode.compress_blocks import (
    decode_project_kernel,
    decode_write_blocks_kernel,
)
from nsa_flex.fallback_kernels.decode.config import in_one_allocation
from nsa_flex.fallback_kernels.decode.launch import (
    Cache,
    NewTokens,
    Phi,
    padded_batch,
    pdl_option,
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
    source: Cache,
    num_new: int,
    new: NewTokens | None,
    phi: Phi,
    config: NSAConfig,
    *,
    pdl: bool,
) -> None:
    """Writes the compressed rows of the blocks that `num_new` tokens complete.

    Of keys alone without a compressed branch.

    Args:
        source: the compressed branch's keys and values.
        new: the tokens, where they are still to be stored; None where they are in the cache.
        phi: of the kind linear or mlp.
    """
    batch, heads, capacity, head_dim = source.key.shape
    value_dim = source.value.shape[3]
    plan = ProductPlan.of(source, num_new, phi, config)
    shape = (plan.splits, batch * heads * plan.blocks, plan.parts)
    partial = in_one_allocation(source.key.device, (*shape, head_dim), (*shape, value_dim))
    constants: dict[str, Any] = {
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "COMPRESS": config.compress_block_size,
        "STRIDE": config.compress_stride,
        "COUNT": plan.blocks,
        "MLP": phi.kind == "mlp",
        "PDL": pdl,
        "PADDED_BATCH": padded_batch(batch),
    }
    sizes = (num_new, capacity, source.compressed_key.shape[2], batch, heads)
    with torch.cuda.device_of(source.key):
        _project(source, new, phi, plan, partial, sizes, constants)
        columns = cdiv(max(head_dim, value_dim), WRITTEN_COLUMNS)
        rows = cdiv(batch * heads * plan.blocks, WRITTEN_ROWS)
        decode_write_blocks_kernel[(columns, rows, plan.tensors)](
            *partial,
            phi.key[-1],
            phi.value[-1],
            source.compressed_key,
            source.compressed_value,
            source.lengths,
            strides(source.compressed_key),
            strides(source.compressed_value),
            *sizes,
            **constants,
            BLOCK_M=WRITTEN_ROWS,
            BLOCK_N=WRITTEN_COLUMNS,
            SPLITS=plan.splits,
            num_warps=8,
            **pdl_option(pdl),
        )


def _project(
    source: Cache,
    new: NewTokens | None,
    phi: Phi,
    plan: ProductPlan,
    partial: tuple[Tensor, ...],
    sizes: tuple[int, ...],
    constants: dict[str, Any],
) -> None:
    is_mlp = phi.kind == "mlp"
    new_key, new_value = (source.key, source.value) if new is None else (new.key, new.value)
    decode_project_kernel[(plan.splits * plan.tiles, plan.row_tiles, plan.tensors)](
        source.key,
        source.value,
        new_key,
        new_value,
        phi.key[1] if is_mlp else phi.key[0],
        phi.value[1] if is_mlp else phi.value[0],
        phi.key[0],
        phi.value[0],
        *partial,
        source.lengths,
        strides(source.key),
        strides(source.value),
        strides(new_key),
        strides(new_value),
        *sizes,
        plan.tokens_per_split,
        plan.tiles,
        **constants,
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        READ_NEW=new is not None,
        STAGES=plan.stages,
        num_warps=4,
        **pdl_option(constants["PDL"]),
    )
