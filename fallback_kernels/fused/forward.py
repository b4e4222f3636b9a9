"""The stages of the core's forward, in order, for each `Route.forward`.

Compressed branch, top-k block selection from its log-sum-exps, then "masked", "epilogue" or
"two_kernels". "short" needs neither scores nor a selection.

Offsets are read on the device, so that one launch plan serves all chunks of a prefill. With
gradients the host knows them from the numbers of queries and keys.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from nsa_flex.config import NSAConfig
from nsa_flex.fallback_kernels.common.block_kinds import block_kinds
from nsa_flex.fallback_kernels.common.every_block import every_block
from nsa_flex.fallback_kernels.common.strides import rows_contiguous
from nsa_flex.fallback_kernels.fused import fwd_epilogue
from nsa_flex.fallback_kernels.fused.compressed_branch import CompressedOutput, attend_compressed
from nsa_flex.fallback_kernels.fused.fwd_sliding_epilogue import SlidingEpilogue, sliding_epilogue
from nsa_flex.fallback_kernels.fused.route import (
    Route,
    past_keys,
    plan_selected,
    starts_by_position,
)
from nsa_flex.fallback_kernels.selected import fwd_partial as selected_forward
from nsa_flex.fallback_kernels.selected import prepare as selected_prepare
from nsa_flex.fallback_kernels.selected.config import index_words
from nsa_flex.fallback_kernels.selected.prepare import Selection
from nsa_flex.fallback_kernels.short.fwd import (
    Selected,
    ShortResults,
    empty_results,
    short_forward,
)
from nsa_flex.fallback_kernels.topk.interface import run_topk

CoreTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def forward_kinds(document_start: Tensor | None, config: NSAConfig, route: Route) -> Tensor | None:
    """What `block_kinds` says where the first queries of documents are short.

    Where the route relies on `max_document_length`, the device checks it.
    """
    if document_start is None:
        return None
    longest = route.longest if route.longest < document_start.shape[1] else None
    if longest is None and not route.short_queries:
        return None
    kinds = block_kinds(document_start, config, route.short_documents, longest)
    return kinds if route.short_queries else None


def run_forward(
    tensors: tuple[Tensor, ...],
    own: tuple[Tensor, Tensor] | None,
    document_start: Tensor | None,
    config: NSAConfig,
    scale: float,
    differentiable: bool,
    route: Route,
    kinds: Tensor | None,
    offsets: Tensor | None = None,
) -> CoreTensors:
    """The results of `core_forward`; `own`: keys and values of the sliding branch, if others.

    kinds: of `forward_kinds`.
    """
    query, key, value, compressed_key, compressed_value, gates = tensors
    tokens = query.shape[2]
    rows = query.transpose(1, 2).contiguous()
    q = rows.transpose(1, 2)
    compressed = attend_compressed(
        *(rows, compressed_key, compressed_value, document_start, config, scale),
        *(route.compressed, offsets, kinds, past_keys(query, key)),
    )
    blocks = run_topk(
        q,
        compressed_key,
        compressed.lse,
        _positions(tokens, offsets, query.device),
        document_start,
        scale,
        config.num_select_blocks(key.shape[2]),
        config.counts,
        route.longest,
    )
    index = _empty_index(q, key, value, blocks, config, differentiable)
    plan = plan_selected(
        *(q, key, value, config),
        document_start is not None,
        route.needs_index,
        offsets is not None,
    )
    prepare = partial(
        selected_prepare.prepare,
        *(plan, q, rows_contiguous(key), rows_contiguous(value), blocks, scale),
        storage=index if route.needs_index else None,
        offsets=offsets,
    )
    run_short = partial(short_forward, (q, *tensors[1:]), own, document_start, config, scale)
    if route.forward == "masked":
        if route.needs_index:
            prepare()
        selection = Selected(blocks, compressed.parts[0], compressed.lse)
        results = _run_masked(q, value, selection, kinds, run_short, differentiable, route)
        return _core_tensors(results, blocks, index)
    results = _run_selected(
        partial(prepare, kinds=kinds),
        *(q, own or (key, value), document_start, config.window_size, scale),
        *(compressed, gates, offsets),
        save=differentiable,
        route=route,
    )
    if kinds is not None:  # overwrites the results of short queries, where there are any
        run_short(
            route.short_queries,
            save=differentiable,
            kinds=kinds,
            results=results._replace(compressed=compressed.parts[0]),
        )
    return _core_tensors(results, blocks, index)


def _run_masked(
    query: Tensor,
    value: Tensor,
    selection: Selected,
    kinds: Tensor | None,
    run_short: Callable[..., ShortResults],
    save: bool,
    route: Route,
) -> ShortResults:
    """One kernel that attends documents whole, and one for short queries where the route says."""
    results = empty_results(query, value, True, save, selection)
    if kinds is not None:
        run_short(route.short_queries, save=save, kinds=kinds, results=results)
    run_short(route.longest, save=save, selection=selection, kinds=kinds, results=results)
    return results if save else results._replace(compressed=results.compressed.new_empty(0))


def _run_selected(
    prepare: Callable[[], Selection],
    query: Tensor,
    window_keys: tuple[Tensor, Tensor],
    document_start: Tensor | None,
    window: int,
    scale: float,
    compressed: CompressedOutput,
    gates: Tensor,
    offsets: Tensor | None,
    *,
    save: bool,
    route: Route,
) -> ShortResults:
    """The other two branches and the gated sum, as `Route.forward` says."""
    parts, fold, compressed_lse = compressed
    save_compressed = save and not fold.is_whole
    last: fwd_epilogue.Epilogue | SlidingEpilogue
    if route.forward == "epilogue":
        last = fwd_epilogue.fwd_epilogue(
            *(prepare(), document_start, window, parts, fold, gates),
            save=save,
            save_compressed=save_compressed,
        )
        selected, selected_lse = last.selected, last.selected_lse
    else:
        selected, selected_lse = (x.transpose(1, 2) for x in selected_forward.forward(prepare()))
        last = sliding_epilogue(
            query,
            *window_keys,
            starts_by_position(document_start, past_keys(query, window_keys[0])),
            window,
            scale,
            parts,
            fold,
            selected,
            gates,
            save=save,
            save_compressed=save_compressed,
            offsets=offsets,
        )
        if not save:
            selected = selected.new_empty(0)
    return ShortResults(
        last.out,
        parts[0] if save and fold.is_whole else last.compressed,
        compressed_lse,
        selected,
        selected_lse,
        last.sliding,
        last.sliding_lse,
    )


def run_short_forward(
    tensors: tuple[Tensor, ...],
    own: tuple[Tensor, Tensor] | None,
    document_start: Tensor | None,
    config: NSAConfig,
    scale: float,
    differentiable: bool,
    return_blocks: bool,
) -> CoreTensors:
    """The results of `core_forward` where every query selects every block.

    What nobody wants has the shape that the operator promises, and is not written.
    """
    query, key, value, *_ = tensors
    batch, _, tokens, _ = query.shape
    shape = (batch, value.shape[1], tokens, config.num_selected_blocks)
    if return_blocks:
        positions = torch.arange(tokens, device=query.device)[None]
        blocks = every_block(positions, document_start, shape, config.select_block_size)
    else:
        blocks = torch.empty(shape, dtype=torch.int32, device=query.device)
    index = _empty_index(query, key, value, blocks, config, differentiable)
    results = short_forward(
        *(tensors, own, document_start, config, scale, config.num_selected_tokens),
        save=differentiable,
    )
    return _core_tensors(results, blocks, index)


def _core_tensors(results: ShortResults, blocks: Tensor, index: Tensor) -> CoreTensors:
    out, *branches = results
    return (out, blocks, *branches, index)  # type: ignore[return-value]  # six


def _empty_index(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Tensor,
    config: NSAConfig,
    differentiable: bool,
) -> Tensor:
    words = index_words(query, value, blocks, config.select_block_size, past_keys(query, key))
    return torch.empty(words if differentiable else 0, dtype=torch.int32, device=query.device)


def _positions(tokens: int, offsets: Tensor | None, device: torch.device) -> Tensor:
    """Position of each query: (1, S), or int32 (B, S) with `offsets`."""
    if offsets is None:
        return torch.arange(tokens, device=device)[None]
    return torch.arange(tokens, dtype=torch.int32, device=device)[None] + offsets[:, :1]
