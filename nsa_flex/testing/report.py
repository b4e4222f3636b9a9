"""What `check_model` found: a status for every check, and the words for each that is not ok."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

Status: TypeAlias = Literal["ok", "refused", "inherited", "wrong", "crashed"]
Verdict: TypeAlias = Literal["right", "refused", "wrong", "crashed"]

FAILURES: tuple[Literal["crashed"], Literal["wrong"]] = ("crashed", "wrong")


@dataclass(frozen=True)
class Check:
    """One property of the patched model.

    Args:
        name: of the check, as in `CHECKS`.
        status: "ok"; "refused", a ValueError of nsa_flex; "inherited", the unpatched model fails
            in the same way; "wrong", other numbers than expected; "crashed", another exception.
        detail: the error's size, the refusal or the exception; "" where it is ok.
    """

    name: str
    status: Status
    detail: str = ""


@dataclass(frozen=True)
class ConformanceReport:
    """What `check_model` found.

    Args:
        model: name of the model.
        layers: names of the patched attention modules; none where `patch` refused.
        checks: in the order they ran; "patch" alone where it refused.
    """

    model: str
    layers: tuple[str, ...]
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether no check is wrong or crashed. A refusal is no failure."""
        return not any(check.status in FAILURES for check in self.checks)

    @property
    def verdict(self) -> Verdict:
        """The worst that was found: "crashed", "wrong"; "refused" if it cannot run; or "right"."""
        for failure in FAILURES:
            if any(check.status == failure for check in self.checks):
                return failure
        runs = {check.name: check.status for check in self.checks}
        is_refused = "refused" in (runs["patch"], runs.get("causality"))
        return "refused" if is_refused else "right"

    def __getitem__(self, name: str) -> Check:
        """The check of that name; KeyError if it did not run."""
        for check in self.checks:
            if check.name == name:
                return check
        raise KeyError(name)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "model": self.model,
            "ok": self.ok,
            "verdict": self.verdict,
            "layers": list(self.layers),
            "checks": [asdict(check) for check in self.checks],
        }

    def __str__(self) -> str:
        lines = [f"{self.model}: {self.verdict}, {len(self.layers)} layers patched"]
        for check in self.checks:
            detail = f"  {check.detail}" if check.detail else ""
            lines.append(f"  {check.status:<9} {check.name}{detail}")
        return "\n".join(lines)
