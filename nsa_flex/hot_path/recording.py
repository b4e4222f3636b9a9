"""Where detectors write down what they see."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from nsa_flex.hot_path.findings import Finding, FindingKind, current_location, unique
from nsa_flex.hot_path.torch_internals import is_being_compiled


class Recording:
    """Findings in the order in which they were made; none while silenced."""

    def __init__(self) -> None:
        self._found: list[Finding] = []
        self._silenced = False

    @property
    def findings(self) -> list[Finding]:
        """What was found so far, each place once."""
        return unique(self._found)

    def record(self, kind: FindingKind, detail: str) -> None:
        """Add a finding at the innermost user frame, unless silenced or while code is compiled."""
        if not self._silenced and not is_being_compiled():
            self._found.append(Finding(kind, detail, current_location()))

    @contextlib.contextmanager
    def silenced(self) -> Iterator[None]:
        """Record nothing inside: what a recorded call does in turn is no finding of its own."""
        before, self._silenced = self._silenced, True
        try:
            yield
        finally:
            self._silenced = before
