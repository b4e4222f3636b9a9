"""Detectors for what a hot path must not do: wait for the device, break the graph, recompile.

They work on any function or module, NSA or not:

- `find_syncs` runs the code and names each host sync and data-dependent operator with its line;
- `find_value_reads` runs it on the meta device, where there is no value to read, and names the
  copies from host to device that a run on the CPU does not show;
- `find_graph_breaks` and `count_graphs` ask torch.compile;
- `check` and `assert_clean` do the first three in one call;
- `ForwardBackward(fn)` makes any of them include the backward.
"""

from nsa_flex.hot_path.backward import ForwardBackward, NoGradientError
from nsa_flex.hot_path.check import assert_clean, check
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
