"""The tokens that one call adds to a cache, and which of them are padding."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nsa_flex.documents import DocumentLayout, gather_real
from nsa_flex.gates import GateLogits


class IncomingBatch(NamedTuple):
    """New tokens of a batch.

    num_tokens: T, columns of the batch, padding included.
    layout: moves the real tokens of each row to its front; None where they are there.
    num_real: int32 (B,), real tokens of each row; None where all are.
    columns: (B, columns so far and T, or more), nonzero where a column is no padding; None if the
        caller does not say.
    """

    num_tokens: int
    layout: DocumentLayout | None = None
    num_real: Tensor | None = None
    columns: Tensor | None = None

    def align(self, x: Tensor) -> Tensor:
        """(B, H, T, D), real tokens first."""
        return x if self.layout is None else self.layout.align(x)

    def align_gates(self, gates: Tensor | GateLogits) -> Tensor | GateLogits:
        """The same for (B, H, T, 3) gates."""
        if self.layout is None:
            return gates
        if isinstance(gates, GateLogits):
            return gates._replace(logits=self.align(gates.logits))
        return self.align(gates)

    def restore(self, x: Tensor) -> Tensor:
        """The inverse of `align`."""
        return x if self.layout is None else self.layout.restore(x)


def incoming_batch(real: Tensor) -> IncomingBatch:
    """The batch of (B, T) tokens, nonzero where they are real."""
    real = real != 0
    layout = gather_real(real) if real.shape[1] > 1 else None
    return IncomingBatch(real.shape[1], layout, real.sum(1, dtype=torch.int32))
