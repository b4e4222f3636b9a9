"""Public names stay importable from where they were, whatever moves inside."""

from __future__ import annotations

import importlib

import pytest

PUBLIC = {
    "nsa_flex": [
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
    ],
    "nsa_flex.parallel": [
        "SequenceShards",
        "ShardedCache",
        "context_parallel_attention",
        "exchanged_bytes",
        "last_tokens",
        "sent_bytes",
        "shard_batch",
        "shard_sequence",
    ],
    "nsa_flex.training": [
        "Telemetry",
        "TelemetryCallback",
        "TrainingError",
        "read_rows",
        "schema",
    ],
    "nsa_flex.training.telemetry": [
        "ARTEFACTS",
        "Telemetry",
        "last_of_each_step",
        "read_rows",
        "schema",
        "telemetry",
    ],
    "nsa_flex.testing": [
        "CHECKS",
        "Check",
        "ConformanceReport",
        "check_model",
        "check_ranks",
    ],
    "nsa_flex.auditing": [
        "AuditFinding",
        "AuditReport",
        "Phase",
        "audit",
        "read_baseline",
        "write_baseline",
    ],
    "nsa_flex.cache": [
        "LayerCache",
        "Memory",
    ],
    "nsa_flex.hot_path": [
        "Finding",
        "FindingKind",
        "ForwardBackward",
        "NoGradientError",
        "Report",
        "SyncDetector",
        "assert_clean",
        "check",
        "count_graphs",
        "find_graph_breaks",
        "find_syncs",
        "find_value_reads",
        "to_meta",
    ],
    "nsa_flex.masks": [
        "compressed_block_mask",
        "compressed_mask_mod",
        "folded_block_mask",
        "folded_mask_mod",
        "materialize",
        "selected_block_mask",
        "selected_mask_mod",
        "show",
        "sliding_block_mask",
        "sliding_mask_mod",
    ],
    "nsa_flex.patching": [
        "Adapter",
        "AttentionShape",
        "NSALayer",
        "Rows",
        "ShardedNSACache",
        "context_parallel",
        "load",
        "packed_rows",
        "padded_rows",
        "patch",
        "register_adapter",
        "sequence_parallel",
        "tensor_parallel",
        "unpatch",
    ],
}


@pytest.mark.parametrize("module", PUBLIC)
def test_names_stay_where_they_were(module):
    """A new name is listed here; one leaves by the rules of docs/guide/stability.md."""
    found = importlib.import_module(module)
    assert [name for name in PUBLIC[module] if not hasattr(found, name)] == []
    assert sorted(PUBLIC[module]) == sorted(found.__all__)


def test_a_former_place_gives_the_same_object():
    from nsa_flex import NSACache
    from nsa_flex.patching.nsa_cache import NSACache as here

    assert here is NSACache


def test_the_version_is_still_an_attribute():
    import nsa_flex
    from nsa_flex.version import __version__

    assert nsa_flex.__version__ == __version__
