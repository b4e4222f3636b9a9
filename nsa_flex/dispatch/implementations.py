"""What runs a branch on a backend."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from nsa_flex.backends import dense, fa2, flex, sdpa, triton
from nsa_flex.backends.branch import Branch
from nsa_flex.dispatch.facts import BranchName

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
