"""Launches of the kernels of a decode step. Grids depend on shapes alone.

Arguments go by the names of a kernel's parameters: `step_values` has those of a whole step, a
launch adds or replaces what is its own, and `launch` picks what the kernel takes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_flex.config import PRODUCTS, NSAConfig
from nsa_flex.fallback_kernels.common.softmax import base2_scale
from nsa_flex.fallback_kernels.common.strides import rows_contiguous, strides
from nsa_flex.fallback_kernels.common.tiles import next_power_of_2, tile_width
from nsa_flex.fallback_kernels.decode.append_kv import decode_append_kernel
from nsa_flex.fallback_kernels.decode.combine import decode_combine_kernel
from nsa_flex.fallback_kernels.decode.config import DecodePlan, Workspace
from nsa_flex.fallback_kernels.decode.split_kv_compressed import decode_compressed_kernel
from nsa_flex.fallback_kernels.decode.split_kv_selected import decode_selected_sliding_kernel
from nsa_flex.fallback_kernels.decode.topk import decode_topk_kernel

MAX_LENGTHS = 128  # of a batch that every CTA reads
Pair = tuple[Tensor, Tensor]  # key (B, H, T, D), value (B, H, T, Dv)
Values = dict[str, Any]  # by the name of a parameter


class Cache(NamedTuple):
    """What a layer has stored, and where new tokens go.

    key (B, Hkv, C, D), value (B, Hkv, C, Dv), compressed_key (B, Hkv, Ncap, D), compressed_value
    (B, Hkv, Ncap, Dv), last dimension contiguous; lengths int32 (B,), tokens before the new ones.

    With a table, int (B, P), of the pages of each row, they are (pages, Hkv, rows of a page, ·).
    """

    key: Tensor
    value: Tensor
    compressed_key: Tensor
    compressed_value: Tensor
    lengths: Tensor
    table: Tensor | None = None

    @property
    def tokens(self) -> Pair:
        return self.key, self.value

    @property
    def compressed(self) -> Pair:
        return self.compressed_key, self.compressed_value

    def pages(self, of: Tensor) -> Values:
        """Where a kernel that reads `of` finds its pages, if it is in pages."""
        if self.table is None:
            return {"PAGE": 0, "table_ptr": None, "table_stride": 0}
        stride = self.table.stride(0)
        return {"PAGE": of.shape[2], "table_ptr": self.table, "table_stride": stride}


class Phi(NamedTuple):
    """The map from a block's tokens to its compressed row, as `nsa_flex.compression` has it.

    kind: "mean", "weighted", "linear" or "mlp". key, value: its parameters in their order, each
    contiguous: none; logits (Hkv, l); weight (Hkv, l, D, D); position (l, D), hidden weight
    (2, l, D, D) and output weight (2, D, D).
    """

    kind: str = "mean"
    key: tuple[Tensor, ...] = ()
    value: tuple[Tensor, ...] = ()

    @property
    def is_product(self) -> bool:
        """Whether kernels of their own compress, for the bytes of the weights."""
        return self.kind in PRODUCTS

    @property
    def logits(self) -> tuple[Tensor, ...]:
        """Of the kind weighted; none of another."""
        return self.key + self.value if self.kind == "weighted" else ()


class Gating(NamedTuple):
    """gates (B, Hq, T, C), or with `offset` (C,) what their sigmoid plus offset is.

    bias: (C · Hq,), added to each token's before the sigmoid, head by head.
    """

    gates: Tensor
    offset: Tensor | None = None
    bias: Tensor | None = None


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    values: Values,
    *,
    num_warps: int,
    pdl: bool = False,
    **own: Any,
) -> None:
    """Launches a kernel with the arguments that `own` has for it, or else `values`.

    pdl: it waits for the kernel before by itself, and may be launched before that is done.
    """
    options = {"launch_pdl": True} if pdl else {}
    arguments = _picking_arguments(kernel.fn)({**values, **own})
    kernel[grid](*arguments, num_warps=num_warps, **options)


@functools.cache
def _picking_arguments(function: Any) -> Callable[[Values], tuple[Any, ...]]:
    """Of a kernel's function, in the order of its parameters; kept for the host's time."""
    return itemgetter(*inspect.signature(function).parameters)


def values_of(name: str, pair: Pair, dims: int = 3) -> Values:
    """Keys and values, and strides of their leading `dims`; `name` is before "key" and "value"."""
    key, value = pair
    return {
        f"{name}key_ptr": key,
        f"{name}value_ptr": value,
        f"{name}key_strides": strides(key)[:dims],
        f"{name}value_strides": strides(value)[:dims],
    }


def run(
    plan: DecodePlan,
    query: Tensor,
    cache: Cache,
    gating: Gating,
    scale: float,
    sliding: Pair | None = None,
    new: Pair | None = None,
    phi: Phi | None = None,
    rows_read: Tensor | None = None,
    *,
    behind_phi: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attends: out (B, T, Hq, Dv), blocks (B, Hkv, T, n) in the order of their slots, and lse
    (B, Hq, T, C) of the C branches that the config has.

    Args:
        new: the one token of each row that the first kernel stores, with the block that it
            completes if `phi`.
        behind_phi: whether φ's own kernels were launched right before.
    """
    shape = (plan.batch, plan.tokens, plan.query_heads, plan.value_dim)
    out = torch.empty(shape, dtype=query.dtype, device=query.device)
    lse = torch.empty(
        (plan.batch, plan.query_heads, plan.tokens, len(plan.config.branches)),
        dtype=torch.float32,
        device=query.device,
    )
    query = rows_contiguous(query)
    workspace = plan.workspace(query.device)
    values = step_values(plan, query, cache, workspace, scale, sliding, new, phi, rows_read)
    with torch.cuda.device_of(query):
        if plan.compressed_splits:
            launch_compressed(plan, cache, values, behind_phi=behind_phi)
        if plan.num_slots:
            launch_topk(plan, values)
        if plan.selected_splits + plan.window_splits:
            launch_selected_sliding(plan, cache, values)
        launch_combine(plan, gating, out, lse, values)
    return out, workspace.blocks, lse


