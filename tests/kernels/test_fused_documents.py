"""The core on packed documents: against the float64 oracle, and against each document alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nsa_flex import NSAConfig, nsa_attention
from nsa_flex.documents import align_packed
from reference import oracle
from reference.accuracy import assert_close, leaf, to_float64
from reference.interpreter import INTERPRETED, kernels, only_outside, run_in_the_interpreter

pytest.importorskip("triton")
from nsa_flex.fallback_kernels.common.arch import gluon_unsupported_reason
from nsa_flex.fallback_kernels.fused import fwd_epilogue as epilogue
from nsa_flex.fallback_kernels.fused import interface as core
from nsa_flex.fallback_kernels.fused.interface import CoreResults, core_attention
from nsa_flex.fallback_kernels.selected import config as selected_plan

PAPER = NSAConfig()
NARROW = NSAConfig(8, 4, 16, 4, window_size=20)  # a window that does not hold the local blocks
WIDE = NSAConfig(8, 4, 16, 5, window_size=37)  # and one that does
LARGE = NSAConfig(8, 8, 32, 4, window_size=70)  # blocks as large as the key tiles of float32
INPUTS = ("query", "key", "value", "compressed_key", "compressed_value", "gates")
# The branches one by one, on other kernels.
APART = {"compressed": "triton", "selected": "triton", "sliding": "flex"}

in_the_interpreter = pytest.mark.skipif(not INTERPRETED, reason="CUDA has tests of its own below")


@only_outside
def test_kernels_under_the_interpreter(request: pytest.FixtureRequest) -> None:
    """Every test below that does not need a GPU, on the CPU."""
    run_in_the_interpreter(__file__, request.config)


@dataclass(frozen=True)
class Case:
    """Sizes of one call. ends: where the documents of each batch row end, in blocks, but the last.

    The last block of the row is cut off in the middle.
    """

    ends: tuple[tuple[int, ...], ...]
    config: NSAConfig
    blocks: int = 5
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 16
    value_dim: int = 16
    own: bool = False
    deterministic: bool = False

    @property
    def tokens(self) -> int:
        return self.blocks * self.config.select_block_size - 3

    def starts(self) -> np.ndarray:
        """int32 (B, S): first key of each token's document."""
        token = np.arange(self.tokens)
        edges = (np.array(row, dtype=int) * self.config.select_block_size for row in self.ends)
        starts = (np.r_[0, x][np.searchsorted(x, token, side="right")] for x in edges)
        return np.stack(list(starts)).astype(np.int32)

    def inputs(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """The six tensors of the core, and two more if the window has keys of its own."""
        blocks = max(1, self.config.num_compressed_blocks(self.tokens))
        sizes = [(self.heads, self.tokens, self.head_dim)]
        sizes += [(self.kv_heads, n, self.head_dim) for n in (self.tokens, blocks)]
        sizes += [(self.kv_heads, n, self.value_dim) for n in (self.tokens, blocks)]
        q, k, ck, v, cv = (leaf((len(self.ends), *size), dtype, "cpu") for size in sizes)
        gates = torch.randn(len(self.ends), self.heads, self.tokens, 3)  # any real number is one
        gates[:, 0, ::3] = 0
        tensors = [q, k, v, ck, cv, gates.to(dtype).requires_grad_(True)]
        own = [leaf(x.shape, dtype, "cpu") for x in (k, v)] if self.own else []
        return [*tensors, *own]


def attend(case: Case, inputs: list[Tensor]) -> CoreResults:
    q, k, v, ck, cv, gates, *own = inputs
    start = torch.from_numpy(case.starts()).to(q.device)
    options: dict[str, Any] = {"config": case.config, "scale": 0.3, "document_start": start}
    return core_attention(q, k, v, ck, cv, *(own or (k, v)), gates, **options)


CASES = {
    "one document": Case(((),), NARROW, blocks=2),
    "short ones, an empty one": Case(((1, 1, 2), (0, 3)), NARROW, blocks=4, kv_heads=2),
    "local blocks in the window": Case(((2, 4),), WIDE, heads=4),
    "groups of three": Case(((1, 2),), WIDE, blocks=4, heads=3, value_dim=32),
    "a head a group": Case(((1, 2),), WIDE, blocks=4, heads=1, deterministic=True),
    "keys of its own for the window": Case(((2, 3),), WIDE, blocks=4, own=True, value_dim=32),
    "large blocks": Case(((1, 2),), LARGE, blocks=4, heads=1),
}


@kernels
@in_the_interpreter
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients(name: str) -> None:
    case = CASES[name]
    inputs = case.inputs()
    torch.use_deterministic_algorithms(case.deterministic)
    try:
        results = attend(case, inputs)
        grad = torch.randn_like(results.out)
        grads = torch.autograd.grad(results.out, inputs, grad)
    finally:
        torch.use_deterministic_algorithms(False)
    hold(case, inputs, results, grad, grads)


def hold(
    case: Case, inputs: list[Tensor], results: CoreResults, grad: Tensor, grads: Any
) -> None:
    """Choice, values, log-sum-exps and gradients, in float32."""
    arrays, config = [to_float64(x) for x in inputs], case.config
    names = ("sliding_key", "sliding_value") if case.own else ()
    more: dict[str, Any] = {"scale": 0.3, "document_start": case.starts()}
    more |= dict(zip(names, arrays[6:], strict=True))
    blocks = results.blocks.numpy()
    scores = oracle.forward(*arrays[:6], config, **more).scores
    excess = oracle.choice_excess(blocks, scores, config, document_start=case.starts())
    assert excess <= 1e-5
    more["blocks"] = blocks
    want = oracle.forward(*arrays[:6], config, **more)
    assert_close("output", results.out, want.out, None, torch.float32)
    for name in ("compressed", "selected", "sliding"):
        assert_close(name, getattr(results, f"{name}_lse"), want.lse[name], None, torch.float32)
    wanted = oracle.backward(*arrays[:6], config, to_float64(grad), **more)
    least = 0.1 * float(grad.norm())
    for name, got in zip((*INPUTS, *names), grads, strict=True):
        assert_close(name, got, getattr(wanted, name), None, torch.float32, least=least)


@kernels
@pytest.mark.usefixtures("forget_plans")
@in_the_interpreter
@pytest.mark.parametrize("union_limit", [0, 9])
def test_one_kernel_ends_the_forward_without_gradients(
    union_limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epilogue, "BLOCK_SIZES", (16,))
    monkeypatch.setattr(selected_plan, "UNION_LIMIT", union_limit)
    monkeypatch.setattr(selected_plan, "PARTIAL_BYTES", 1)
    monkeypatch.setattr(selected_plan, "MIN_CHUNK_TOKENS", 32)
    case = Case(((1, 2),), WIDE)
    inputs = [x.detach() for x in case.inputs()]
    ends, run = 0, epilogue.fwd_epilogue

    def spy(*arguments: Any, **options: Any) -> Any:
        nonlocal ends
        ends += 1
        return run(*arguments, **options)

    monkeypatch.setattr(epilogue, "fwd_epilogue", spy)
    results = attend(case, inputs)
    assert ends == 1
    more = {"scale": 0.3, "blocks": results.blocks.numpy(), "document_start": case.starts()}
    want = oracle.forward(*(to_float64(x) for x in inputs), WIDE, **more)
    assert_close("output", results.out, want.out, None, torch.float32)
    for name in ("compressed", "selected", "sliding"):
        assert_close(name, getattr(results, f"{name}_lse"), want.lse[name], None, torch.float32)


@kernels
@in_the_interpreter
@pytest.mark.parametrize("config", [NARROW, WIDE, LARGE])
def test_another_document_and_gaps_may_be_large(config: NSAConfig) -> None:
    """Keys and values beyond a document's last real token change no bit of it."""
    case = Case(((1, 2),), config, blocks=3)
    real = torch.from_numpy(case.starts() == config.select_block_size)[0]  # the second document
    real &= torch.arange(case.tokens) % config.select_block_size < config.select_block_size - 3
    upstream = torch.randn(1, case.heads, case.tokens, case.value_dim) * real[:, None]
    plain = case.inputs(torch.float16)

    def run(inputs: list[Tensor]) -> list[Tensor]:
        results = attend(case, inputs)
        grads = torch.autograd.grad(results.out, inputs, upstream.half())
        grads_of_real = [x[:, :, real] for x in (*grads[:3], grads[5])]
        return [results.out[:, :, real], results.blocks[:, :, real], *grads_of_real, *grads[3:5]]

    large = [x.detach().clone() for x in plain]
    begin = torch.arange(large[3].shape[2]) * config.compress_stride
    whole = real[begin] & real[begin + config.compress_block_size - 1]
    for x, kept in zip(large[1:5], (real, real, whole, whole), strict=True):
        x[:, :, ~kept] = torch.finfo(torch.float16).max
    found = run([x.requires_grad_() for x in large])
    for got, want in zip(found, run(plain), strict=True):
        assert torch.equal(got, want)


@kernels
@in_the_interpreter
@settings(max_examples=2, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=3).filter(any),
    seed=st.integers(0, 2**32 - 1),
)
@example(lengths=[0, 1, 7, 0, 17, 0], seed=0)
def test_packed_is_alone(lengths: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    total, config = sum(lengths), WIDE
    q, k, v, gates = (
        leaf((1, heads, total, dim), torch.float32, "cpu", grad=False)
        for heads, dim in ((2, 16), (1, 16), (1, 16), (2, 3))
    )
    edges = torch.tensor([0, *np.cumsum(lengths)])
    layout = align_packed(edges, total, config)
    assert layout.start is not None
    aligned = [layout.align(x) for x in (q, k, v, gates)]
    ck, cv = (
        torch.nn.functional.pad(x, (0, 0, 0, max(0, 8 - x.shape[2]))).unfold(2, 8, 4).mean(-1)
        for x in aligned[1:3]
    )
    keys = aligned[1:3]
    results = core_attention(
        *aligned[:3], ck, cv, *keys, aligned[3],
        config=config, scale=0.25, document_start=layout.start,
    )  # fmt: skip
    out = layout.restore(results.out)
    arrays = [to_float64(x) for x in (q, k, v, gates)]
    want = oracle.forward_documents(*arrays, config, lengths, scale=0.25)
    assert_close("output", out, want, None, torch.float32)
