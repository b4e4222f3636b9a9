"""Documents that select every block, against the float64 oracle: values and all gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nsa_flex import NSAConfig, explain, nsa_attention
from reference import oracle
from reference.accuracy import FLOAT32_LIMIT, ZERO, assert_close, leaf, to_float64
from reference.interpreter import (
    DEVICE,
    INTERPRETED,
    LOW_PRECISION,
    interpreted,
    kernels,
    only_outside,
)

pytest.importorskip("triton")
import triton
import triton.language as tl

from nsa_flex.fallback_kernels.common.every_block import every_block
from nsa_flex.fallback_kernels.fused import backward, forward, operators, route
from nsa_flex.fallback_kernels.fused.operators import core_attention
from nsa_flex.fallback_kernels.launch import plans
from nsa_flex.fallback_kernels.ranges import config as ranges_config
from nsa_flex.fallback_kernels.short import config as short_config
from nsa_flex.fallback_kernels.short import core as short_core
from nsa_flex.fallback_kernels.short.core import short_backward
from nsa_flex.fallback_kernels.short.fwd import short_forward
from nsa_flex.fallback_kernels.short.masks import has_block, selected_words

PAPER = NSAConfig()
SMALL = NSAConfig(8, 4, 16, 5, window_size=37)  # all blocks up to 80 tokens
LENGTHS = (1, 7, 8, 9, 37, 38, 79, 80)
INPUTS = ("query", "key", "value", "compressed_key", "compressed_value", "gates")
OWN = ("sliding_key", "sliding_value")

# Minutes of the interpreter on one core.
test_kernels_under_the_interpreter = pytest.mark.timeout(1800)(interpreted(__file__))


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
    found = {name: leaf(shape, case.dtype, DEVICE, grad=False) for name, shape in shapes.items()}
    # Where a query sees one key, all branches are its value: gates of two signs would cancel out.
    found["gates"] = found["gates"].abs() * found["gates"][..., :1].sign()
    return found


def run(
    case: Case, inputs: dict[str, Tensor], grad: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Results and gradients by name, all (B, H, S, ...)."""
    tensors = tuple(inputs[name] for name in INPUTS)
    own = (inputs["sliding_key"], inputs["sliding_value"]) if case.own else None
    start = case.document_start()
    reach = max(case.documents)
    assert case.config.selects_every_block(case.num_tokens, start is not None, reach)
    options = (case.config, case.scale, reach)
    results = short_forward(tensors, own, start, *options, save=True)
    grads = short_backward(grad, tensors, own, results, start, *options)
    found = {"output": results.out.transpose(1, 2), "compressed": results.compressed_lse}
    found |= {
        name: getattr(results, f"{name}_lse").transpose(1, 2) for name in ("selected", "sliding")
    }
    names = [*INPUTS, *(OWN if case.own else ())]
    return found, {name: x.transpose(1, 2) for name, x in zip(names, grads, strict=True)}


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
        if (
            np.linalg.norm(exact) <= ZERO * least
        ):  # a gradient of q or k where each query sees one key
            assert np.abs(to_float64(got)).max() <= 16 * FLOAT32_LIMIT * (1 + least), name
            return
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
@pytest.mark.kept(lambda length, own: (length in (7, 9, 38, 80)) == own)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("own", [False, True], ids=["", "own keys"])
def test_lengths(length: int, own: bool) -> None:
    check(Case((length,), batch=1 + (length == 38), own=own, kv_heads=1 + (length == 37)))


