"""Native Sparse Attention inside existing models: `patch`, `unpatch`, `load`."""

from nsa_flex.patching.adapters import Adapter, register_adapter
from nsa_flex.patching.apply import patch, unpatch
from nsa_flex.patching.checkpoint import load
from nsa_flex.patching.layer import AttentionShape, NSALayer
from nsa_flex.patching.rows import Rows, packed_rows, padded_rows

__all__ = [
    "Adapter",
    "AttentionShape",
    "NSALayer",
    "Rows",
    "load",
    "packed_rows",
    "padded_rows",
    "patch",
    "register_adapter",
    "unpatch",
]
