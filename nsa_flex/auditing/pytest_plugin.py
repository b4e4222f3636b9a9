"""A fixture for pytest, there wherever nsa_flex is installed.

def test_my_model(assert_compiles_clean):
    assert_compiles_clean(model, [(torch.ones(2, 64),), (torch.ones(2, 100),)])
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from nsa_flex.auditing.report import AuditReport


@pytest.fixture
def assert_compiles_clean() -> Callable[..., AuditReport]:
    """`assert_compiles_clean(fn, inputs, **options)`: fails with the report if it has findings.

    Options are those of `nsa_flex.audit`; nothing is measured unless `measured=True` is passed.
    Returns the report.
    """

    def check(model_or_fn: Callable, inputs: Any, **options: Any) -> AuditReport:
        from nsa_flex.auditing import audit

        report = audit(model_or_fn, inputs, **{"measured": False, **options})
        if not report.ok:
            pytest.fail(str(report), pytrace=False)
        return report

    return check
