"""Which backend computes which branch: one table for `auto`, and the reasons for it.

Decided from shapes, dtypes, the device and the need of gradients; never from values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from nsa_flex.backends import dense, fa2, flex, fused, sdpa, triton
from nsa_flex.backends.branch import Branch
from nsa_flex.backends.facts import (
    ALL_BRANCHES,
    BRANCHES,
    FEW_QUERIES,
    Backend,
    BackendName,
    BranchName,
    Facts,
)
from nsa_flex.config import SUMMING_RULES
from nsa_flex.dispatch.unsupported import decode_unsupported_reason, unsupported_reason
from nsa_flex.tuning import lookup, tuned_entries

# What `auto` tries on CUDA, best first; `dense` is what always works.
CUDA_ORDER: dict[BranchName, tuple[str, ...]] = {
    "compressed": ("sdpa", "triton", "flex", "dense"),
    "selected": ("triton", "flex", "dense"),
    "sliding": ("triton", "flex", "dense"),
}
MOST_CHOSEN = 64  # blocks of a query that the operator of all branches can choose

# What runs a branch on a backend.
IMPLEMENTATIONS: dict[tuple[str, BranchName], Callable[[Branch], tuple[Tensor, Tensor | None]]] = {
    ("dense", "compressed"): dense.compressed,
    ("dense", "selected"): dense.selected,
    ("dense", "sliding"): dense.sliding,
    ("flex", "compressed"): flex.compressed,
    ("flex", "selected"): flex.selected,
    ("flex", "sliding"): flex.sliding,
    ("sdpa", "compressed"): sdpa.compressed,
    ("fa2", "compressed"): fa2.compressed,
    ("fa2", "sliding"): fa2.sliding,
    ("triton", "compressed"): triton.compressed,
    ("triton", "selected"): triton.selected,
    ("triton", "sliding"): triton.sliding,
}


@dataclass(frozen=True)
class Choice:
    """The backend of one branch, and why."""

    branch: BranchName
    backend: str
    reason: str

    def __str__(self) -> str:
        return f"{self.branch:<10} {self.backend:<7} {self.reason}"


def choose_backends(facts: Facts, backend: Backend = "auto") -> dict[BranchName, Choice]:
    """One choice a branch that there is.

    Raises:
        ValueError: an explicitly named backend cannot compute its branch, or is of an absent one;
            the message says why. It never falls back. `fa2`, `sdpa` and `triton` alone name what
            they offer; the branches they do not offer follow `auto`.
    """
    wanted = _wanted(backend)
    absent = [] if isinstance(backend, str) else [x for x in backend if x not in facts.branches]
    if absent:
        raise ValueError(
            f"backend names {', '.join(absent)}, and the config's branches are "
            f"{', '.join(facts.branches)}: leave the others out"
        )
    return {name: _choose(name, wanted[name], facts, backend) for name in facts.branches}


def is_decoded(facts: Facts, backend: Backend) -> bool:
    """Whether the decode kernels run all branches."""
    asked = not isinstance(backend, str) or backend != "auto"
    return not asked and facts.few and decode_unsupported_reason(facts) is None


def is_fused(choices: Mapping[BranchName, Choice], facts: Facts) -> bool:
    """Whether one operator runs all branches: the same kernels, with fewer passes over memory."""
    if facts.branches != BRANCHES or facts.selection not in SUMMING_RULES:
        return False
    if facts.num_selected_blocks > MOST_CHOSEN:
        return False
    backends = tuple(choices[name].backend for name in BRANCHES)
    if backends == fused.FUSED_RANGES:
        return fused.unsupported_reason(facts) is None
    return backends == fused.FUSED


def _wanted(backend: Backend) -> dict[BranchName, str]:
    if backend == "auto":  # asked alone: compiled code guards all that is looked at
        return dict.fromkeys(BRANCHES, "auto")
    if not isinstance(backend, Mapping):
        known = get_args(BackendName)
        if backend not in known:
            names = ", ".join(known)
            raise ValueError(
                f"backend is {backend!r}; it must be one of {names}, or a mapping from branches to"
                " them"
            )
        offered = {branch for name, branch in IMPLEMENTATIONS if name == backend}
        return {name: backend if name in offered else "auto" for name in BRANCHES}
    unknown = sorted(set(backend) - set(BRANCHES))
    if unknown:
        raise ValueError(f"backend names branches {unknown}; known are {', '.join(BRANCHES)}")
    return {name: backend.get(name, "auto") for name in BRANCHES}


def _choose(branch: BranchName, wanted: str, facts: Facts, backend: Backend) -> Choice:
    if wanted != "auto":
        return _asked_for(branch, wanted, facts)
    if facts.device_type != "cuda":
        reason = "trains everywhere" if facts.needs_grad else "FlexAttention gains nothing here"
        return Choice(branch, "dense", f"on {facts.device_type}: {reason}")
    if facts.few:
        return _choose_for_few(branch, facts, backend)
    passed_over: list[str] = []
    tuned = _tuned(branch, facts)
    for rank, name in enumerate((*tuned, *CUDA_ORDER[branch])):
        problem = unsupported_reason(name, branch, facts)
        if problem is None:
            source = "fastest here by nsa-flex tune" if rank < len(tuned) else "first in the table"
            return Choice(branch, name, "; ".join([source, *passed_over]))
        passed_over.append(f"not {name}: {problem}")
    raise AssertionError("dense computes everything")


def _choose_for_few(branch: BranchName, facts: Facts, backend: Backend) -> Choice:
    why = f"at most {FEW_QUERIES} queries against a longer past"
    if is_decoded(facts, backend):
        return Choice(branch, "triton", f"the decode kernels: {why}")
    problem = decode_unsupported_reason(facts) or ALL_BRANCHES
    return Choice(branch, "dense", f"{why}; not the decode kernels: {problem}")


def _asked_for(branch: BranchName, wanted: str, facts: Facts) -> Choice:
    if (wanted, branch) not in IMPLEMENTATIONS:
        offer = ", ".join(name for name, offered in IMPLEMENTATIONS if offered == branch)
        raise ValueError(f"backend {wanted!r} has no {branch} branch; {offer} have")
    problem = unsupported_reason(wanted, branch, facts)
    if problem is not None:
        raise ValueError(f"backend {wanted!r} cannot compute the {branch} branch: {problem}")
    return Choice(branch, wanted, "asked for")


def _tuned(branch: BranchName, facts: Facts) -> tuple[str, ...]:
    """Backends, fastest first, that `nsa-flex tune` found on this device; () if it found none."""
    if not facts.half:
        return ()
    if torch.compiler.is_compiling():
        from nsa_flex.device_constants import tuned_entries_constant

        entries = tuned_entries_constant()
    else:
        entries = tuned_entries()
    if not entries:
        return ()
    return lookup(
        entries,
        branch=branch,
        dtype="float16" if facts.dtype == torch.float16 else "bfloat16",
        train=facts.needs_grad,
        group_size=facts.group_size,
        head_dim=facts.head_dim,
        value_head_dim=facts.value_head_dim,
        num_queries=facts.num_queries,
    )
