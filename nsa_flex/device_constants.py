"""Facts about the current CUDA device as constants of a compiled graph.

Imported late: the decorator loads the compiler, which `import nsa_flex` should not.
"""

from __future__ import annotations

import torch

from nsa_flex.tuning import Entry, shared_memory, tuned_entries


@torch.compiler.assume_constant_result
def tuned_entries_constant() -> tuple[Entry, ...]:
    """`tuned_entries` of when the graph was made: no file is read while tracing."""
    return tuned_entries()


@torch.compiler.assume_constant_result
def shared_memory_constant() -> int:
    """`shared_memory` of when the graph was made."""
    return shared_memory()
