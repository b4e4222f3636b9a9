"""Where the Hopper kernel computes the scores of the fused choice, and how it is launched."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa_flex.fallback_kernels.common.arch import compiles_gluon, runs_gluon
from nsa_flex.fallback_kernels.common.strides import strides
from nsa_flex.fallback_kernels.topk.config import ChoicePlan, Chunk

HEAD_DIM = 128
MEMBERS = (1, 4, 8, 16, 32)  # heads of a group, rounded up: registers suffice
RESIDUES = 4  # l'/d

if compiles_gluon:
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as HopperDescriptor

    from nsa_flex.fallback_kernels.topk.scores_sm90 import banded_score_kernel


def takes(query: Tensor, key_tiles: TensorDescriptor | None, **constants: int) -> bool:
    """Whether the kernel takes a call, from shapes, dtypes and the device.

    Args:
        query: (B, Hq, Sq, D).
        key_tiles: the keys for tensor copies; None where some would have to be masked.
        constants: COMPRESS, STRIDE and SELECT.
    """
    if key_tiles is None or not runs_gluon(query.device):
        return False
    group = query.shape[1] // key_tiles.shape[1]
    return (
        query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[3] == HEAD_DIM
        and 1 << (group - 1).bit_length() in MEMBERS
        and constants["SELECT"] == RESIDUES * constants["STRIDE"]
        and constants["COMPRESS"] <= 2 * constants["STRIDE"]
    )


def launch_scores(
    plan: ChoicePlan,
    chunk: Chunk,
    query: Tensor,
    key_tiles: TensorDescriptor,
    lse: Tensor,
    positions: tuple[Tensor, Tensor, int, int],
    scores: Tensor,
    scale_log2: float,
    **constants: Any,
) -> None:
    """Scores of a chunk, with the maxima of bands behind each row if it is `banded`.

    `positions`: positions and document starts of the queries, and the strides of a batch row.
    """
    shape = key_tiles.block_shape
    element = tl.bfloat16 if query.dtype == torch.bfloat16 else tl.float16
    keys = HopperDescriptor(
        key_tiles.base,
        key_tiles.shape,
        key_tiles.strides,
        shape,
        NVMMASharedLayout.get_default_for(shape, element),
    )
    tiles = -(-chunk.size // plan.hopper_tokens)
    banded_score_kernel[(tiles, plan.batch * plan.kv_heads)](
        query,
        keys,
        lse,
        positions[0],
        positions[1],
        scores,
        *strides(query),
        *lse.stride(),
        positions[2],
        positions[3],
        chunk.start,
        chunk.size,
        plan.kv_heads,
        chunk.width,
        chunk.pitch,
        chunk.width + chunk.candidates,
        scale_log2,
        GROUP=plan.group,
        MEMBERS=plan.members,
        HEAD_DIM=plan.head_dim,
        BANDED=chunk.banded or plan.members > 1,  # without, ptxas serialises those products
        **constants,
        num_warps=4,
        maxnreg=plan.hopper_registers,
    )
