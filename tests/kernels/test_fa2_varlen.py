"""The call of flash-attn as the provider of `fa2`.

flash-attn is played by what its documentation says: names and order of its arguments, what it
masks and what it returns. Its kernels, which need a GPU and a build of their own, do not run here.
"""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from nsa_flex.backends.branch import Branch
from nsa_flex.config import NSAConfig
from nsa_flex.dispatch import IMPLEMENTATIONS, BranchName
from nsa_flex.fallback_kernels.sliding import fa2_varlen as varlen
from reference.modes import deterministic_algorithms


class FlashAttention(ModuleType):
    """`flash_attn` with one function, in PyTorch, of any dtype and device."""

    def __init__(self) -> None:
        super().__init__("flash_attn")
        self.deterministic: list[bool] = []

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        lengths = cu_seqlens_q.diff().tolist()
        assert lengths == cu_seqlens_k.diff().tolist() == [max_seqlen_q] * len(lengths)
        assert max_seqlen_k == max_seqlen_q
        self.deterministic.append(deterministic)
        left, right = window_size
        group = q.shape[1] // k.shape[1]
        t = torch.arange(max_seqlen_q)
        seen = (t[:, None] >= t) if causal else torch.ones(len(t), len(t), dtype=torch.bool)
        if left >= 0:
            seen &= t >= t[:, None] - left
        if right >= 0:
            seen &= t <= t[:, None] + right
        outs, lses = [], []
        for row in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
            queries, keys, values = (x.transpose(0, 1) for x in row)
            keys, values = (x.repeat_interleave(group, 0) for x in (keys, values))
            scores = queries @ keys.mT * softmax_scale
            scores = scores.masked_fill(~seen, float("-inf"))
            outs.append((scores.softmax(-1) @ values).transpose(0, 1))
            lses.append(scores.logsumexp(-1))
        out = torch.cat(outs)
        return (out, torch.cat(lses, 1), out.new_empty(0)) if return_attn_probs else out


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> FlashAttention:
    module = FlashAttention()
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(varlen, "HAS_FLASH_ATTN", True)
    return module


@pytest.mark.usefixtures("flash_attn")
@pytest.mark.parametrize("branch", ["compressed", "sliding"])
@pytest.mark.parametrize(("batch", "length", "window"), [(2, 90, 20), (3, 1, 1), (1, 33, 40)])
@pytest.mark.parametrize("need_lse", [True, False])
def test_flash_attn_gives_what_dense_does(
    branch: BranchName, batch: int, length: int, window: int, need_lse: bool
) -> None:
    config = NSAConfig(8, 4, 16, 4, window_size=window)
    count = max(1, config.num_compressed_blocks(length)) if branch == "compressed" else length
    inputs = [
        torch.randn(batch, heads, tokens, 16, dtype=torch.float64, requires_grad=True)
        for heads, tokens in ((6, length), (2, count), (2, count))
    ]
    grad_out = torch.randn_like(inputs[0])
    results = []
    for backend in ("fa2", "dense"):
        out, lse = IMPLEMENTATIONS[backend, branch](
            Branch(*inputs, config, 0.3, need_lse=need_lse)
        )
        results.append([out, *torch.autograd.grad(out, inputs, grad_out)])
        if need_lse:
            assert lse is not None
            results[-1].append(lse.float())
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


def test_flash_attn_is_deterministic_where_torch_is(flash_attn: FlashAttention) -> None:
    task = Branch(*(torch.randn(1, 2, 9, 16) for _ in range(3)), NSAConfig(), 0.25)
    for wanted in (False, True):
        with deterministic_algorithms(wanted):
            IMPLEMENTATIONS["fa2", "sliding"](task)
    assert flash_attn.deterministic == [False, True]
