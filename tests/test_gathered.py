"""`gathered_attention` beside `selected_attention`, and with tokens out of order."""

from __future__ import annotations

import pytest
import torch

from nsa_flex import selected_attention
from nsa_flex.backends.gathered import gathered_attention


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_as_selected_attention(dtype):
    query = torch.randn(2, 6, 3, 16, dtype=dtype)
    key, value = torch.randn(2, 2, 90, 16, dtype=dtype), torch.randn(2, 2, 90, 24, dtype=dtype)
    offset = torch.tensor([80, 33])
    positions = offset[:, None] + torch.arange(3)
    own = (positions // 16)[:, None, :, None].expand(2, 2, 3, 1)
    blocks = torch.cat([own, torch.zeros_like(own), torch.full_like(own, -1)], -1)
    found = gathered_attention(query, key, value, blocks, positions, 16, 0.3)
    exact = [x.double() for x in (query, key, value)]
    want = selected_attention(*exact, blocks, block_size=16, scale=0.3, query_offset=offset)
    assert found.dtype == dtype
    rounding = 1e-12 if dtype == torch.float64 else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), want, rtol=rounding, atol=rounding)
    order = torch.stack([torch.randperm(90) for _ in range(2)])
    slots = order.argsort(1)
    moved = [torch.stack([x[b, :, order[b]] for b in range(2)]) for x in (key, value)]
    again = gathered_attention(query, *moved, blocks, positions, 16, 0.3, slots)
    assert torch.equal(again, found)
