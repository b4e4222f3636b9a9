"""Each test of the audit starts with a compiler that knows no shapes."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _forget_shapes() -> None:
    torch._dynamo.reset()
