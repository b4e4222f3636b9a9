"""Continuous batching of patched transformers models: `generate_batch`, and what serves them.

All entry points of the engine get their manager from `model.init_continuous_batching`. A patched
model has one of its own, which makes managers whose cache holds compressed rows.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

from torch import nn

from nsa_flex.config import NSAConfig
from nsa_flex.paging import rows_per_page
from nsa_flex.patching.hf_layers import Decoder, holders_of, is_attention
from nsa_flex.patching.hf_versions import has_page_allocators
from nsa_flex.patching.layer import layer_of


def install(model: nn.Module, decoders: set[Decoder]) -> None:
    """Let models in `model` that generate with a patched decoder batch with NSA."""
    for holder in holders_of(model, decoders, "init_continuous_batching"):
        holder.init_continuous_batching = functools.partial(_init_continuous_batching, holder)


def remove(model: nn.Module, decoders: set[Decoder]) -> None:
    """Undo `install`; a manager that was kept for later is dropped."""
    for holder in holders_of(model, decoders, "init_continuous_batching"):
        if "init_continuous_batching" in vars(holder):
            del holder.init_continuous_batching
            holder.destroy_cached_continuous_batching_manager()


def _init_continuous_batching(
    model: Any,
    generation_config: Any = None,
    continuous_batching_config: Any = None,
    workload_hints: Any = None,
) -> Any:
    """As the class's own: a manager, or the one that was kept from an earlier session.

    Raises:
        ValueError: something that was asked for, or that the model has, does not go together with
            NSA's pages; the message names it.
    """
    kept = getattr(model, "_cached_continuous_batching_manager", None)
    if kept is not None:
        kept.switch_to_cb_friendly_attn(model)
        return kept
    check_batching(model, continuous_batching_config, generation_config)
    from transformers import ContinuousBatchingConfig

    from nsa_flex.patching.hf_manager import NSAManager

    generation = copy.deepcopy(generation_config or model.generation_config)
    batching = copy.deepcopy(continuous_batching_config or ContinuousBatchingConfig())
    if generation.eos_token_id is None:
        generation.eos_token_id = -1  # the engine's word for none
    if batching.use_cuda_graph is None:
        batching.use_cuda_graph = (False, model.device.type == "cuda")
    return NSAManager(model, generation, batching, workload_hints)


def check_batching(model: Any, batching: Any = None, generation: Any = None) -> None:
    """That a patched model, and what is asked of the engine, go together with NSA's pages.

    Args:
        model: a patched model that generates.
        batching: a ContinuousBatchingConfig; the engine's defaults if None.
        generation: a GenerationConfig; the model's if None.

    Raises:
        ValueError: they do not; the message names why.
    """
    if not has_page_allocators():
        raise ValueError(
            "continuous batching of a patched model needs a transformers whose engine has cache "
            "allocators, 5.19 or later: upgrade transformers"
        )
    from transformers import ContinuousBatchingConfig

    from nsa_flex.patching.hf_manager import check_heads

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
        if is_attention(module):
            _check_patched(name, module)
    rows_per_page(page_size, NSAConfig.from_dict(record["config"]))


def _check_patched(name: str, module: Any) -> None:
    if layer_of(module) is None:
        raise ValueError(
            f"{name} is not patched, and the engine's memory for it cannot lie beside NSA's "
            "pages: continuous batching needs all attention layers patched; use generate()"
        )


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
