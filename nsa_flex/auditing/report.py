"""What an audit found and measured; prints as a table, converts to JSON and HTML."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from nsa_flex.auditing.html import page
from nsa_flex.auditing.phases import AuditFinding, BranchRun, Graph, Phase, Recompile
from nsa_flex.auditing.text import table

__all__ = ["AuditFinding", "AuditReport", "BranchRun", "Graph", "Phase", "Recompile"]


@dataclass(frozen=True)
class AuditReport:
    """The result of `audit`.

    Args:
        target: what was audited.
        findings: what is wrong, and new if a baseline was given.
        known: findings that the baseline lists.
        allowed: findings on lines that carry an allow comment.
        notes: what a reader should know but need not mend.
        phases: the sweeps.
        branches: of `nsa_attention`, where it was called.
        environment: versions and devices.
    """

    target: str
    findings: tuple[AuditFinding, ...] = ()
    known: tuple[AuditFinding, ...] = ()
    allowed: tuple[AuditFinding, ...] = ()
    notes: tuple[str, ...] = ()
    phases: tuple[Phase, ...] = ()
    branches: tuple[BranchRun, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """True when nothing (new) was found."""
        return not self.findings

    @property
    def verdict(self) -> str:
        """`clean`, or the number of findings."""
        count = len(self.findings)
        return "clean" if self.ok else f"{count} finding{'s' if count > 1 else ''}"

    @property
    def graphs(self) -> dict[str, int]:
        """Number of graphs of each phase."""
        return {phase.name: len(phase.graphs) for phase in self.phases}

    def against(self, baseline: frozenset[str]) -> AuditReport:
        """The same report with the findings whose fingerprints are in `baseline` set aside."""
        new = tuple(f for f in self.findings if f.fingerprint not in baseline)
        known = tuple(f for f in self.findings if f.fingerprint in baseline)
        return dataclasses.replace(self, findings=new, known=(*self.known, *known))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; findings carry their fingerprints."""
        plain = dataclasses.asdict(self)
        for name in ("findings", "known", "allowed"):
            for entry, finding in zip(plain[name], getattr(self, name), strict=True):
                entry["fingerprint"] = finding.fingerprint
        return {"ok": self.ok, "graphs": self.graphs, **plain}

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=2, default=str)

    def to_html(self) -> str:
        """One page that needs no other file: graphs, breaks and recompilations drawn.

        Raises:
            ModuleNotFoundError: jinja2 is missing; the message names the extra that brings it.
        """
        return page(self)

    def __str__(self) -> str:
        return table(self)
