"""How patched transformers models generate: chunked prefill and continuous batching."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nsa_flex.config import NSAConfig
from nsa_flex.paging import LayerPages, Length, PagedBatch, Slots, rows_per_page
from nsa_flex.patching.hf_layers import IMPLEMENTATIONS, Decoder, holders_of, is_attention
from nsa_flex.patching.hf_versions import has_page_allocators, take_paged_cache
from nsa_flex.patching.layer import layer_of


def install(model: nn.Module, decoders: set[Decoder]) -> None:
    """Exchange two methods of the models in `model` that generate with a patched decoder."""
    for holder in holders_of(model, decoders, "get_compiled_call"):
        held = tuple(each for each in holder.modules() if each in decoders)
        holder.get_compiled_call = functools.partial(_get_compiled_call, holder, held)
    for holder in holders_of(model, decoders, "init_continuous_batching"):
        holder.init_continuous_batching = functools.partial(_init_continuous_batching, holder)


def remove(model: nn.Module, decoders: set[Decoder]) -> None:
    """Undo `install`; a manager of batching that was kept for later is dropped."""
    for holder in holders_of(model, decoders, "get_compiled_call"):
        vars(holder).pop("get_compiled_call", None)
    for holder in holders_of(model, decoders, "init_continuous_batching"):
        if "init_continuous_batching" in vars(holder):
            del holder.init_continuous_batching
            holder.destroy_cached_continuous_batching_manager()


def _get_compiled_call(
    model: Any, decoders: tuple[Decoder, ...], compile_config: Any
) -> Callable[..., Any]:
    """As the class's own, but only calls of one token are compiled; chunks of a prefill are not.

    With a static cache on a GPU `generate` would compile them too. Compiled code must not depend
    on the number of cached tokens, so that each chunk would attend at an offset that only the
    device knows. Run eagerly, the first chunk takes the kernels of a whole call and the others an
    offset that the host knows.
    """
    compiled = type(model).get_compiled_call(model, compile_config)
    if not any(each.config._attn_implementation in IMPLEMENTATIONS for each in decoders):
        return compiled  # switched by set_attn_implementation for a while, or unpatched alone
    return functools.partial(_call, model, compiled)


def _call(model: Any, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    embeds = kwargs.get("inputs_embeds")
    tokens = kwargs.get("input_ids") if embeds is None else embeds
    # A short last chunk too: each length would be one more graph.
    is_chunk = tokens is not None and tokens.shape[1] > 1
    return (model if is_chunk else compiled)(*args, **kwargs)


def _init_continuous_batching(
    model: Any,
    generation_config: Any = None,
    continuous_batching_config: Any = None,
    workload_hints: Any = None,
) -> Any:
    """As the class's own: a manager, or the one that was kept from an earlier session.

    While `set_attn_implementation` has switched NSA off it is the class's own.

    Raises:
        ValueError: something that was asked for, or that the model has, does not go together with
            NSA's pages; the message names it.
    """
    runs_nsa = model.config.get_text_config()._attn_implementation in IMPLEMENTATIONS
    kept = getattr(model, "_cached_continuous_batching_manager", None)
    if kept is not None and getattr(kept, "runs_nsa", False) != runs_nsa:  # since a switch
        model.destroy_cached_continuous_batching_manager()
        kept = None
    if not runs_nsa:
        return type(model).init_continuous_batching(
            model, generation_config, continuous_batching_config, workload_hints
        )
    if kept is not None:
        kept.switch_to_cb_friendly_attn(model)
        return kept
    check_batching(model, continuous_batching_config, generation_config)
    from transformers import ContinuousBatchingConfig

    from nsa_flex.patching.hf_engine import NSAManager

    generation = copy.deepcopy(generation_config or model.generation_config)
    batching = copy.deepcopy(continuous_batching_config or ContinuousBatchingConfig())
    if generation.eos_token_id is None:
        generation.eos_token_id = -1  # the engine's word for none
    if batching.use_cuda_graph is None:
        batching.use_cuda_graph = (False, model.device.type == "cuda")
    return NSAManager(model, generation, batching, workload_hints)


def check_engine() -> None:
    """Raises ValueError where transformers' engine is too old for NSA's pages."""
    if not has_page_allocators():
        raise ValueError(
            "continuous batching of a patched model needs a transformers whose engine has cache "
            "allocators, 5.19 or later: upgrade transformers"
        )


def check_batching(model: Any, batching: Any = None, generation: Any = None) -> None:
    """That a patched model, and what is asked of the engine, go together with NSA's pages.

    Args:
        model: a patched model that generates.
        batching: a ContinuousBatchingConfig; the engine's defaults if None.
        generation: a GenerationConfig; the model's if None.

    Raises:
        ValueError: they do not; the message names why.
    """
    check_engine()
    from transformers import ContinuousBatchingConfig

    from nsa_flex.patching.hf_engine import check_heads

    batching = ContinuousBatchingConfig() if batching is None else batching
    _check_model(model, batching.page_size)
    check_heads(model)
    _check_request(model.generation_config if generation is None else generation, batching)


def _check_model(model: Any, page_size: int) -> None:
    config = model.config.get_text_config()
    record = getattr(config, "nsa_flex", None)
    if record is None:
        raise ValueError(
            f"the text decoder of {type(model).__name__} is not the one that is patched: "
            "continuous batching runs that alone"
        )
    for name, module in model.named_modules():
        if is_attention(module) and layer_of(module) is None:
            raise ValueError(
                f"{name} is not patched, and the engine's memory for it cannot lie beside NSA's "
                "pages: continuous batching needs all attention layers patched; use generate()"
            )
    rows_per_page(page_size, NSAConfig.from_dict(record["config"]))


def _check_request(generation: Any, batching: Any) -> None:
    """ValueError for what wants passes of any lengths to have constant shapes."""
    compiled = (
        batching.default_compile_level > 0
        or batching.varlen_compile_config is not None
        or batching.decode_compile_config is not None
        or getattr(generation, "compile_config", None) is not None
    )
    if compiled:
        raise ValueError(
            "compilation is not supported in continuous batching with NSA: leave compile_config, "
            "varlen_compile_config, decode_compile_config and default_compile_level as they are"
        )
    graphs = batching.use_cuda_graph
    if graphs is True or (isinstance(graphs, tuple) and graphs[0]):
        raise ValueError(
            "CUDA graphs of passes over several tokens of a request are not supported in "
            f"continuous batching with NSA, got use_cuda_graph={graphs}: pass (False, True), "
            "which captures those over single tokens"
        )


class PagedCall(NamedTuple):
    """One forward pass of the engine.

    batch: whose tokens these are.
    layers: by layer index, its pages.
    """

    batch: PagedBatch
    layers: dict[int, LayerPages]


def read_paged_call(call: dict[str, Any]) -> PagedCall | None:
    """The engine's arguments among those of a decoder; None if it did not call.

    Takes its cache out of them.

    Raises:
        ValueError: the engine was set up without NSA's pages.
    """
    cache = take_paged_cache(call)
    if cache is None:
        return None
    pages = next(iter(getattr(cache, "cache_allocators", {}).values()), cache)
    if getattr(pages, "batches", None) is None:
        raise ValueError(
            f"the cache of continuous batching has a {type(pages).__name__}, which keeps no "
            "compressed rows: it was made before the model was patched; make a new manager "
            "(model.init_continuous_batching)"
        )
    num_keys = call["cu_seq_lens_k"][pages.layer_type].diff()
    batch = (
        _any_batch(call, cache, pages, num_keys)
        if call.get("block_table") is None
        else _batch_of_steps(call, pages, num_keys)
    )
    return PagedCall(batch, pages.layers)


def _any_batch(call: dict[str, Any], cache: Any, pages: Any, num_keys: Tensor) -> PagedBatch:
    """A batch for which the engine lists where each token goes, and the pages of each request."""
    lengths, cu_seqlens = pages.lengths(), call["cu_seq_lens_q"]
    num_tokens = sum(length.new for length in lengths)
    (written,), (blocks,) = call["write_index"], call["read_index"]
    between = pages.block_physical_stride
    written = written[:num_tokens]
    width = table_width(lengths, pages, cache.max_blocks_per_request, cu_seqlens.device)
    return PagedBatch.of(
        lengths,
        cu_seqlens,
        num_keys - cu_seqlens.diff(),
        Slots(written // between, written % between),
        _table(blocks, num_keys, width, pages.tokens_per_page),
        pages.write_trash_index // between,
        pages.nsa,
    )


def _batch_of_steps(call: dict[str, Any], pages: Any, num_keys: Tensor) -> PagedBatch:
    """A batch of single tokens, for which the engine gives a table; it may be captured."""
    lengths, page_size = pages.lengths(), pages.tokens_per_page
    table = call["block_table"][pages.index].clamp(min=0).to(torch.int64)
    is_captured = table.is_cuda and torch.cuda.is_current_stream_capturing()
    table = table[:, : table_width(lengths, pages, table.shape[1], table.device)]
    new = call["cu_seq_lens_q"].diff()
    past = num_keys - new
    unused = pages.write_trash_index // pages.block_physical_stride
    page = table.gather(1, (past // page_size).to(torch.int64)[:, None])[:, 0]
    # Padding rows bring no token: what they are given goes to the page that nobody reads.
    written = Slots(torch.where(new > 0, page, unused), past % page_size)
    return PagedBatch.of_steps(lengths, past, written, table, unused, is_captured=is_captured)


def table_width(lengths: tuple[Length, ...], pages: Any, usual: int, device: torch.device) -> int:
    """P, pages of a table for these requests.

    Kernels and launch plans are made for a width. On CUDA it is the usual one, that of captured
    passes, unless a request needs more; elsewhere operations go over all of it, and it is what
    the longest request needs.
    """
    needed = -(-max(map(sum, lengths)) // pages.tokens_per_page)
    return max(needed, usual) if device.type == "cuda" else needed


def _table(blocks: Tensor, num_keys: Tensor, width: int, page_size: int) -> Tensor | None:
    """Pages of each request, int64 (B, width), of the pages of all requests one after another."""
    if blocks.shape[0] == 0:
        return None
    num_pages = (num_keys + page_size - 1) // page_size
    first = num_pages.cumsum(0) - num_pages
    index = first[:, None] + torch.arange(width, device=blocks.device)
    return blocks[index.clamp(max=blocks.shape[0] - 1)]
