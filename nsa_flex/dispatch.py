"""Which backend computes which branch: one table for `auto`, and the reasons for it.

Decided from shapes, dtypes, the device and the need of gradients; never from values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from nsa_flex.backends import dense, fa2, flex, fused, sdpa, triton
from nsa_flex.backends.branch import Branch
from nsa_flex.installed import HAS_TRITON
from nsa_flex.tuning import HOPPER_SHARED_MEMORY, lookup, shared_memory, tuned_entries

BranchName = Literal["compressed", "selected", "sliding"]
BackendName = Literal["auto", "dense", "flex", "sdpa", "fa2", "triton"]
Backend = BackendName | Mapping[BranchName, BackendName]

BRANCHES: tuple[BranchName, ...] = get_args(BranchName)

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
    ("triton", "selected"): triton.selected,
    ("triton", "sliding"): triton.sliding,
}

# What `auto` tries on CUDA, best first; `dense` is what always works.
CUDA_ORDER: dict[BranchName, tuple[str, ...]] = {
    "compressed": ("sdpa", "flex", "dense"),
    "selected": ("triton", "flex", "dense"),
    "sliding": ("triton", "flex", "dense"),
}

# Queries against a longer past: up to so many, one matrix product beats building tables.
FEW_QUERIES = 16


@dataclass(frozen=True)
class Facts:
    """All that dispatch looks at."""

    device_type: str
    dtype: torch.dtype
    head_dim: int
    value_head_dim: int
    num_query_heads: int
    num_kv_heads: int
    num_queries: int
    whole: bool  # the queries are all the tokens, from position 0
    documents: bool
    needs_grad: bool
    select_block_size: int = 64
    num_selected_blocks: int = 16

    @property
    def half(self) -> bool:
        """Whether the dtype is one that flash kernels take."""
        return self.dtype in (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Choice:
    """The backend of one branch, and why."""

    branch: BranchName
    backend: str
    reason: str

    def __str__(self) -> str:
        return f"{self.branch:<10} {self.backend:<7} {self.reason}"


def choose_backends(facts: Facts, backend: Backend = "auto") -> dict[BranchName, Choice]:
    """One choice a branch.

    Raises:
        ValueError: an explicitly named backend cannot compute its branch; the message says why.
            It never falls back. `fa2`, `sdpa` and `triton` alone name what they offer; the
            branches they do not offer follow `auto`.
    """
    wanted = _wanted(backend)
    return {name: _choose(name, wanted[name], facts, backend) for name in BRANCHES}


def is_fused(choices: Mapping[BranchName, Choice]) -> bool:
    """Whether one operator runs all branches: the same kernels, with fewer passes over memory."""
    return {name: choice.backend for name, choice in choices.items()} == fused.FUSED


def _wanted(backend: Backend) -> dict[BranchName, str]:
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
        if (wanted, branch) not in IMPLEMENTATIONS:
            offer = ", ".join(name for name, offered in IMPLEMENTATIONS if offered == branch)
            raise ValueError(f"backend {wanted!r} has no {branch} branch; {offer} have")
        obstacle = _obstacle(wanted, branch, facts)
        if obstacle:
            raise ValueError(f"backend {wanted!r} cannot compute the {branch} branch: {obstacle}")
        return Choice(branch, wanted, "asked for")
    if facts.device_type != "cuda":
        reason = "trains everywhere" if facts.needs_grad else "FlexAttention gains nothing here"
        return Choice(branch, "dense", f"on {facts.device_type}: {reason}")
    if not facts.whole and facts.num_queries <= FEW_QUERIES:
        return Choice(branch, "dense", f"at most {FEW_QUERIES} queries against a longer past")
    passed_over: list[str] = []
    tuned = _tuned(branch, facts)
    for place, name in enumerate((*tuned, *CUDA_ORDER[branch])):
        obstacle = _obstacle(name, branch, facts)
        if obstacle is None:
            source = (
                "fastest here by nsa-flex tune" if place < len(tuned) else "first in the table"
            )
            return Choice(branch, name, "; ".join([source, *passed_over]))
        passed_over.append(f"not {name}: {obstacle}")
    raise AssertionError("dense has no obstacle")


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
        group_size=facts.num_query_heads // facts.num_kv_heads,
        head_dim=facts.head_dim,
        value_head_dim=facts.value_head_dim,
        num_queries=facts.num_queries,
    )


def _obstacle(backend: str, branch: BranchName, facts: Facts) -> str | None:
    """Why `backend` cannot compute `branch`, or None."""
    return _OBSTACLES[backend](branch, facts)


def _no_obstacle(branch: BranchName, facts: Facts) -> str | None:
    return None


def _flex_obstacle(branch: BranchName, facts: Facts) -> str | None:
    if facts.device_type == "cpu":
        return "FlexAttention has no backward on CPU" if facts.needs_grad else None
    if facts.dtype == torch.float64:
        return "FlexAttention's kernels take float32, bfloat16 and float16, got torch.float64"
    if min(facts.head_dim, facts.value_head_dim) < 16:
        return f"FlexAttention needs head dims of at least 16, got {_dims(facts)}"
    return None


def _flash_obstacle(facts: Facts) -> str | None:
    """What fused kernels outside FlexAttention ask for alike."""
    if facts.device_type != "cuda":
        return f"it needs a CUDA device, got {facts.device_type}"
    if not facts.half:
        return f"it needs float16 or bfloat16, got {facts.dtype}"
    if not facts.whole:
        return "it needs the queries to be all the tokens (query_offset 0, Sq = Sk)"
    if facts.documents:
        return "it cannot bound the keys a query (document_start)"
    return None


def _sdpa_obstacle(branch: BranchName, facts: Facts) -> str | None:
    obstacle = _flash_obstacle(facts)
    if obstacle is None and max(facts.head_dim, facts.value_head_dim) > 128:
        obstacle = _wide_sdpa_obstacle(facts)
    if obstacle is None and (facts.head_dim % 8 or facts.value_head_dim % 8):
        obstacle = f"cuDNN needs head dims in multiples of 8, got {_dims(facts)}"
    return obstacle


def _wide_sdpa_obstacle(facts: Facts) -> str | None:
    """Beyond 128, cuDNN's backward was tried with 192 and 128; its devices have such memory."""
    if (facts.head_dim, facts.value_head_dim) != (192, 128):
        return f"cuDNN's backward takes head dims up to 128, or 192 and 128, got {_dims(facts)}"
    if _shared_memory() < HOPPER_SHARED_MEMORY:
        return "cuDNN's backward takes head dims of 192 and 128 from Hopper on"
    return None


