"""A training step's forward and backward as one callable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


class NoGradientError(ValueError):
    """A backward was asked for, and no output requires a gradient."""


@dataclass(frozen=True)
class ForwardBackward:
    """Call `fn`, then backpropagate ones from every output that requires a gradient.

    Gradients accumulate in `.grad`, as in any training step. The outputs are returned.

    Raises:
        NoGradientError: a ValueError; no output of `fn` requires a gradient.

    >>> weight = torch.ones(2, requires_grad=True)
    >>> _ = ForwardBackward(lambda w: w * 3)(weight)
    >>> weight.grad
    tensor([3., 3.])
    """

    fn: Callable

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self.fn(*args, **kwargs)
        roots = [
            t for t in tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.requires_grad
        ]
        if not roots:
            raise NoGradientError(
                "no output requires a gradient; pass inputs or parameters that require one"
            )
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        return outputs
