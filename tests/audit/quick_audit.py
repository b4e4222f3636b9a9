"""An audit without code generation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nsa_flex import AuditReport, audit


def quick(fn: Callable, inputs: Any, **options: Any) -> AuditReport:
    """Of `fn`, not measured."""
    return audit(fn, inputs, **{"measured": False, **options})