def fake_results(
    query: Tensor, kv_heads: int, value_dim: int, config: NSAConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Tensors like those of `run`, in the kind of the query's memory."""
    batch, heads, tokens, _ = query.shape
    slots = config.num_selected_blocks if config.has("selected") else 0
    return (
        query.new_empty((batch, tokens, heads, value_dim)),
        query.new_empty((batch, kv_heads, tokens, slots), dtype=torch.int32),
        query.new_empty((batch, heads, tokens, len(config.branches)), dtype=torch.float32),
    )


def padded_batch(batch: int) -> int:
    """Of the rows whose lengths each CTA reads to see if it has to wait; 0: it waits anyway."""
    padded = next_power_of_2(batch)
    return padded if padded <= MAX_LENGTHS else 0


def step_values(
    plan: DecodePlan,
    query: Tensor,
    cache: Cache,
    workspace: Workspace,
    scale: float,
    sliding: Pair | None = None,
    new: Pair | None = None,
    phi: Phi | None = None,
    rows_read: Tensor | None = None,
) -> Values:
    """Arguments of the kernels of a step; parameters as of `run`."""
    return {
        **plan.values(),
        **values_of("", cache.tokens),
        **values_of("sliding_", sliding or cache.tokens),
        **values_of("new_", new or (query, query), dims=2),
        **values_of_logits("weight", phi.logits if phi else (), query),
        "query_ptr": query,
        "query_strides": strides(query),
        "lengths_ptr": cache.lengths,
        "partial_ptr": workspace.partial,
        "row_max_ptr": workspace.row_max,
        "row_sum_ptr": workspace.row_sum,
        "score_ptr": workspace.score,
        "candidate_ptr": workspace.candidates,
        "block_ptr": workspace.blocks,
        "rows_read_ptr": workspace.blocks if rows_read is None else rows_read,
        "scale_log2": base2_scale(scale),
        "HAS_NEW_TOKEN": new is not None,
        "WRITE_COMPRESSED": phi is not None,
        "COUNT_ROWS": rows_read is not None,
    }


def values_of_logits(name: str, logits: Sequence[Tensor], unread: Tensor) -> Values:
    """Logits of φ weighted, which kernels call `name`; without any, `unread` in their place."""
    key, value = logits or (unread, unread)
    return {f"key_{name}_ptr": key, f"value_{name}_ptr": value, "WEIGHTED": bool(logits)}


def values_of_stored(new: Pair, cache: Cache, config: NSAConfig) -> Values:
    """Arguments of the kernels that store new tokens, or compress what these complete."""
    new_key, new_value = new
    _, kv_heads, num_new, head_dim = new_key.shape
    _, compressed_heads, num_compressed, _ = cache.compressed_key.shape
    return {
        **values_of("new_", new),
        **values_of("", cache.tokens),
        **values_of("compressed_", cache.compressed),
        "lengths_ptr": cache.lengths,
        "num_new": num_new,
        "capacity": cache.key.shape[2],
        "num_compressed": num_compressed,
        "kv_heads": kv_heads,
        "compressed_heads": compressed_heads,
        "HEAD_DIM": head_dim,
        "VALUE_DIM": new_value.shape[3],
        "COMPRESS": config.compress_block_size,
        "STRIDE": config.compress_stride,
    }


def launch_append(new: Pair, cache: Cache, phi: Phi | None, config: NSAConfig) -> None:
    """Stores the new tokens, and the blocks that they complete in the first heads if `phi`."""
    batch, kv_heads, tokens, _ = new[0].shape
    with torch.cuda.device_of(cache.key):
        launch(
            decode_append_kernel,
            (tokens, batch * kv_heads),
            values_of_stored(new, cache, config),
            num_warps=4,
            **values_of_logits("weight", phi.logits if phi else (), cache.key),
            WRITE_COMPRESSED=phi is not None,
        )


def launch_compressed(
    plan: DecodePlan, cache: Cache, step: Values, *, behind_phi: bool = False
) -> None:
    """Compressed branch; stores the one new token of each row first if there is one, see `run`."""
    launch(
        decode_compressed_kernel,
        (plan.compressed_splits, plan.tokens, plan.batch * plan.kv_heads),
        step,
        num_warps=plan.warps,
        pdl=plan.pdl,
        **values_of("", cache.compressed),
        **values_of("cache_", cache.tokens),
        **cache.pages(cache.compressed_key),
        rows_read_ptr=step["rows_read_ptr" if step["COUNT_ROWS"] else "row_max_ptr"],
        BLOCK_N=plan.compressed_block_n,
        BLOCK_POOL=tile_width(plan.tile_blocks + 1) if plan.num_slots else 0,
        STAGES=plan.stages,
        PADDED_BATCH=padded_batch(plan.batch) if behind_phi else 0,
        OUTPUT=plan.config.has("compressed"),
    )


def launch_topk(plan: DecodePlan, step: Values) -> None:
    """The top-k blocks of each chunk."""
    launch(
        decode_topk_kernel,
        (plan.chunks, plan.tokens, plan.batch * plan.kv_heads),
        step,
        num_warps=plan.topk_warps,
        pdl=plan.pdl,
        HEADS=plan.topk_heads,
        PADDED_COMPRESSED_SPLITS=plan.padded_compressed_splits,
        CHUNK=plan.chunk,
        BLOCK_N=plan.compressed_block_n,
        LAUNCH_AFTER_WAIT=plan.launches_after_wait,
    )


def launch_selected_sliding(plan: DecodePlan, cache: Cache, step: Values) -> None:
    """Selected and sliding branch."""
    splits = plan.window_splits + plan.selected_splits
    independent = plan.window_splits + (plan.initial_local_splits if plan.num_topk else 0)
    launch(
        decode_selected_sliding_kernel,
        (plan.batch * plan.kv_heads, plan.tokens, splits),
        step,
        num_warps=plan.warps,
        # As the first kernel of a step it is launched when all work before is done.
        pdl=plan.pdl and plan.config.compresses,
        **cache.pages(cache.key),
        first_dependent_split=min(independent, splits - 1),
        STAGES=plan.selected_stages,
    )


def launch_combine(
    plan: DecodePlan, gating: Gating, out: Tensor, lse: Tensor, step: Values
) -> None:
    """The gated sum: out (B, T, Hq, Dv) in its dtype, lse float32 (B, Hq, T, C)."""
    gates, offset, bias = gating
    block_dv = plan.combine_block_dv
    launch(
        decode_combine_kernel,
        (plan.block_dv // block_dv, plan.group, plan.units),
        step,
        num_warps=1,
        pdl=plan.pdl,
        out_ptr=out,
        lse_ptr=lse,
        gate_ptr=gates,
        gate_offset_ptr=gates if offset is None else offset,
        gate_bias_ptr=gates if bias is None else bias,
        gate_strides=gates.stride(),
        BLOCK_DV=block_dv,
        COMPRESSED_BLOCK_N=plan.compressed_block_n if plan.config.has("compressed") else 0,
        PADDED_SPLITS=plan.padded_splits,
        FROM_LOGITS=offset is not None,
        HAS_BIAS=bias is not None,
    )
