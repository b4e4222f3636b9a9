"""All detectors on one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nsa_flex.hot_path.findings import Report
from nsa_flex.hot_path.graphs import find_graph_breaks
from nsa_flex.hot_path.meta import find_value_reads
from nsa_flex.hot_path.syncs import find_syncs


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
