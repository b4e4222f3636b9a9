"""Kernel tests run twice: compiled on CUDA, and in Triton's interpreter on the CPU.

Triton decides at import whether its kernels run in its interpreter, so on the CPU they run in a
process of their own: a test of each file starts that same file there. On CUDA the tests marked
`kernels` run the compiled kernels.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# The interpreter computes with NumPy, which has no bfloat16.
LOW_PRECISION = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]

_interpreted = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # log2(0), and what masks hide
kernels = _interpreted if INTERPRETED else pytest.mark.gpu
only_outside = pytest.mark.skipif(INTERPRETED, reason="this is the process that the test starts")


def run_in_the_interpreter(file: str, config: pytest.Config) -> None:
    """Runs the tests of `file` that need no GPU in the interpreter, with this run's seed."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, "--seed", str(config.option.seed), file],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    print(result.stdout, result.stderr)
    assert result.returncode == 0, "kernel tests failed under the interpreter; output above"
    assert " passed" in result.stdout


def _xor_sums_by_numpy() -> None:
    """Mends the interpreter's slowest reduction, which `tl.sort` is made of.

    It calls the combining function for every single element: half a second for a tile of 256.
    """
    import triton.language as tl
    from triton.runtime.interpreter import ReduceOps

    by_element = ReduceOps.generic_reduce

    def reduce(self: Any, operands: tuple[Any, ...]) -> Any:
        if self.combine_fn is not tl.standard._xor_combine:
            return by_element(self, operands)
        (x,) = operands
        found = np.bitwise_xor.reduce(x.handle.data, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(found, x.dtype)

    ReduceOps.generic_reduce = reduce


if INTERPRETED:
    _xor_sums_by_numpy()
