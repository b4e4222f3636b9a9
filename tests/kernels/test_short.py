"""Documents that select every block, against the float64 oracle: values and all gradients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nsa_flex import NSAConfig
from reference import oracle
from reference.accuracy import assert_close, leaf, to_float64
from reference.interpreter import (
    DEVICE,
    INTERPRETED,
    LOW_PRECISION,
    kernels,
    only_outside,
    run_in_the_interpreter,
)

pytest.importorskip("triton")
from nsa_flex.fallback_kernels.ranges import config as ranges_config
from nsa_flex.fallback_kernels.short.core import run_backward, selects_every_block
from nsa_flex.fallback_kernels.short.fwd import short_forward

PAPER = NSAConfig()
SMALL = NSAConfig(8, 4, 16, 5, window_size=37)  # all blocks up to 80 tokens
LENGTHS = (1, 7, 8, 9, 37, 38, 79, 80)
INPUTS = ("query", "key", "value", "compressed_key", "compressed_value", "gates")
OWN = ("sliding_key", "sliding_value")


@only_outside
def test_kernels_under_the_interpreter(request: pytest.FixtureRequest) -> None:
    """Every test below that does not need a GPU, on the CPU."""
    run_in_the_interpreter(__file__, request.config)


@dataclass(frozen=True)
class Case:
    """Sizes of one call, and the documents of each row: their lengths, in tokens."""

    documents: tuple[int, ...]
    group: int = 2
    kv_heads: int = 1
    head_dim: int = 16
    value_dim: int = 16
    batch: int = 1
    dtype: torch.dtype = torch.float32
    config: NSAConfig = SMALL
    own: bool = False

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def starts(self) -> list[int]:
        """Where documents start, multiples of l'; the last number is where the row ends."""
        size = self.config.select_block_size
        starts = [0]
        for length in self.documents[:-1]:
            starts.append(starts[-1] + -(-length // size) * size)
        return [*starts, starts[-1] + self.documents[-1]]

    @property
    def num_tokens(self) -> int:
        return self.starts[-1]

    def document_start(self) -> Tensor | None:
        """int32 (B, S); None for one document."""
        if len(self.documents) == 1:
            return None
        starts = self.starts
        token = np.arange(self.num_tokens)
        start = np.asarray(starts)[np.searchsorted(starts[:-1], token, side="right") - 1]
        return torch.from_numpy(start.astype(np.int32)).repeat(self.batch, 1).to(DEVICE)

    def real(self) -> Tensor:
        """bool (S,): tokens of documents, which are not gaps between them."""
        found = torch.zeros(self.num_tokens, dtype=torch.bool)
        for start, length in zip(self.starts, self.documents, strict=False):
            found[start : start + length] = True
        return found.to(DEVICE)


def inputs_of(case: Case) -> dict[str, Tensor]:
    heads, tokens = case.kv_heads * case.group, case.num_tokens
    blocks = max(1, case.config.num_compressed_blocks(tokens))
    keys = (case.batch, case.kv_heads, tokens)
    shapes = {
        "query": (case.batch, heads, tokens, case.head_dim),
        "key": (*keys, case.head_dim),
        "value": (*keys, case.value_dim),
        "compressed_key": (*keys[:2], blocks, case.head_dim),
        "compressed_value": (*keys[:2], blocks, case.value_dim),
        "gates": (case.batch, heads, tokens, 3),  # any real number is a gate
    }
    if case.own:
        shapes |= {"sliding_key": shapes["key"], "sliding_value": shapes["value"]}
    return {
        name: leaf(shape, case.dtype, DEVICE, grad=False) for name, shape in shapes.items()
    }


def run(
    case: Case, inputs: dict[str, Tensor], grad: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Results and gradients by name, all (B, H, S, ...)."""
    tensors = tuple(inputs[name] for name in INPUTS)
    own = (inputs["sliding_key"], inputs["sliding_value"]) if case.own else None
    start = case.document_start()
    reach = max(case.documents)
    assert selects_every_block(reach, case.config)
    options = (case.config, case.scale, reach)
    results = short_forward(tensors, own, start, *options, save=True)
    grads = run_backward(grad, tensors, own, results, start, *options)
    found = {"output": results.out.transpose(1, 2), "compressed": results.compressed_lse}
    found |= {
        name: getattr(results, f"{name}_lse").transpose(1, 2) for name in ("selected", "sliding")
    }
    by_head = {"compressed_key", "compressed_value"}
    names = [*INPUTS, *(OWN if case.own else ())]
    gradients = {
        name: x if name in by_head else x.transpose(1, 2)
        for name, x in zip(names, grads, strict=True)
    }
    return found, gradients


def check(case: Case) -> None:
    """Values, log-sum-exps and every gradient by the error rule."""
    inputs = inputs_of(case)
    shape = (*inputs["query"].shape[:3], case.value_dim)
    grad = leaf(shape, case.dtype, DEVICE, grad=False) * case.real()[:, None]
    found, grads = run(case, inputs, grad)
    start = case.document_start()
    arrays = [to_float64(inputs[name]) for name in INPUTS]
    more = {name: to_float64(inputs[name]) for name in OWN if case.own}
    more |= {"scale": case.scale, "document_start": None if start is None else start.cpu().numpy()}
    want = oracle.forward(*arrays, case.config, **more)
    real = case.real().cpu().numpy()
    # In half precision the weights are rounded once, and so is each branch.
    rounding = 0.0 if case.dtype == torch.float32 else float(torch.finfo(case.dtype).eps)

    def close(name: str, got: Tensor, exact: np.ndarray, least: float = 0.0) -> None:
        if case.dtype == torch.float32:
            assert_close(name, got, exact, None, case.dtype, least=least)
            return
        error = np.linalg.norm(to_float64(got) - exact)
        assert error <= 2 * rounding * max(np.linalg.norm(exact), least), name

    close("output", found["output"][:, :, case.real()], want.out[:, :, real])
    for name in oracle.BRANCHES:
        got = found[name][:, :, case.real()]
        np.testing.assert_allclose(
            to_float64(got), want.lse[name][:, :, real], rtol=1e-5, atol=1e-5, err_msg=name
        )
    wanted = oracle.backward(*arrays, case.config, to_float64(grad), **more)
    least = 0.1 * float(grad.norm())
    for name, got in grads.items():
        assert got.shape == inputs[name].shape
        close(name, got, getattr(wanted, name), least)


@kernels
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("own", [False, True], ids=["", "own keys"])
def test_lengths(length: int, own: bool) -> None:
    check(Case((length,), batch=1 + (length == 38), own=own, kv_heads=1 + (length == 37)))


@kernels
@pytest.mark.parametrize(
    "documents", [(80, 80), (1, 80, 1, 17), (33, 5, 64), (16, 16, 16, 16), (1, 1)]
)
@pytest.mark.parametrize("own", [False, True], ids=["", "own keys"])
def test_documents(documents: tuple[int, ...], own: bool) -> None:
    check(Case(documents, own=own))


@kernels
@pytest.mark.parametrize("group", [1, 3, 8])
def test_groups(group: int) -> None:
    check(Case((20, 25), group=group))


@kernels
@pytest.mark.parametrize("dtype", [*LOW_PRECISION, torch.float32])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(16, 16), (80, 80), (96, 40), (64, 128)])
def test_head_dims_and_dtypes(head_dim: int, value_dim: int, dtype: torch.dtype) -> None:
    check(Case((40, 30), head_dim=head_dim, value_dim=value_dim, dtype=dtype))


@kernels
@pytest.mark.parametrize("window", [1, 16, 64, 1000])
@pytest.mark.parametrize("blocks", [(2, 1, 1), (4, 0, 1), (5, 2, 3)])
def test_windows_and_initial_and_local_blocks(window: int, blocks: tuple[int, int, int]) -> None:
    """The blocks are all there are, whatever is forced."""
    config = NSAConfig(8, 4, 16, *blocks, window_size=window)
    check(Case((16 * blocks[0],), group=1, config=config))


@kernels
def test_equal_inputs_give_equal_bits() -> None:
    case = Case((60,), group=4)
    inputs = inputs_of(case)
    grad = leaf((1, 4, 60, 16), case.dtype, DEVICE, grad=False)
    tensors = tuple(inputs[name] for name in INPUTS)
    options = (None, case.config, case.scale, 60)
    alone = short_forward(tensors, None, *options, save=False)
    results = short_forward(tensors, None, *options, save=True)
    assert torch.equal(alone.out, results.out)
    grads, again = (run_backward(grad, tensors, None, results, *options) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))


@kernels
@pytest.mark.parametrize("splits", [False, True], ids=["together", "apart"])
def test_query_heads_of_a_group_together_and_apart(
    splits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges_config, "MIN_CTAS", 2**20 if splits else 1)
    ranges_config._plan.cache_clear()
    check(Case((60, 20), group=4))
    ranges_config._plan.cache_clear()


@kernels
@pytest.mark.parametrize("own", [False, True], ids=["", "own keys"])
def test_packed_is_alone(own: bool) -> None:
    case = Case((50, 17, 80), own=own)
    inputs = inputs_of(case)
    grad = leaf((1, 2, case.num_tokens, 16), case.dtype, DEVICE, grad=False)
    grad = grad * case.real()[:, None]
    found, grads = run(case, inputs, grad)
    stride = case.config.compress_stride
    for start, length in zip(case.starts, case.documents, strict=False):
        span = slice(start, start + length)
        blocks = case.config.num_compressed_blocks(length)
        of_blocks = slice(start // stride, start // stride + max(1, blocks))
        spans = {name: of_blocks if "compressed" in name else span for name in inputs}
        part = {name: x[:, :, spans[name]] for name, x in inputs.items()}
        alone, alone_grads = run(Case((length,), own=own), part, grad[:, :, span])
        for name, x in alone.items():
            torch.testing.assert_close(found[name][:, :, span], x, rtol=1e-5, atol=1e-5)
        for name, x in alone_grads.items():
            got = grads[name][:, :, spans[name]]
            if "compressed" in name and not blocks:
                got = got[:, :, :0]
                x = x[:, :, :0]
            torch.testing.assert_close(got, x, rtol=1e-4, atol=1e-4)


@kernels
@pytest.mark.parametrize("size", ["huge", "large"])
def test_other_documents_and_gaps_may_be_large(size: str) -> None:
    """A document holds the largest numbers there are, or the gaps hold large ones."""
    case = Case((32, 25, 9), group=1)
    inputs = inputs_of(case)
    token = torch.arange(case.num_tokens, device=DEVICE)
    stuffed = token < 32 if size == "huge" else ~case.real()
    kept = ~stuffed & case.real()
    number = torch.finfo(case.dtype).max if size == "huge" else 1e4
    grad = leaf((1, 1, case.num_tokens, 16), case.dtype, DEVICE, grad=False) * kept[:, None]
    found, grads = run(case, inputs, grad)
    changed = {
        name: x.masked_fill(stuffed[:, None], number) if name in ("key", "value") else x
        for name, x in inputs.items()
    }
    changed_found, changed_grads = run(case, changed, grad)
    for name, x in found.items():
        assert torch.equal(x[:, :, kept], changed_found[name][:, :, kept]), name
    for name, x in grads.items():
        rows = slice(16 if size == "huge" else 0, None)
        rows = rows if "compressed" in name else kept
        assert torch.equal(x[:, :, rows], changed_grads[name][:, :, rows]), name


@kernels
def test_strides_are_free() -> None:
    case = Case((40,))
    inputs = inputs_of(case)
    grad = leaf((1, 2, 40, 16), case.dtype, DEVICE, grad=False)
    strange = {name: x.mT.contiguous().mT for name, x in inputs.items()}
    want, found = run(case, inputs, grad), run(case, strange, grad.mT.contiguous().mT)
    for a, b in zip(want, found, strict=True):
        assert all(torch.equal(x, b[name]) for name, x in a.items())


@kernels
@settings(max_examples=4 if INTERPRETED else 40, deadline=None)
@given(
    documents=st.lists(st.integers(1, 80), min_size=1, max_size=5),
    own=st.booleans(),
    window=st.integers(1, 90),
)
def test_any_packing(documents: list[int], own: bool, window: int) -> None:
    config = NSAConfig(8, 4, 16, 5, window_size=window)
    check(Case(tuple(documents), group=1, config=config, own=own))


@kernels
def test_the_papers_sizes() -> None:
    """Some tiles of keys are inside of the window, some outside, some on its edge."""
    check(Case((700,), group=1, config=PAPER))