def _fa2_obstacle(branch: BranchName, facts: Facts) -> str | None:
    obstacle = _flash_obstacle(facts)
    if obstacle is None and facts.head_dim != facts.value_head_dim:
        obstacle = f"FA-2 needs equal key and value head dims, got {_dims(facts)}"
    if obstacle is None and (facts.head_dim % 8 or facts.head_dim > 256):
        obstacle = f"FA-2 needs a head dim that 8 divides, up to 256, got {facts.head_dim}"
    return obstacle


def _triton_obstacle(branch: BranchName, facts: Facts) -> str | None:
    if facts.device_type != "cuda":
        return f"it needs a CUDA device, got {facts.device_type}"
    if not HAS_TRITON:
        return "triton is not installed"
    if not facts.whole:
        return "it needs the queries to be all the tokens (query_offset 0, Sq = Sk)"
    if facts.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"it needs float16, bfloat16 or float32, got {facts.dtype}"
    if max(facts.head_dim, facts.value_head_dim) > 256:
        return f"it needs head dims up to 256, got {_dims(facts)}"
    return _selection_limit(facts) if branch == "selected" else _sliding_limit(facts)


def _selection_limit(facts: Facts) -> str | None:
    """What the selection kernels were not written for."""
    group = facts.num_query_heads // facts.num_kv_heads
    if group > 64:
        return f"it needs at most 64 query heads a KV head, got {group}"
    if facts.select_block_size not in (16, 32, 64, 128):
        return f"it needs a select_block_size of 16, 32, 64 or 128, got {facts.select_block_size}"
    if facts.num_selected_blocks > 64:
        return f"it needs at most 64 selected blocks, got {facts.num_selected_blocks}"
    if facts.dtype == torch.float32 and facts.head_dim > 128 and facts.select_block_size == 128:
        return "float32 tiles of 128 keys and such head dims do not fit shared memory"
    needed, given = _selection_shared_bytes(facts, group), _shared_memory()
    if needed > given:
        return f"its tiles need {needed} bytes of shared memory, the device has {given}"
    return None


def _sliding_limit(facts: Facts) -> str | None:
    """What the sliding kernels were not written for."""
    return "it cannot bound the keys a query (document_start)" if facts.documents else None


def _selection_shared_bytes(facts: Facts, group: int) -> int:
    """Shared memory of the selection's smallest tiles: a block of keys and a token's rows.

    As `SelectedPlan.check_shared_memory` asks for, of a plan that is made from tensors.
    """
    size, rows = facts.select_block_size, max(16, _padded(group))
    columns = _padded(facts.head_dim) + _padded(facts.value_head_dim)
    return ((size + rows) * columns + rows * size) * facts.dtype.itemsize + 1024


def _padded(number: int) -> int:
    """The least power of two that is not less, at least 16."""
    power = 16
    while power < number:
        power *= 2
    return power


def _shared_memory() -> int:
    if torch.compiler.is_compiling():
        from nsa_flex.device_constants import shared_memory_constant

        return shared_memory_constant()
    return shared_memory()


_OBSTACLES: dict[str, Callable[[BranchName, Facts], str | None]] = {
    "dense": _no_obstacle,
    "flex": _flex_obstacle,
    "sdpa": _sdpa_obstacle,
    "fa2": _fa2_obstacle,
    "triton": _triton_obstacle,
}


def _dims(facts: Facts) -> str:
    return f"{facts.head_dim} and {facts.value_head_dim}"
