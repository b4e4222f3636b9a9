"""Models whose own sparse attention nsa_flex computes, checked unpatched: MiniCPM4, MiniMax-M3."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch import nn

from nsa_flex.config import NSAConfig
from nsa_flex.infllm import InfLLMV2Config

SMALL_INFLLM = InfLLMV2Config(8, 4, 16, window_size=16, topk=3, dense_len=0)
SMALL_INDEXER = NSAConfig(
    *(16, 16, 16), num_selected_blocks=3, num_initial_blocks=0, num_local_blocks=1
)


def sparse_modules(model: nn.Module) -> dict[str, Any]:
    """Attention modules by name: InfLLM-V2's, and those with an indexer whose blocks run here."""
    return {
        name: module
        for name, module in model.named_modules()
        if getattr(module, "infllm", None) is not None or _is_indexed(module)
    }


def _is_indexed(module: Any) -> bool:
    if getattr(module, "indexer", None) is None:
        return False
    from nsa_flex.patching.hf_layers import IMPLEMENTATIONS
    from nsa_flex.patching.minimax_m3 import is_own

    config = getattr(module, "config", None)
    return config is not None and is_own(config) and config._attn_implementation in IMPLEMENTATIONS


def small_sizes(model: nn.Module) -> NSAConfig | None:
    """Those that `shrink` gives such a model; None for any other."""
    module = next(iter(sparse_modules(model).values()), None)
    if module is None:
        return None
    return SMALL_INDEXER if _is_indexed(module) else SMALL_INFLLM.selection


def shrink(model: Any) -> None:
    """Small blocks, which no weight depends on, in a twin with configs of its own."""
    names = [field.name for field in fields(SMALL_INFLLM) if field.init]
    for module in sparse_modules(model).values():
        if _is_indexed(module):
            size, number = SMALL_INDEXER.select_block_size, SMALL_INDEXER.num_selected_blocks
            sizes = {"block_size": size, "topk_blocks": number, "local_blocks": 1}
            vars(module.indexer).update(sizes)
            vars(module.config).update({f"index_{name}": value for name, value in sizes.items()})
        else:
            module.infllm = SMALL_INFLLM
            model.config.sparse_config = {name: getattr(SMALL_INFLLM, name) for name in names}
