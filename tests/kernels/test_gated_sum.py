"""The fused gated sum against float64, under Triton's interpreter here and compiled on CUDA."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from reference.accuracy import assert_close, leaf, to_float64
from reference.interpreter import DEVICE, interpreted, kernels

pytest.importorskip("triton")
from nsa_flex.fallback_kernels.fused.gated_sum import gated_sum

test_kernels_under_the_interpreter = interpreted(__file__)


def plain(a: Tensor, b: Tensor, c: Tensor, gates: Tensor) -> Tensor:
    return sum(x * gates[..., i, None] for i, x in enumerate((a, b, c)))  # type: ignore[return-value]


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("batch", "heads", "length", "dim"), [(1, 1, 1, 16), (2, 3, 21, 16), (2, 8, 33, 80)]
)
@pytest.mark.parametrize("gates_last", [True, False], ids=["heads first", "tokens first"])
def test_values_and_gradients(
    dtype: torch.dtype, batch: int, heads: int, length: int, dim: int, gates_last: bool
) -> None:
    branches = [leaf((batch, heads, length, dim), dtype, DEVICE) for _ in range(3)]
    if gates_last:
        gates = torch.rand(batch, heads, length, 3).to(DEVICE, dtype).requires_grad_(True)
    else:
        gates = torch.rand(batch, length, heads, 3).to(DEVICE).transpose(1, 2)
        gates.requires_grad_(True)
    inputs = [*branches, gates]
    exact = [x.detach().double().requires_grad_(True) for x in inputs]
    want, eager = plain(*exact), plain(*inputs).to(dtype)
    got = gated_sum(*inputs)
    grad_out = torch.randn_like(got)
    wants = torch.autograd.grad(want, exact, grad_out.double())
    eagers = torch.autograd.grad(eager, inputs, grad_out.to(eager.dtype))
    grads = torch.autograd.grad(got, inputs, grad_out)
    assert_close("output", got, to_float64(want), eager, dtype)
    for name, *three in zip("abcg", grads, wants, eagers, strict=True):
        grad, want_grad, eager_grad = three
        assert grad.dtype == (gates.dtype if name == "g" else dtype)
        assert_close(name, grad, to_float64(want_grad), eager_grad, dtype)


@kernels
def test_opcheck() -> None:
    branches = [leaf((2, 3, 5, 16), torch.float32, DEVICE) for _ in range(3)]
    gates = torch.rand(2, 3, 5, 3, device=DEVICE, requires_grad=True)
    torch.library.opcheck(torch.ops.nsa_flex.merge.default, (*branches, gates))
    grad = torch.randn(2, 5, 3, 16, device=DEVICE)
    arguments = (grad, *(x.detach() for x in (*branches, gates)))
    torch.library.opcheck(torch.ops.nsa_flex.merge_backward.default, arguments)


@pytest.mark.large
@pytest.mark.gpu
def test_offsets_past_two_to_the_31() -> None:
    """64 heads of 128 over 2^18 tokens and some; the last rows."""
    shape = (1, 64, 2**18 + 5, 128)
    branches = [leaf(shape, torch.bfloat16, "cuda", grad=False) for _ in range(3)]
    gates = torch.rand(*shape[:3], 3, device="cuda")
    tail = slice(-7, None)
    want = plain(*(x[:, :, tail].double() for x in (*branches, gates)))
    got = gated_sum(*branches, gates)[:, :, tail]
    np.testing.assert_allclose(to_float64(got), to_float64(want), rtol=2**-7, atol=2**-7)
