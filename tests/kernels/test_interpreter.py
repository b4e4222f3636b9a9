"""What the tests change about Triton's interpreter: speed, and overflows that are errors."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import InterpreterError

from reference.interpreter import INTERPRETED, interpreted

inside = pytest.mark.skipif(not INTERPRETED, reason="of the interpreter")

test_kernels_under_the_interpreter = interpreted(__file__)


@triton.jit
def twice(x):
    return x + x


@triton.jit
def twice_kernel(x_ptr, out_ptr, UNSIGNED: tl.constexpr):
    x = tl.load(x_ptr)
    if UNSIGNED:
        x = x.to(tl.uint32, bitcast=True)
    tl.store(out_ptr, twice(x).to(tl.int32, bitcast=True))


def run(number: int, *, unsigned: bool = False) -> Tensor:
    x = torch.tensor([number], dtype=torch.int32)
    out = torch.zeros_like(x)
    twice_kernel[(1,)](x, out, UNSIGNED=unsigned)
    return out


@inside
@pytest.mark.parametrize("number", [2**30, -(2**30) - 1])
def test_sums_that_do_not_fit_are_errors(number: int) -> None:
    """Of signed integers; in a device function too."""
    with pytest.raises(InterpreterError, match="int32 add"):
        run(number)


@inside
def test_what_fits_is_none_and_unsigned_numbers_wrap() -> None:
    assert run(2**30 - 1).item() == 2**31 - 2
    assert run(-(2**30)).item() == -(2**31)
    assert run(2**30, unsigned=True).item() == -(2**31)
    assert run(-1, unsigned=True).item() == -2


@inside
def test_the_language_is_as_it_was_behind_a_kernel_even_if_it_failed() -> None:
    def language() -> tuple[object, ...]:
        return tl.arange, tl.core.reduce, getattr(tl.tensor, "__bool__", None)

    before = language()
    run(1)
    with pytest.raises(InterpreterError, match="int32 add"):
        run(2**30)
    assert language() == before
    assert run(3).item() == 6
