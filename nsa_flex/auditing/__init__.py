"""Audits of any function or model: does it compile cleanly, and what did it cost?

`audit(model_or_fn, inputs)` runs a callable over several batches, with and without gradients, and
reports graph breaks, recompilations, host syncs, CUDA-graph skips, backends, kernels, compile
times and memory. `nsa_flex.audit` is this function; `nsa-flex audit` is its command.
"""

from nsa_flex.auditing.report import (
    AuditFinding,
    AuditReport,
    Phase,
    read_baseline,
    write_baseline,
)
from nsa_flex.auditing.run import audit

__all__ = [
    "AuditFinding",
    "AuditReport",
    "Phase",
    "audit",
    "read_baseline",
    "write_baseline",
]
