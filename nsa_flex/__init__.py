"""Native Sparse Attention for torch.compile and FlexAttention."""

import importlib
from typing import TYPE_CHECKING, Any

from nsa_flex.attention import NSAAux, nsa_attention
from nsa_flex.block_topk import topk_blocks
from nsa_flex.cache import LayerCache
from nsa_flex.compression import Compression
from nsa_flex.config import NSAConfig
from nsa_flex.documents import DocumentLayout, align_packed, align_padded, align_positions
from nsa_flex.explaining import Explanation, explain
from nsa_flex.gates import Gates
from nsa_flex.indexer import indexer_topk
from nsa_flex.infllm import InfLLMV2Config, infllm_v2_attention
from nsa_flex.installed import warn_if_untested
from nsa_flex.module import NSAAttention
from nsa_flex.parallel import context_parallel_attention, shard_batch, shard_sequence
from nsa_flex.patching import (
    Adapter,
    AttentionShape,
    context_parallel,
    load,
    patch,
    register_adapter,
    sequence_parallel,
    tensor_parallel,
    unpatch,
)
from nsa_flex.quantization import quantization_filter
from nsa_flex.selected import selected_attention
from nsa_flex.version import __version__ as __version__

if TYPE_CHECKING:
    from nsa_flex.auditing import AuditReport, audit
    from nsa_flex.patching.nsa_cache import NSACache
    from nsa_flex.training import TelemetryCallback
    from nsa_flex.training.telemetry import telemetry

__all__ = [
    "Adapter",
    "AttentionShape",
    "AuditReport",
    "Compression",
    "DocumentLayout",
    "Explanation",
    "Gates",
    "InfLLMV2Config",
    "LayerCache",
    "NSAAttention",
    "NSAAux",
    "NSACache",
    "NSAConfig",
    "TelemetryCallback",
    "align_packed",
    "align_padded",
    "align_positions",
    "audit",
    "context_parallel",
    "context_parallel_attention",
    "explain",
    "indexer_topk",
    "infllm_v2_attention",
    "load",
    "nsa_attention",
    "patch",
    "quantization_filter",
    "register_adapter",
    "selected_attention",
    "sequence_parallel",
    "shard_batch",
    "shard_sequence",
    "telemetry",
    "tensor_parallel",
    "topk_blocks",
    "unpatch",
]

warn_if_untested("torch")


def __getattr__(name: str) -> Any:
    if name == "NSACache":  # looks for transformers, which takes seconds to import
        from nsa_flex.patching.nsa_cache import NSACache

        return NSACache
    if name in ("AuditReport", "audit"):  # needs the compiler
        from nsa_flex import auditing

        return getattr(auditing, name)
    if name == "telemetry":
        return importlib.import_module("nsa_flex.training.telemetry").telemetry
    if name == "TelemetryCallback":  # imports transformers
        return importlib.import_module("nsa_flex.training").TelemetryCallback
    if name in ("auditing", "hot_path", "parallel", "testing", "training"):
        return importlib.import_module(f"nsa_flex.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
