"""Detectors for what a hot path must not do: wait for the device, break the graph, recompile.

They work on any function or module, NSA or not:

- `find_syncs` runs the code and names each host sync and data-dependent operator with its line;
- `find_value_reads` runs it on the meta device, where there is no value to read, and names the
  copies from host to device that a run on the CPU does not show;
- `find_graph_breaks` and `count_graphs` ask torch.compile;
- `check` and `assert_clean` do the first three in one call;
- `ForwardBackward(fn)` makes any of them include the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nsa_flex.hot_path.backward import ForwardBackward, NoGradientError
from nsa_flex.hot_path.findings import Finding, FindingKind, Report
from nsa_flex.hot_path.graphs import count_graphs, find_graph_breaks
from nsa_flex.hot_path.meta import find_value_reads, to_meta
from nsa_flex.hot_path.syncs import SyncDetector, find_syncs

__all__ = [
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
]


def check(fn: Callable, *args: Any, **kwargs: Any) -> Report:
    """`find_syncs`, `find_value_reads` and `find_graph_breaks` of `fn(*args, **kwargs)`.

    Wrap `fn` in `ForwardBackward` to include its backward.

    >>> import torch
    >>> check(lambda x: x.sin(), torch.ones(3)).ok
    True
    """
    findings = find_syncs(fn, *args, **kwargs)
    findings += find_value_reads(fn, *args, **kwargs)
    findings += find_graph_breaks(fn, *args, **kwargs)
    return Report(tuple(findings))


def assert_clean(fn: Callable, *args: Any, **kwargs: Any) -> None:
    """Raise AssertionError with the report's text if `check` finds anything."""
    report = check(fn, *args, **kwargs)
    if not report.ok:
        raise AssertionError(str(report))