@kernels
@pytest.mark.kept(lambda documents, own: (documents[0] in (80, 16)) != own)
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
    alone = [short_forward(tensors, None, *options, save=False).out for _ in range(2)]
    assert torch.equal(*alone)
    results, again = (short_forward(tensors, None, *options, save=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(results, again, strict=True))
    # Another kernel, whose products the compiler may round elsewhere.
    torch.testing.assert_close(alone[0], results.out, rtol=1e-5, atol=1e-6)
    pairs = zip(
        *(short_backward(grad, tensors, None, results, *options) for _ in range(2)), strict=True
    )
    assert all(torch.equal(a, b) for a, b in pairs)


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
@pytest.mark.kept(lambda own: own)
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


@pytest.mark.exhaustive
@kernels
def test_the_papers_sizes() -> None:
    """Some tiles of keys are inside of the window, some outside, some on its edge."""
    check(Case((700,), group=1, config=PAPER))


def core_inputs(inputs: dict[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Leaves by the order of `INPUTS` (and `OWN`), and what `core_attention` takes."""
    leaves = [x.detach().requires_grad_() for x in inputs.values()]
    query, key, value, compressed_key, compressed_value, gates, *own = leaves
    window = own or (key, value)
    return leaves, [query, key, value, compressed_key, compressed_value, *window, gates]


# Rows whose queries choose: blocks of one tile of keys or two, all in a word or in two.
CHOSEN = NSAConfig(8, 4, 32, 3, window_size=37)
MANY_CHOSEN = NSAConfig(8, 4, 32, 17, window_size=37)


def check_core(case: Case, longest: int | None = None) -> dict[str, Tensor]:
    """`core_attention` against the oracle: values, choice and every gradient; its inputs.

    longest: as the core is told.
    """
    inputs = inputs_of(case)
    leaves, tensors = core_inputs(inputs)
    start, real = case.document_start(), case.real()
    options = {"document_start": start, "max_document_length": longest}
    results = core_attention(*tensors, config=case.config, scale=case.scale, **options)
    arrays = [to_float64(inputs[name]) for name in INPUTS]
    more = {name: to_float64(inputs[name]) for name in OWN if case.own} | {"scale": case.scale}
    if start is not None:
        more["document_start"] = start.cpu().numpy()
    want = oracle.forward(*arrays, case.config, **more)
    assert results.blocks is not None
    rows = real.cpu().numpy()
    np.testing.assert_array_equal(
        results.blocks.cpu().numpy()[:, :, rows], want.blocks[:, :, rows]
    )
    assert_close("output", results.out[:, :, real], want.out[:, :, rows], None, case.dtype)
    for name in oracle.BRANCHES:
        got, lse = getattr(results, f"{name}_lse")[:, :, real], want.lse[name][:, :, rows]
        assert_close(name, got, lse, None, case.dtype)
    grad = leaf(results.out.shape, case.dtype, DEVICE, grad=False) * real[:, None]
    grads = torch.autograd.grad(results.out, leaves, grad)
    wanted = oracle.backward(*arrays, case.config, to_float64(grad), **more)
    least = 0.1 * float(grad.norm())
    for name, got in zip(inputs, grads, strict=True):
        assert_close(name, got, getattr(wanted, name), None, case.dtype, least=least)
    return inputs


@kernels
@pytest.mark.kept(lambda own: own)
@pytest.mark.parametrize("own", [False, True], ids=["", "own keys"])
def test_the_core_gives_gradients_and_all_blocks(own: bool) -> None:
    case = Case((70,), batch=2, kv_heads=2, own=own)
    _, tensors = core_inputs(check_core(case))
    assert core_attention(*tensors, config=case.config, scale=1.0, return_blocks=False)[1] is None


def only_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ways to end a forward fail, and the backward with an index."""
    monkeypatch.delattr(operators, "run_backward")
    monkeypatch.delattr(forward, "sliding_epilogue")
    monkeypatch.delattr(forward.fwd_epilogue, "fwd_epilogue")
    monkeypatch.delattr(forward.selected_forward, "forward")


@kernels
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("length", "own", "batch"), [(97, False, 2), (131, True, 1)], ids=["", "own keys"]
)
def test_rows_masked_by_a_choice(
    length: int, own: bool, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_masked(monkeypatch)
    case = Case((length,), batch=batch, kv_heads=3 - batch, group=3, own=own, config=CHOSEN)
    _, tensors = core_inputs(check_core(case))
    with torch.no_grad():  # another kernel than the one that saves: its sums may round otherwise
        alone, again = (
            core_attention(*tensors, config=case.config, scale=case.scale) for _ in range(2)
        )
    assert torch.equal(alone.out, again.out)
    assert torch.equal(alone.sliding_lse, again.sliding_lse)
    saving = core_attention(*tensors, config=case.config, scale=case.scale)
    for name in ("out", "sliding_lse"):
        want = to_float64(getattr(saving, name))
        assert_close(name, getattr(alone, name), want, None, case.dtype)


@kernels
@pytest.mark.kept(lambda group: group == 1)
@pytest.mark.parametrize(
    ("group", "dims"),
    [
        (1, (64, 64)),
        (7, (40, 24)),
        (1, (80, 72)),
        pytest.param(16, (48, 64), marks=pytest.mark.gpu),
        pytest.param(1, (128, 128), marks=pytest.mark.gpu),
        pytest.param(1, (96, 128), marks=pytest.mark.gpu),
    ],
)
def test_masked_rows_of_other_shapes(
    group: int, dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    only_masked(monkeypatch)
    case = Case((101,), kv_heads=1, group=group, config=CHOSEN)
    check_core(replace(case, head_dim=dims[0], value_dim=dims[1]))


@kernels
@pytest.mark.kept(lambda own, splits: own != splits)
@pytest.mark.parametrize("splits", [False, True], ids=["", "heads apart"])
@pytest.mark.parametrize("own", [False, True], ids=["", "own keys"])
def test_documents_masked_by_a_choice(
    own: bool, splits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told of none longer than twice a choice, a packed row is attended by document.

    Queries of some chose all blocks, whose keys' kernel does not ask what they chose.
    """
    only_masked(monkeypatch)
    monkeypatch.setattr(ranges_config, "MIN_CTAS", 2**20 if splits else 1)
    ranges_config._plan.cache_clear()
    documents = (120, 1, 33) if own else (31, 190, 5, 97)
    check_core(Case(documents, group=2, own=own, config=CHOSEN), 190)
    ranges_config._plan.cache_clear()


@kernels
@pytest.mark.exhaustive
@pytest.mark.parametrize("own", [False, True], ids=["", "own keys"])
@pytest.mark.parametrize("batch", [1, 2])
def test_documents_masked_in_two_launches(
    batch: int, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First queries of documents have one of their own, with the compressed branch."""
    only_masked(monkeypatch)
    monkeypatch.setattr(route, "MASKED_DIM", 8)
    launched = []
    launch = forward.short_forward
    monkeypatch.setattr(
        forward, "short_forward", lambda *a, **kw: launched.append(kw) or launch(*a, **kw)
    )
    case = Case((31, 190, 5, 97), batch=batch, kv_heads=2, group=1, own=own, config=CHOSEN)
    _, tensors = core_inputs(check_core(case, 190))
    first, later = launched
    assert "selection" not in first
    assert later["selection"] is not None
    assert later["results"] is first["results"]
    options = {"document_start": case.document_start(), "max_document_length": 190}
    options |= {"config": case.config, "scale": case.scale}
    saving = core_attention(*tensors, **options)
    with torch.no_grad():  # other kernels than those that save: their sums may round otherwise
        alone = core_attention(*tensors, **options)
    real = case.real()
    for name in ("out", "compressed_lse", "selected_lse", "sliding_lse"):
        got, want = (getattr(x, name)[:, :, real] for x in (alone, saving))
        assert_close(name, got, to_float64(want), None, case.dtype)


@kernels
@pytest.mark.kept(lambda documents, own, apart: len(documents) == 3 and own == apart)
@pytest.mark.parametrize(
    ("documents", "group", "own", "batch", "apart"),
    [
        ((33, 230, 130), 2, False, 1, False),
        ((193, 1, 100), 1, True, 1, False),
        ((40, 95), 3, False, 2, False),
        ((230, 190, 190, 70), 1, False, 1, False),
        ((193, 1, 100), 1, True, 1, True),
        ((230, 190, 190, 70), 1, False, 1, True),
    ],
    ids=[
        "",
        "own keys",
        "no long one",
        "short ones that no long one reads",
        "own keys, those that chose all apart",
        "those that chose all apart",
    ],
)
def test_short_documents_beside_long_ones(
    documents: tuple[int, ...],
    group: int,
    own: bool,
    batch: int,
    apart: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Results of each document's first queries, and gradients of each, come from their kernels."""
    monkeypatch.setattr(short_core, "MANY_CTAS", 1 if apart else 1 << 20)
    ran = []
    of_keys = short_core.key_gradients
    monkeypatch.setattr(
        short_core,
        "key_gradients",
        lambda *call, **options: (
            ran.append(options.get("masked", False)) or of_keys(*call, **options)
        ),
    )
    # Documents of up to 192 tokens are masked, no row of them alone.
    masks = route.masks_backward
    monkeypatch.setattr(route, "masks_backward", lambda *call: call[-1] == 192 and masks(*call))
    monkeypatch.setattr(operators, "is_one_operator", lambda *_: batch == 2)
    monkeypatch.setattr(operators, "_is_held", lambda _: False)
    monkeypatch.setattr(route, "masks_forward", lambda *_: False)
    places = (
        (forward, "short_forward", 5),
        (backward, "short_query_gradients", 7),
        (backward, "overwrite_key_gradients", 8),
    )
    for module, name, index in places:
        each = getattr(module, name)
        monkeypatch.setattr(
            module,
            name,
            lambda *call, each=each, index=index, **options: (
                ran.append(call[index]) or each(*call, **options)
            ),
        )
    check_core(Case(documents, group=group, own=own, batch=batch, config=CHOSEN))
    assert ran == [96, 192, 192, *([False] if apart else []), True, *([False] if own else [])]


@kernels
@pytest.mark.kept(lambda own: own)
@pytest.mark.parametrize("own", [False, True], ids=["", "own keys"])
def test_both_steps_pass_opcheck(own: bool) -> None:
    """The operators of a backward in two steps, where documents may be short."""
    case = Case((33, 195), own=own, config=CHOSEN)
    tensors = [x.detach() for x in inputs_of(case).values()]
    start = case.document_start()
    checks = ("test_schema", "test_faketensor")
    options = (case.scale, case.config.counts)
    of_forward = (*tensors, *(() if own else (None, None)), *options, True, True, start)
    out, *results = operators.core_forward(*of_forward)
    grad = torch.randn_like(out)
    of_gates = (grad, tensors, results, *options, start)
    torch.library.opcheck(operators.core_backward_gates, of_gates, test_utils=checks)
    _, signed, stats, *short = operators.core_backward_gates(*of_gates)
    kept = [results[i] for i in (0, 2, 4, 6, 7)]
    of_branches = (signed, stats, *short, grad, tensors, kept[0], None, *kept[1:], *options)
    torch.library.opcheck(
        operators.core_backward_branches, (*of_branches, True, start), test_utils=checks
    )


@triton.jit
def _blocks_of_words_kernel(
    blocks_ptr, first_ptr, out_ptr, SLOTS: tl.constexpr, BLOCKS: tl.constexpr
):
    rows = tl.arange(0, 16)
    first = None
    if first_ptr is not None:
        first = tl.load(first_ptr + rows, mask=rows < 11, other=0)
    low, high = selected_words(blocks_ptr, rows, rows < 11, first, SLOTS, 8)
    for number in range(BLOCKS):
        block = number
        if first_ptr is not None:
            block = first + number
        found = has_block(low, high, first, block)
        tl.store(out_ptr + rows * BLOCKS + number, found, mask=rows < 11)


@kernels
@pytest.mark.parametrize("documents", [False, True])
def test_bits_of_two_words(documents: bool) -> None:
    """Each block up to 63 of a document, and queries with fewer blocks than slots."""
    blocks = torch.stack([torch.randperm(64)[:7] for _ in range(11)]).to(torch.int32)
    blocks[0] = torch.tensor([0, 31, 32, 63, 30, 33, 1])
    blocks[1, 1:], blocks[2] = -1, -1
    found = torch.full((11, 64), 7, dtype=torch.int8, device=DEVICE)
    first = None
    given = blocks
    if documents:
        first = torch.arange(0, 33, 3, dtype=torch.int32)
        given = torch.where(blocks < 0, blocks, blocks + first[:, None])
        first = first.to(DEVICE)
    _blocks_of_words_kernel[(1,)](given.to(DEVICE), first, found, 7, 64)
    want = (blocks[..., None] == torch.arange(64)).any(1)
    assert torch.equal(found.cpu(), want.to(torch.int8))


@pytest.mark.gpu  # minutes in the interpreter
def test_more_blocks_than_bits_of_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    only_masked(monkeypatch)
    check_core(Case((32 * 33 + 1,), config=MANY_CHOSEN, group=1))


def test_which_rows_are_masked() -> None:
    """No longer than twice a choice, blocks that tiles of keys divide, few tiles and narrow."""

    def found(
        config: NSAConfig, batch: int, tokens: int, dim: int = 64, heads: tuple[int, int] = (12, 2)
    ) -> tuple[bool, bool]:
        query, key = (torch.empty(batch, h, tokens, dim, dtype=torch.bfloat16) for h in heads)
        return tuple(
            each(query, key, key, config, query.shape[2])
            for each in (route.masks_forward, route.masks_backward)
        )

    paper = NSAConfig()
    assert found(paper, 1, 2048) == (True, True)
    assert found(paper, 1, 2049) == (False, False)
    assert found(paper, 2, 2048) == (True, True)
    assert found(paper, 16, 2048) == (True, True)
    assert found(paper, 8, 2048, heads=(32, 8)) == (True, True)
    assert found(paper, 8, 2048, heads=(32, 2)) == (False, True)  # unions are faster forward
    assert found(paper, 8, 2048, heads=(48, 2)) == (True, True)  # they take 32 heads for 24
    assert found(paper, 1, 2048, heads=(16, 1)) == (True, True)
    assert found(paper, 1, 2048, heads=(24, 3)) == (True, True)
    assert found(paper, 4, 1537, heads=(16, 16)) == (True, True)
    assert found(paper, 8, 1536, heads=(32, 2)) == (True, True)
    assert found(paper, 8, 1537, heads=(32, 2)) == (False, True)
    assert found(paper, 1, 2048, 128) == (False, True)
    assert found(paper, 1, 2048, 128, heads=(4, 4)) == (True, True)  # no heads share a tile
    assert found(paper, 1, 2048, 136) == (False, False)
    assert found(paper, 1, 2048, 136, heads=(4, 4)) == (False, False)
    assert found(NSAConfig(8, 4, 8, 16), 1, 200) == (False, False)  # a tile has several blocks
    assert found(NSAConfig(8, 4, 32, 64), 1, 32 * 64 + 1) == (False, False)  # more than bits


def test_tiles_of_the_backward_fit_shared_memory() -> None:
    query, key = (torch.empty(8, h, 512, 128, dtype=torch.bfloat16) for h in (12, 2))
    plan = ranges_config.RangesPlan.of(query, key, key)
    assert short_config.plan_of(query, key, key).bwd_dkdv == short_config.BWD_DKDV
    fitting = short_config._with_tiles(plan, 2, True, 99 << 10)
    assert fitting.bwd_dkdv == plan.bwd_dkdv  # would take 112 KiB
    # Three stages of the forward and tiles of 64 keys of dQ would not fit either.
    assert (fitting.fwd, fitting.bwd_dq) == (ranges_config.FWD[1], ranges_config.BWD_DQ[1])
    narrow = ranges_config.RangesPlan.of(*(x[..., :64] for x in (query, key, key)))
    fitting = short_config._with_tiles(narrow, 2, True, 99 << 10)
    assert (fitting.bwd_dq, fitting.bwd_dkdv) == (short_config.BWD_DQ, short_config.BWD_DKDV)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("batch", "length", "heads", "dim"),
    [
        (1, 2048, (32, 8), 128),
        (1, 2048, (12, 2), 64),
        (1, 1024, (32, 8), 128),
        (2, 1536, (4, 4), 64),
    ],
)
def test_every_run_gives_the_same_bits(
    batch: int, length: int, heads: tuple[int, int], dim: int
) -> None:
    """Of kernels that copy by TMA: a copy that is not waited for shows in some runs of many."""
    query, key, value = (
        torch.randn(batch, length, h, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for h in (heads[0], heads[1], heads[1])
    )
    blocks = PAPER.num_compressed_blocks(length)
    compressed = [torch.randn_like(key[:, :, :blocks]) for _ in range(2)]
    gates = torch.rand(batch, heads[0], length, 3, device="cuda")
    inputs = [x.requires_grad_() for x in (query, key, value, *compressed, gates)]
    grad = torch.randn_like(query)

    def run() -> list[Tensor]:
        options = {"config": PAPER, "scale": dim**-0.5}
        out = core_attention(*inputs[:5], key, value, gates, **options).out
        return [out.detach(), *torch.autograd.grad(out, inputs, grad)]

    first = run()
    different = sum(not all(map(torch.equal, run(), first)) for _ in range(100))
    assert different == 0


@kernels
@pytest.mark.parametrize("longest", [64, None], ids=["told", "not told"])
def test_the_core_on_documents(longest: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told of short documents in a long row, it runs the kernels of short ones, backward too."""
    ran = []
    for name in ("run_short_forward", "run_short_backward"):
        each = getattr(operators, name)
        monkeypatch.setattr(
            operators, name, lambda *call, each=each, name=name: ran.append(name) or each(*call)
        )
    check_core(Case((33, 5, 64)), longest)
    assert ran == (["run_short_forward", "run_short_backward"] if longest else [])


@kernels
def test_launch_plans_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls three and four replay what the second recorded, with documents of other lengths."""
    monkeypatch.setattr(plans, "DEVICES", {DEVICE})
    kept = [operators.core_forward._init_fn.plans, operators.core_backward._init_fn.plans]
    before = [(each.recorded, each.replayed) for each in kept]
    for documents in ((33, 5, 64), (16, 70, 32), (48, 40, 32), (33, 5, 64)):
        case = Case(documents, group=1)
        leaves, tensors = core_inputs(inputs_of(case))
        options = {"document_start": case.document_start(), "config": case.config}
        longest = max(documents)  # rounded up, all are the same plan's
        results = core_attention(
            *tensors, **options, scale=case.scale, max_document_length=longest, return_blocks=False
        )
        grad = leaf(results.out.shape, case.dtype, DEVICE, grad=False) * case.real()[:, None]
        grads = torch.autograd.grad(results.out, leaves, grad)
        inputs = {name: x.detach() for name, x in zip(INPUTS, leaves, strict=True)}
        want, want_grads = run(case, inputs, grad)
        real = case.real()
        assert torch.equal(results.out[:, :, real], want["output"][:, :, real])
        for name, got in zip(INPUTS, grads, strict=True):
            rows = slice(None) if "compressed" in name else real
            assert torch.equal(got[:, :, rows], want_grads[name][:, :, rows])
    for each, (recorded, replayed) in zip(kept, before, strict=True):
        assert (each.recorded - recorded, each.replayed - replayed) == (1, 2)
    assert plans.plan_problems() == {}


@kernels
def test_blocks_of_documents() -> None:
    case = Case((33, 5, 64))
    start = case.document_start()
    positions = torch.arange(case.num_tokens, device=DEVICE)[None]
    blocks = every_block(positions, start, (1, 3, case.num_tokens, 5), 16)
    inputs = [to_float64(x) for x in inputs_of(case).values()]
    assert start is not None
    want = oracle.forward(*inputs, case.config, document_start=start.cpu().numpy()).blocks
    for head in range(3):
        np.testing.assert_array_equal(blocks[:, head].cpu().numpy(), want[:, 0])


@kernels
@pytest.mark.parametrize("length", [79, 80, 81])
def test_which_lengths_are_short(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to n * l' tokens: from there on a query leaves blocks out."""

    class Long(Exception):
        pass

    def long(*_: object) -> None:
        raise Long

    monkeypatch.setattr(operators, "run_forward", long)
    case = Case((length,), dtype=LOW_PRECISION[-1])
    _, tensors = core_inputs(inputs_of(case))
    if length <= 80:
        core_attention(*tensors, config=case.config, scale=case.scale)
    else:
        with pytest.raises(Long):
            core_attention(*tensors, config=case.config, scale=case.scale)


@only_outside
def test_explain_tells_the_launches() -> None:
    query = torch.empty(2, 1024, 8, 128, dtype=torch.bfloat16, device="meta").transpose(1, 2)
    key = query[:, :2]
    told = explain(query, key, device="cuda", needs_grad=True).kernels
    assert [run.name for run in told.forward] == ["short_fwd_kernel"]
    *short, last = told.backward
    assert [run.name for run in short] == ["short_bwd_dq_kernel", "short_bwd_dkdv_kernel"]
    assert all(run.launches == 1 and run.stage == "short" for run in (*told.forward, *short))
    assert (last.name, last.launches) == ("add_splits_kernel", 1)  # four sums over query heads
    told = explain(query, key, device="cuda")["selected"]
    assert told.reason == "documents of up to 1024 tokens, which select every block"
    start = torch.empty(2, 4096, dtype=torch.int32, device="meta")
    packed = query.new_empty(2, 8, 4096, 128), key.new_empty(2, 2, 4096, 128)
    stages = {"common", "short", "ranges", "topk", "selected", "fused"}
    for longest, stage in ((1024, {"common", "short"}), (1025, stages)):
        options = {"document_start": start, "max_document_length": longest}
        found = explain(*packed, device="cuda", **options).kernels
        assert {run.stage for run in found.forward} == stage
    longer = query.new_empty(1, 8, 1025, 128), key.new_empty(1, 2, 1025, 128)
    assert "short" not in {run.stage for run in explain(*longer, device="cuda").kernels.forward}


# On a device: against the kernels of long documents, which take any length.


@pytest.mark.gpu
@pytest.mark.parametrize("own", [False, True], ids=["", "own keys"])
@pytest.mark.parametrize(
    ("batch", "heads", "length", "dim", "value_dim"),
    [
        (3, (16, 4), 1024, 128, 128),
        (1, (64, 4), 1000, 128, 128),
        (2, (4, 4), 577, 64, 64),
        (2, (8, 2), 33, 96, 80),
        (1, (8, 2), 31, 128, 64),
        (2, (6, 2), 1, 128, 128),
        (1, (32, 8), 700, 192, 128),
    ],
)
def test_is_the_core_of_long_documents(
    batch: int,
    heads: tuple[int, int],
    length: int,
    dim: int,
    value_dim: int,
    own: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = {"batch": batch, "group": heads[0] // heads[1], "kv_heads": heads[1], "own": own}
    dims = {"head_dim": dim, "value_dim": value_dim, "dtype": torch.bfloat16}
    case = Case((length,), config=PAPER, **sizes, **dims)
    inputs = inputs_of(case)
    grad = leaf((batch, heads[0], length, value_dim), case.dtype, DEVICE, grad=False)

    def step() -> tuple[Tensor, list[Tensor]]:
        leaves, (q, k, v, ck, cv, sk, sv, gates) = core_inputs(inputs)
        keys = {"sliding_key": sk, "sliding_value": sv} if own else {}
        out, aux = nsa_attention(q, k, v, ck, cv, gates, config=PAPER, return_aux=True, **keys)
        torch.testing.assert_close(
            nsa_attention(q, k, v, ck, cv, gates, config=PAPER, **keys), out, rtol=0, atol=0
        )
        return aux.blocks, [out, *torch.autograd.grad(out, leaves, grad)]

    blocks, found = step()
    monkeypatch.setattr(route, "is_short", lambda *_: False)
    plans.forget_plans()
    want_blocks, want = step()
    assert torch.equal(blocks, want_blocks)
    for name, x, y in zip(("output", *inputs), found, want, strict=True):
        keys = inputs["compressed_key"].shape[2] if name == "compressed_key" else length
        # The gradient of a softmax over one key is 0: what is there is rounding.
        floor = 2**-9 * float(grad.norm()) if keys < 2 else 0.0
        assert (x.float() - y.float()).norm() <= 2**-6 * y.float().norm() + floor, name


@pytest.mark.gpu
@pytest.mark.parametrize("longest", [1024, 300])
def test_packed_is_the_core_of_long_documents(longest: int) -> None:
    """In half precision, at sizes where tiles straddle documents."""
    documents = (1024, 5, 1000, 64, 1, 333) if longest == 1024 else (300,) * 9
    case = Case(documents, group=4, kv_heads=2, head_dim=128, value_dim=128, config=PAPER)
    case = replace(case, dtype=torch.bfloat16)
    inputs, real = inputs_of(case), case.real()
    grad = leaf((1, 8, case.num_tokens, 128), case.dtype, DEVICE, grad=False) * real[:, None]
    found, blocks = [], []
    for told in (None, longest):
        leaves, (q, k, v, ck, cv, _, _, gates) = core_inputs(inputs)
        options = {"document_start": case.document_start(), "max_document_length": told}
        out, aux = nsa_attention(q, k, v, ck, cv, gates, config=PAPER, return_aux=True, **options)
        found.append([out[:, :, real], *torch.autograd.grad(out, leaves, grad)])
        blocks.append(aux.blocks[:, :, real])
    assert torch.equal(*blocks)
    for name, x, y in zip(("output", *inputs), *found, strict=True):
        assert (x.float() - y.float()).norm() <= 2**-6 * y.float().norm(), name
