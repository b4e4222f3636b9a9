"""The columns of a batch: those that one call adds to a cache, and how many came in so far."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

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

    def to(self, device: torch.device) -> IncomingBatch:
        """The same on a device: layers of a model may be on several."""
        if self.num_real is None or self.num_real.device == device:
            return self
        layout, columns = self.layout, self.columns
        if layout is not None:
            parts = [x.to(device) if isinstance(x, Tensor) else x for x in layout]
            layout = DocumentLayout(*parts)  # type: ignore[arg-type]
        columns = None if columns is None else columns.to(device)
        return IncomingBatch(self.num_tokens, layout, self.num_real.to(device), columns)

    def align(self, x: Tensor) -> Tensor:
        """(B, H, T, D), real tokens first."""
        return x if self.layout is None else self.layout.align(x)

    def align_gates(self, gates: Tensor | GateLogits) -> Tensor | GateLogits:
        """The same for (B, H, T, C) gates."""
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


# An operator whose result is what the count becomes: an assertion by itself could be moved behind
# the write that raises the count in place (inferred of Inductor of torch 2.11 on CUDA).
@torch.library.custom_op("nsa_flex::count_within", mutates_args=())
def count_within(columns: Tensor, num_tokens: int, max_length: int) -> Tensor:
    """`columns + num_tokens`, int64 (), asserted on the device to be at most `max_length`."""
    after = columns + num_tokens
    torch._assert_async(after <= max_length, f"the cache is full: max_length={max_length}")
    return after


@count_within.register_fake
def _(columns: Tensor, num_tokens: int, max_length: int) -> Tensor:
    return torch.empty_like(columns)


class Columns:
    """The number of columns that came in, padding included.

    Compiled code of a static cache must not depend on it, and there it is a tensor. The host knows
    it too, but loses count where compiled code ran, until it asks.

    Args:
        limit: the most there may be (static), or None.

    Attributes:
        on_device: int64 (), of a static cache that is in use; else None.
        even: whether each row has so many tokens, none of them padding.
    """

    _real: Tensor | None  # (B, columns or more), nonzero where the column of a row is no padding
    _told: int  # of how many columns that says it; later ones are no padding

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.on_device: Tensor | None = None
        self.even = True
        self._real, self._told = None, 0
        self._on_host: int | None = 0
        self._after: Tensor | None = None  # what `on_device` becomes, where compiled code asked

    @property
    def known(self) -> int | None:
        """The number as the host knows it; None inside compiled code and after it."""
        return self._on_host if self.limit is None or not self._hidden() else None

    def number(self) -> int:
        """Columns so far. Waits for the device after compiled steps, once."""
        if self._on_host is None:
            assert self.on_device is not None
            self._on_host = int(self.on_device)
        return self._on_host

    def agree(self, other: Columns) -> None:
        """Take the number from the columns of another layer, where the host knows that one's."""
        if self.limit is not None and other.known is not None:  # one that grows never loses it
            self._on_host = other.known

    def number_or_tensor(self) -> int | Tensor:
        """Columns so far without waiting: a tensor in a static cache."""
        return self.number() if self.on_device is None else self.on_device

    def use(self, device: torch.device) -> None:
        """Start to count on the device, where static."""
        if self.limit is not None:
            self.on_device = torch.zeros((), dtype=torch.int64, device=device)

    def check_room(self, num_tokens: int) -> None:
        """ValueError if there is no room for so many more.

        In compiled code an assertion on the device, which the host does not wait for.
        """
        if self.limit is None:
            return
        if self._hidden():
            if self.on_device is not None:
                self._after = count_within(self.on_device, num_tokens, self.limit)
            return
        self._after = None
        number = self.number()
        if number + num_tokens > self.limit:
            raise ValueError(
                f"the cache holds {number} of at most max_length={self.limit} tokens: no "
                f"room for {num_tokens} more; make a longer one, or one without max_length"
            )

    def tell(self, real: Tensor, told: int) -> None:
        """Which of the first `told` columns are no padding: (B, told or more), which stays so."""
        self._real, self._told = real, told

    def tell_last(self, real: Tensor) -> None:
        """Which of the last columns are no padding: (B, so many)."""
        if torch.compiler.is_compiling():
            return
        number = self.number()
        before = number - real.shape[1]
        known = real.new_zeros(real.shape[0], 0) if self._real is None else self._real != 0
        known = known[:, : min(self._told, before)].expand(real.shape[0], -1)
        later = known.new_ones(known.shape[0], before - known.shape[1])
        self.tell(torch.cat((known, later, real.to(known.dtype)), 1), number)

    def told(self) -> Tensor | None:
        """Bool (B or 1, n): which of the first n columns are no padding, as far as it was said."""
        return None if self._real is None else self._real[:, : min(self._told, self.number())] != 0

    def real(self, batch_size: int) -> Tensor | None:
        """Bool (B, columns): which of them are no padding; None if nobody said."""
        real = self.told()
        if real is None:
            return None
        later = self.number() - real.shape[1]
        return torch.nn.functional.pad(real, (0, later), value=True).expand(batch_size, -1)

    def real_among_last(self, num_tokens: int) -> int | Tensor:
        """How many of the last columns are no padding: in each row (B,), or of every one."""
        number = self.number()
        told = min(self._told, number)
        begin = number - num_tokens
        if self._real is None or begin >= told:
            return num_tokens
        return (self._real[:, begin:told] != 0).sum(1, dtype=torch.int32) + (number - told)

    def pick_rows(self, rows: Tensor) -> None:
        """Keep the rows `rows` alone, in that order."""
        if self._real is not None and self._real.shape[0] > 1:  # one row is that of all
            self._real = self._real[rows.to(self._real.device)]

    def take_back(self, num_tokens: int) -> None:
        """Count `num_tokens` columns fewer."""
        self._on_host = self.number() - num_tokens
        self._told = min(self._told, self._on_host)
        if self.on_device is not None:
            self.on_device.sub_(num_tokens)

    def reset(self) -> None:
        """Count no column any more."""
        self._on_host = 0
        self.even = True
        self._real, self._told = None, 0
        if self.on_device is not None:
            self.on_device.zero_()

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Columns:
        """The same count, which the host knows, with its tensor changed. Waits for the device."""
        twin = copy.copy(self)
        twin._on_host, twin._after = self.number(), None
        twin.on_device = None if self.on_device is None else change(self.on_device)
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Columns:
        twin = copy.copy(self)
        twin._after = None
        twin.on_device = copy.deepcopy(self.on_device, memo)
        memo[id(self)] = twin
        return twin

    def _hidden(self) -> bool:
        """Whether the count must stay out of a graph: it changes from step to step."""
        return self.limit is not None and torch.compiler.is_compiling()


def count(columns: list[Columns], num_tokens: int) -> None:
    """Count `num_tokens` columns more, in all layers of a model at once."""
    uncounted = []
    for each in columns:
        if each._after is not None and each.on_device is not None:
            each.on_device.copy_(each._after)
        elif each.on_device is not None:
            uncounted.append(each.on_device)
    if uncounted:
        torch._foreach_add_(uncounted, num_tokens)
    for each in columns:
        each._after = None
        known = each.known
        each._on_host = None if known is None else known + num_tokens
