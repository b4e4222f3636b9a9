"""Which backend computes which branch of a call, and why not a better one.

`backends.facts` is what is looked at, `table` the order of `auto`, explicit choices and what runs,
`unsupported` what each backend cannot compute. Nothing here reads a tensor's values.
"""

from nsa_flex.backends.facts import (
    ALL_BRANCHES,
    BRANCHES,
    FEW_QUERIES,
    Backend,
    BackendName,
    BranchName,
    Facts,
)
from nsa_flex.dispatch.table import (
    CUDA_ORDER,
    IMPLEMENTATIONS,
    Choice,
    choose_backends,
    is_decoded,
    is_fused,
)
from nsa_flex.dispatch.unsupported import unsupported_reason

__all__ = [
    "ALL_BRANCHES",
    "BRANCHES",
    "CUDA_ORDER",
    "FEW_QUERIES",
    "IMPLEMENTATIONS",
    "Backend",
    "BackendName",
    "BranchName",
    "Choice",
    "Facts",
    "choose_backends",
    "is_decoded",
    "is_fused",
    "unsupported_reason",
]
