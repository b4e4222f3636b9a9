"""The fused choice of blocks as a custom operator: scores by chunks of queries, then the best n.

Needs triton; import it only where it is to run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa_flex.config import NSAConfig
from nsa_flex.fallback_kernels.choose_lse import lse_kernel
from nsa_flex.fallback_kernels.choose_scores import score_kernel
from nsa_flex.fallback_kernels.choose_top import top_kernel
from nsa_flex.fallback_kernels.selected_plan import padded, rows_contiguous, strides

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256
MAX_GROUP = 64
MAX_SLOTS = 64
MAX_BLOCKS = 1 << 15  # 32 in each thread of the largest program
MAX_HEADS = 65535  # KV heads of all batch rows: one axis of the launch grid
SCORE_BYTES = 1 << 29  # scores in memory at once
PROGRAMS = 1024  # fewer tiles of queries than that are split along the keys
INTERPRETED = not isinstance(score_kernel, triton.JITFunction)
LOG2E = math.log2(math.e)


def obstacle(query: Tensor, compressed_key: Tensor, config: NSAConfig, num_blocks: int) -> str:
    """Why the kernels do not take these inputs; empty if they do. Looks at no values."""
    heads, dim = query.shape[1], query.shape[3]
    batch, kv_heads = compressed_key.shape[:2]
    limits = (
        (heads // kv_heads, MAX_GROUP, "query heads share a KV head"),
        (dim, MAX_HEAD_DIM, "is the head dim"),
        (config.num_selected_blocks, MAX_SLOTS, "blocks are to be chosen"),
        (num_blocks, MAX_BLOCKS, "blocks can be chosen"),
        (batch * kv_heads, MAX_HEADS, "KV heads in all batch rows"),
    )
    if query.device.type != "cuda" and not INTERPRETED:
        return f"the Triton kernels need CUDA tensors, got {query.device}"
    if query.dtype not in DTYPES:
        return f"query is {query.dtype}; the Triton kernels take {DTYPES}"
    for value, most, meaning in limits:
        if value > most:
            return f"{value} {meaning}; the Triton kernels take at most {most}"
    return ""


def row_width(num_blocks: int) -> int:
    """Scores of a row in memory: at least a vector for each of 32 threads."""
    return max(128, padded(num_blocks))


class Chunk(NamedTuple):
    """Queries whose scores are in memory at once."""

    start: int
    size: int
    width: int  # blocks that they may choose from, rounded up to a row of `top_kernel`
    candidates: int

    @property
    def pitch(self) -> int:
        """Scores from a row to the next: candidates of `top_kernel` lie between them."""
        return self.width + self.candidates

    @property
    def lanes(self) -> int:
        """Threads that share a row of scores."""
        return max(32, self.width // 32)

    @property
    def depth(self) -> int:
        """Scores of a row in one thread."""
        return self.width // self.lanes


@dataclass(frozen=True)
class ChoicePlan:
    """Everything about a call that shapes and dtypes decide."""

    batch: int
    query_heads: int
    kv_heads: int
    num_queries: int
    head_dim: int
    num_blocks: int
    num_slots: int
    select_block_size: int
    element_size: int

    @cached_property
    def group(self) -> int:
        """G, query heads per KV head."""
        return self.query_heads // self.kv_heads

    @cached_property
    def members(self) -> int:
        """G, rounded up to a power of two."""
        return 1 << (self.group - 1).bit_length()

    @cached_property
    def head_columns(self) -> tuple[int, int]:
        """Widths of the two tiles that hold the head dim; the second may be 0."""
        main = 1 << (self.head_dim.bit_length() - 1)
        if main < 16:
            return 16, 0
        return main, padded(self.head_dim - main) if self.head_dim > main else 0

    @cached_property
    def tile_columns(self) -> int:
        """Columns (query head, token) of a tile of scores."""
        if self.element_size == 4 or self.head_dim > 128 or self.members == 1:
            return max(64, self.members)
        return 128

    @cached_property
    def tile_tokens(self) -> int:
        most = self.tile_columns // self.members
        return max(16 // self.members, min(most, 1 << (self.num_queries - 1).bit_length()), 1)

    @cached_property
    def tile_rows(self) -> int:
        """Keys of a tile: what one warp group multiplies at once, less where it is float32."""
        return 32 if self.element_size == 4 else 64

    @cached_property
    def stages(self) -> int:
        """Tiles of keys in flight: three where that leaves room for three programs."""
        return 3 if self.tile_columns <= 64 and self.head_dim <= 128 else 2

    @cached_property
    def registers(self) -> int | None:
        """Most of a thread: few enough for three programs of 128 threads a multiprocessor."""
        return None if self.element_size == 4 else 168

    @cached_property
    def candidates(self) -> int:
        """Places for blocks of a row among which the choice is finished."""
        return max(32, 2 << (self.num_slots - 1).bit_length())

    @cached_property
    def past(self) -> int:
        """No query sits later than if the last one were the last key."""
        return self.num_blocks * self.select_block_size - self.num_queries

    def chunks(self) -> Iterator[Chunk]:
        """All queries, as many at a time as `SCORE_BYTES` holds the scores of."""
        start = 0
        while start < self.num_queries:
            chunk = self.chunk(start)
            yield chunk
            start += chunk.size

    def chunk(self, start: int) -> Chunk:
        """The most queries from `start` on; the narrowest rows that do not make them fewer."""
        best = Chunk(start, 0, 0, self.candidates)
        own = (self.past + start) // self.select_block_size
        width, widest = row_width(min(own + 1, self.num_blocks)), row_width(self.num_blocks)
        while width <= widest:
            row_bytes = 4 * self.batch * self.kv_heads * (width + self.candidates)
            size = max(self.tile_tokens, SCORE_BYTES // row_bytes // 64 * 64, 1)
            wide_enough = width * self.select_block_size - self.past - start
            if width == widest:
                wide_enough = self.num_queries - start
            size = min(size, wide_enough, self.num_queries - start)
            if size > best.size:
                best = Chunk(start, size, width, self.candidates)
            width *= 2
        return best

    def empty_scores(self, device: torch.device) -> Tensor:
        """Room for the scores of any chunk, rows (batch row, KV head, query)."""
        most = max((chunk.size * chunk.pitch for chunk in self.chunks()), default=0)
        size = self.batch * self.kv_heads * most
        return torch.empty(size, dtype=torch.float32, device=device)

    def splits(self, num_queries: int, num_tiles: int) -> int:
        """Programs that share the `num_tiles` tiles of keys of one tile of queries."""
        programs = -(-num_queries // self.tile_tokens) * self.batch * self.kv_heads
        return max(1, min(-(-PROGRAMS // programs), num_tiles))

    def tile_constants(self) -> dict[str, Any]:
        """Compile-time arguments that kernels over queries and keys take."""
        head_columns, tail_columns = self.head_columns
        return {
            "GROUP": self.group,
            "MEMBERS": self.members,
            "TOKENS": self.tile_tokens,
            "ROWS": self.tile_rows,
            "HEAD_DIM": self.head_dim,
            "HEAD_COLUMNS": head_columns,
            "TAIL_COLUMNS": tail_columns,
            "PRECISION": "ieee" if self.element_size == 4 else "tf32",
            "STAGES": self.stages,
        }


# Shapes repeat from layer to layer and step to step.
_plan = lru_cache(maxsize=256)(ChoicePlan)


def choose_blocks(
    query: Tensor,
    compressed_key: Tensor,
    lse: Tensor | None,
    positions: Tensor,
    document_start: Tensor | None,
    *,
    config: NSAConfig,
    scale: float,
    num_blocks: int,
) -> Tensor:
    """`nsa_flex.selection.choose_blocks` from the log-sum-exp of the compressed branch.

    Recomputes the probabilities tile by tile; scores of at most 512 MB exist at once.

    Args:
        query: (B, Hq, Sq, D), float16, bfloat16 or float32, any strides.
        compressed_key: (B, Hkv, N, D).
        lse: float32 (B, Hq, Sq), natural log-sum-exp of the compressed branch; of no matter for a
            query that sees no compressed block. None computes it first, which costs more than
            the choice.
        positions: int (B or 1, Sq), consecutive, the last below `num_blocks * l'`.
        document_start: int (B, Sq), multiples of l', or None.

    Returns:
        int32 (B, Hkv, Sq, n), ascending, -1 at the end. A NaN score counts as 0.

    Raises:
        ValueError: a shape, dtype or device that the kernels do not take.
    """
    problem = obstacle(query, compressed_key, config, num_blocks)
    if problem:
        raise ValueError(problem)
    if lse is not None and (lse.shape != query.shape[:3] or lse.dtype != torch.float32):
        got = f"{lse.dtype} {tuple(lse.shape)}"
        raise ValueError(f"lse must be torch.float32 {tuple(query.shape[:3])}, got {got}")
    return choose_blocks_operator(
        query.detach(),
        compressed_key.detach(),
        None if lse is None else lse.detach(),
        positions,
        document_start,
        scale,
        num_blocks,
        config.compress_block_size,
        config.compress_stride,
        config.select_block_size,
        config.num_selected_blocks,
        config.num_initial_blocks,
        config.num_local_blocks,
    )


def run_choice(
    query: Tensor,
    compressed_key: Tensor,
    lse: Tensor | None,
    positions: Tensor,
    document_start: Tensor | None,
    scale: float,
    num_blocks: int,
    compress_block_size: int,
    compress_stride: int,
    select_block_size: int,
    num_selected_blocks: int,
    num_initial_blocks: int,
    num_local_blocks: int,
) -> Tensor:
    """What `choose_blocks` runs, and other operators within themselves."""
    batch, heads, num_queries, dim = query.shape
    plan = _plan(
        batch=batch,
        query_heads=heads,
        kv_heads=compressed_key.shape[1],
        num_queries=num_queries,
        head_dim=dim,
        num_blocks=num_blocks,
        num_slots=num_selected_blocks,
        select_block_size=select_block_size,
        element_size=query.element_size(),
    )
    shape = (batch, plan.kv_heads, num_queries, num_selected_blocks)
    blocks = torch.empty(shape, dtype=torch.int32, device=query.device)
    places = _places(positions, document_start)
    query, key = rows_contiguous(query), rows_contiguous(compressed_key)
    compress = {"COMPRESS": compress_block_size, "STRIDE": compress_stride}
    select = {
        "SELECT": select_block_size,
        "NUM_SLOTS": num_selected_blocks,
        "INITIAL": num_initial_blocks,
        "LOCAL": num_local_blocks,
    }
    with torch.cuda.device_of(query):
        if lse is None:
            lse = _log_sum_exp(plan, query, key, places, scale, **compress)
        scores = plan.empty_scores(query.device)
        for chunk in plan.chunks():
            _launch_scores(
                plan, chunk, query, key, lse, places, scores, scale, **compress, **select
            )
            _launch_top(plan, chunk, scores, blocks, places, **select)
    return blocks


choose_blocks_operator = torch.library.custom_op(
    "nsa_flex::choose_blocks_fused", run_choice, mutates_args=()
)


@choose_blocks_operator.register_fake
def _(query: Tensor, compressed_key: Tensor, *others: Any) -> Tensor:
    num_selected = others[8]
    shape = (query.shape[0], compressed_key.shape[1], query.shape[2], num_selected)
    return query.new_empty(shape, dtype=torch.int32)


class Places(NamedTuple):
    """Where the queries and their documents are, with the strides of a batch row."""

    positions: Tensor
    starts: Tensor
    position_stride: int
    start_stride: int
    documents: bool


def _places(positions: Tensor, document_start: Tensor | None) -> Places:
    positions = positions.contiguous()
    starts = positions if document_start is None else document_start.contiguous()
    position_stride, start_stride = (
        x.stride(0) if x.shape[0] > 1 else 0 for x in (positions, starts)
    )
    return Places(positions, starts, position_stride, start_stride, document_start is not None)


def _log_sum_exp(
    plan: ChoicePlan,
    query: Tensor,
    key: Tensor,
    places: Places,
    scale: float,
    **constants: int,
) -> Tensor:
    tiles = -(-plan.num_queries // plan.tile_tokens)
    splits = plan.splits(plan.num_queries, -(-key.shape[2] // plan.tile_rows))
    shape = (splits, plan.batch, plan.query_heads, plan.num_queries)
    lse = torch.empty(shape, dtype=torch.float32, device=query.device)
    lse_kernel[(tiles, plan.batch * plan.kv_heads, splits)](
        query,
        key,
        lse,
        places.positions,
        places.starts,
        *strides(query),
        *strides(key),
        places.position_stride,
        places.start_stride,
        plan.num_queries,
        key.shape[2],
        plan.kv_heads,
        scale * LOG2E,
        DOCUMENTS=places.documents,
        **plan.tile_constants(),
        **constants,
        num_warps=4,
    )
    return lse[0] if splits == 1 else lse.logsumexp(0)


def _key_tiles(plan: ChoicePlan, key: Tensor, **constants: int) -> TensorDescriptor | None:
    """Descriptor of the keys as (B, Hkv, l'/d, N // (l'/d), D) for tensor copies, or None.

    It leaves out the last keys if l'/d does not divide N: blocks that are forced where they exist.
    """
    per, lent = (
        constants["SELECT"] // constants["STRIDE"],
        constants["COMPRESS"] > constants["STRIDE"],
    )
    batch, heads, num_keys, dim = key.shape
    if (
        not _copies_tensors(key.device)
        or constants["INITIAL"] < lent
        or constants["LOCAL"] < 1 + lent
        or plan.head_columns != (dim, 0)
        or key.element_size() != 2
        or num_keys < per
        or key.data_ptr() % 16
        or any(step % 8 for step in key.stride()[:3])
    ):
        return None
    by_batch, by_head, by_key, _ = key.stride()
    return TensorDescriptor(
        key,
        [batch, heads, per, num_keys // per, dim],
        [by_batch, by_head, by_key, per * by_key, 1],
        [1, 1, 1, plan.tile_rows, dim],
    )


@functools.cache
def _copies_tensors(device: torch.device) -> bool:
    return INTERPRETED or torch.cuda.get_device_capability(device)[0] >= 9


def _launch_scores(
    plan: ChoicePlan,
    chunk: Chunk,
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    places: Places,
    scores: Tensor,
    scale: float,
    **constants: int,
) -> None:
    tiles = -(-chunk.size // plan.tile_tokens)
    splits = plan.splits(chunk.size, -(-chunk.width // (plan.tile_rows - 1)))
    key_tiles = _key_tiles(plan, key, **constants)
    score_kernel[(tiles, plan.batch * plan.kv_heads, splits)](
        query,
        key,
        key_tiles,
        lse,
        places.positions,
        places.starts,
        scores,
        *strides(query),
        *strides(key),
        *lse.stride(),
        places.position_stride,
        places.start_stride,
        chunk.start,
        chunk.size,
        key.shape[2],
        plan.kv_heads,
        chunk.width,
        chunk.pitch,
        scale * LOG2E,
        DOCUMENTS=places.documents,
        COPIES=key_tiles is not None,
        COMPILED=not INTERPRETED,
        **plan.tile_constants(),
        **constants,
        num_warps=4,
        maxnreg=plan.registers,
    )


def _launch_top(
    plan: ChoicePlan,
    chunk: Chunk,
    scores: Tensor,
    blocks: Tensor,
    places: Places,
    **constants: int,
) -> None:
    top_kernel[(chunk.size, plan.batch * plan.kv_heads)](
        scores,
        blocks,
        places.positions,
        places.starts,
        places.position_stride,
        places.start_stride,
        chunk.start,
        chunk.size,
        plan.num_queries,
        plan.kv_heads,
        SLOT_COLUMNS=1 << (plan.num_slots - 1).bit_length(),
        CANDIDATES=chunk.candidates,
        LANES=chunk.lanes,
        DEPTH=chunk.depth,
        DOCUMENTS=places.documents,
        **constants,
        num_warps=chunk.lanes // 32,
        maxnreg=64,
    )
