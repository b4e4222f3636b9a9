"""Loops over experts, which transformers falls back to: findings there say so."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

from nsa_flex.auditing.excerpts import place_of
from nsa_flex.auditing.lint import syntax_tree
from nsa_flex.auditing.phases import AuditFinding

_GROUPED = "_grouped_mm_fallback"
_MENDS = {
    "grouped": "under torch.compile transformers takes torch's grouped_mm for bfloat16 weights "
    "alone: compile in bfloat16, or call model.set_experts_implementation('batched_mm')",
    "loop": "call model.set_experts_implementation('grouped_mm'), or 'batched_mm'",
}


def marked(finding: AuditFinding) -> AuditFinding:
    """The finding; one inside a loop over experts with that in its message, and another mend."""
    fallback = _fallback_at(finding.location)
    if fallback is None:
        return finding
    message = f"{finding.message} (fallback of transformers: a loop over experts)"
    return replace(finding, message=message, mend=_MENDS[fallback])


def _fallback_at(location: str) -> str | None:
    file, line, function = place_of(location)
    if "transformers" not in Path(file).parts:
        return None
    if function.startswith(_GROUPED):
        return "grouped"
    tree = syntax_tree(file)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)] if tree else []
    inside = (c.name for c in classes if c.lineno <= line <= (c.end_lineno or line))
    return "loop" if any(name.endswith("Experts") for name in inside) else None
