"""The error rule: what a kernel may err against the float64 oracle, and inputs for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reference import oracle

# Relative to the norm of the result. Float32 sums of some hundred terms, softmax and its backward
# included, lose a few bits: 32 units in the last place.
FLOAT32_LIMIT = 32 * torch.finfo(torch.float32).eps


def limit(eager_error: float, dtype: torch.dtype) -> float:
    """Twice what eager PyTorch errs in the same dtype; in float32 some last places."""
    if dtype in (torch.float32, torch.float64):
        return FLOAT32_LIMIT
    return 2 * eager_error + torch.finfo(dtype).eps / 8


def eager_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float
) -> Tensor:
    """Attention as one writes it in PyTorch, every step in the inputs' dtype."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    mask = mask.repeat_interleave(group, 1) if mask.shape[1] == key.shape[1] // group else mask
    scores = (query @ key.mT * scale).masked_fill(~mask, torch.finfo(query.dtype).min)
    weights = scores.softmax(-1).masked_fill(~mask, 0.0)
    return weights @ value


def to_float64(x: Tensor) -> np.ndarray[Any, np.dtype[np.float64]]:
    """A detached copy for the oracle."""
    return x.detach().to("cpu", torch.float64).numpy()


def leaf(shape: Sequence[int], dtype: torch.dtype, device: str, *, grad: bool = True) -> Tensor:
    """Normal (B, H, S, D) numbers in (B, S, H, D) memory, as models have them."""
    batch, heads, length, dim = shape
    x = torch.randn(batch, length, heads, dim, dtype=torch.float32, device=device).to(dtype)
    return x.transpose(1, 2).requires_grad_(grad)


def gradients(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], grad_out: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Output and gradients of every input; an unused one counts as zero."""
    out = function(*inputs)
    grads = torch.autograd.grad(out, inputs, grad_out.to(out.dtype), allow_unused=True)
    return out, [
        torch.zeros_like(x) if g is None else g for x, g in zip(inputs, grads, strict=True)
    ]


# Of float64 terms of size 1, the rounding of a sum that is 0.
ZERO = 1e-12


def assert_close(
    name: str,
    got: Tensor,
    want: Any,
    eager: Tensor | None,
    dtype: torch.dtype,
    *,
    least: float = 0.0,
) -> None:
    """Holds `got` to the oracle's `want` by the error rule.

    `least` is the size below which a norm is rounding. A gradient of q or k is a difference of
    terms as large as the incoming gradient, and where a query sees one key it is exactly 0.
    """
    norm = float(np.linalg.norm(want[np.isfinite(want)]))
    norm = norm if norm > ZERO * least else 0.0
    shrink = norm / least if least > norm else 1.0

    def error_of(x: Tensor) -> float:
        if not norm:  # then only the size of what is there tells
            return float(np.abs(to_float64(x)[np.isfinite(want)]).max(initial=0.0))
        return shrink * oracle.relative_error(to_float64(x), want)

    error = error_of(got)
    eager_error = 0.0 if eager is None else error_of(eager)
    allowed = limit(eager_error, dtype)
    assert error <= allowed, (
        f"{name}: error {error:.2e}, allowed {allowed:.2e}, eager {eager_error:.2e}"
    )
