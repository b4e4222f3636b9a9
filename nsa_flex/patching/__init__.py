"""Native Sparse Attention inside existing models: `patch`, `unpatch`, `load`."""

from nsa_flex.installed import when_imported
from nsa_flex.patching.adapters import Adapter, register_adapter
from nsa_flex.patching.apply import patch, unpatch
from nsa_flex.patching.checkpoint import load, register_models
from nsa_flex.patching.layer import AttentionShape, NSALayer
from nsa_flex.patching.parallel import context_parallel
from nsa_flex.patching.rows import Rows, packed_rows, padded_rows
from nsa_flex.patching.sequence_parallel import sequence_parallel
from nsa_flex.patching.tensor_parallel import tensor_parallel

__all__ = [
    "Adapter",
    "AttentionShape",
    "NSALayer",
    "Rows",
    "context_parallel",
    "load",
    "packed_rows",
    "padded_rows",
    "patch",
    "register_adapter",
    "sequence_parallel",
    "tensor_parallel",
    "unpatch",
]


def _register_config() -> None:
    from nsa_flex.patching import hf_saved_config, minicpm_config

    hf_saved_config.register()
    minicpm_config.register()


def _register_models() -> None:
    from nsa_flex.patching import minicpm_auto

    register_models()
    minicpm_auto.register()


def _register_minimax_m3() -> None:
    from nsa_flex.patching import hf_attention, minimax_m3

    minimax_m3.use_indexer_input(hf_attention.IMPLEMENTATIONS)


when_imported("transformers.models.auto.configuration_auto", _register_config)
when_imported("transformers.models.auto.modeling_auto", _register_models)
when_imported(
    "transformers.models.minimax_m3_vl.modeling_minimax_m3_vl",
    _register_minimax_m3,
)
