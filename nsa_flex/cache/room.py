"""The check for room inside compiled code."""

from __future__ import annotations

import torch
from torch import Tensor


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
