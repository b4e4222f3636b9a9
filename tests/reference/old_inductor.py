"""What Inductor of the oldest torch cannot do on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch.torch_version import TorchVersion

# Of reads under a condition, as φ by an MLP makes in a step over a cache.
fails_to_compile = pytest.mark.xfail(
    TorchVersion(torch.__version__) < "2.12",
    reason="Inductor of torch 2.11 writes C++ that does not compile",
)
