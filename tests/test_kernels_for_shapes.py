"""Head dims, groups, dtypes, phi, keys of its own: hand-written kernels, or a reason why not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa_flex import NSAAttention, NSAConfig, explain, nsa_attention
from nsa_flex.dispatch import BRANCHES
from nsa_flex.explaining.explanation import Explanation
from nsa_flex.explaining.rehearsal import rehearsing
from nsa_flex.installed import HAS_TRITON
from reference import oracle
from reference.accuracy import assert_close, eager_attention, leaf, to_float64
from reference.interpreter import INTERPRETED

pytestmark = pytest.mark.skipif(
    INTERPRETED or not HAS_TRITON, reason="kernels are compiled by Triton, not interpreted"
)
if HAS_TRITON:
    from nsa_flex.fallback_kernels.common import arch

GPU = torch.device("cuda:0")
DIMS = [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128)]
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32)
HALF = (torch.bfloat16, torch.float16)
TOKENS = 12288  # cuDNN takes the compressed branch of rows of more than 8192


@pytest.fixture(autouse=True)
def _hopper(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("gpu"):  # on the device that is there
        yield
        return
    with arch.imagining(GPU, arch.Device(*arch.SM90)):
        yield


def meta(heads: int, tokens: int, dim: int, dtype: torch.dtype) -> Tensor:
    """(B, H, S, D) in memory (B, S, H, D)."""
    return torch.empty(2, tokens, heads, dim, dtype=dtype, device="meta").transpose(1, 2)


def told_of(
    dims: tuple[int, int], group: int, dtype: torch.dtype, place: str, *, own: bool = False
) -> Explanation:
    """Of a training step; `own`: the sliding branch has keys and values of its own."""
    queries = TOKENS if place in ("whole", "documents") else 1024
    query = meta(2 * group, queries, dims[0], dtype)
    key, value = (meta(2, TOKENS, dim, dtype) for dim in dims)
    options: dict[str, Any] = {}
    if place == "offset a row":
        options["query_offset"] = torch.empty(2, dtype=torch.int64, device="meta")
    if "documents" in place:
        options["document_start"] = torch.empty(2, queries, dtype=torch.int32, device="meta")
    if own:
        options |= {"sliding_key": key.clone(), "sliding_value": value.clone()}
    return explain(query, key, value, device=GPU, needs_grad=True, **options)


PLACES = ("whole", "documents", "offset", "offset a row", "documents at an offset")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dims", DIMS)
def test_no_shape_leaves_the_kernels(dims: tuple[int, int], place: str) -> None:
    for group in GROUPS:
        for dtype in (*HALF, torch.float32):
            told = told_of(dims, group, dtype, place)
            chosen = [told[branch].backend for branch in BRANCHES]
            assert chosen[1:] == ["triton", "triton"], (group, dtype)
            on_cudnn = place == "whole" and dtype in HALF
            assert chosen[0] == ("sdpa" if on_cudnn else "triton"), (group, dtype)


@pytest.mark.parametrize(
    ("changes", "branch", "reason"),
    [
        ({"dims": (320, 320)}, "selected", "not triton: it needs head dims up to 256"),
        ({"dims": (160, 160)}, "compressed", "head dims up to 128, or 192 and 128"),
        ({"dims": (100, 100)}, "compressed", "head dims in multiples of 8, got 100 and 100"),
        ({"group": 96}, "selected", "at most 64 query heads a KV head, got 96"),
        ({"dtype": torch.float32}, "compressed", "not sdpa: it needs float16 or bfloat16"),
        ({"place": "offset a row"}, "compressed", "the queries to be all the tokens"),
    ],
)
def test_what_leaves_them_says_why(changes: dict[str, Any], branch: Any, reason: str) -> None:
    case = {"dims": (128, 128), "group": 4, "dtype": torch.bfloat16, "place": "whole", **changes}
    assert reason in told_of(**case)[branch].reason


STAGES = ("topk", "selected", "fused")


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("place", ["whole", "documents", "offset", "offset a row"])
@pytest.mark.parametrize("dtype", HALF)
def test_every_stage_runs_on_hopper_or_says_why_not(
    dtype: torch.dtype, place: str, own: bool
) -> None:
    """The kernels for compute capability 9 take D 128; others have Triton's, and a reason."""
    for dims, group in (((128, 128), 4), ((64, 64), 16), ((80, 80), 1), ((192, 128), 7)):
        kernels = told_of(dims, group, dtype, place, own=own).kernels
        assert kernels.forward
        assert kernels.backward
        stages = {run.stage for run in kernels.forward}
        together = place != "offset a row"
        assert "fused" in stages
        assert ("gated_sum_fwd_kernel" in kernels.names) != together
        for stage in STAGES if together else STAGES[:2]:
            on_hopper = {run.name for run in kernels.forward if run.stage == stage}
            told = [line for line in kernels.passed_over if line.startswith(f"{stage}: ")]
            assert any("_sm90" in name for name in on_hopper) or told, (dims, group, stage)
        if dims == (128, 128):
            assert any(run.name.endswith("partial_sm90_kernel") for run in kernels.forward)


@pytest.mark.parametrize("kind", ["mean", "weighted", "linear", "mlp"])
def test_the_core_takes_every_phi(kind: Any) -> None:
    config = NSAConfig(compression=kind)
    layer = NSAAttention(512, 8, 2, config=config, device="meta", dtype=torch.bfloat16)
    # So many that cuDNN runs: in shorter rows range attention does, in the core as apart.
    x = torch.empty(1, 2 * TOKENS, 512, device="meta", dtype=torch.bfloat16)
    with rehearsing(GPU) as told:
        layer(x)
    stages = {launch.stage for launch in told.launches}
    assert {"fused", "selected", "topk"} <= stages
    assert "ranges" not in stages


PARITY = [
    ((80, 80), 5, torch.float16, None),
    ((96, 96), 7, torch.bfloat16, None),
    ((192, 128), 32, torch.float16, None),
    ((64, 64), 1, torch.bfloat16, (0, 517)),
    ((128, 128), 12, torch.float16, (3, 600)),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("dims", "group", "dtype", "offset"), PARITY)
def test_odd_shapes_with_keys_of_its_own(
    dims: tuple[int, int], group: int, dtype: torch.dtype, offset: tuple[int, ...] | None
) -> None:
    """Values, choice and gradients against the oracle; the window has keys of its own."""
    config = NSAConfig(num_selected_blocks=6, window_size=200)
    queries, tokens = 700, 700 if offset is None else 1300
    heads, blocks = 2 * group, config.num_compressed_blocks(tokens)
    sizes = [(heads, queries, dims[0])]
    for count in (tokens, blocks, tokens):
        sizes += [(2, count, dims[0]), (2, count, dims[1])]
    tensors = [leaf((2, *size), dtype, "cuda") for size in sizes]
    gates = torch.rand(2, heads, queries, 3, device="cuda").to(dtype).requires_grad_()
    q, k, v, ck, cv, sk, sv = tensors
    inputs = [q, k, v, ck, cv, gates, sk, sv]
    place = {} if offset is None else {"query_offset": torch.tensor(offset, device="cuda")}
    out, aux = nsa_attention(
        *inputs[:6], sliding_key=sk, sliding_value=sv, config=config, return_aux=True, **place
    )
    arrays = [to_float64(x) for x in inputs]
    own = {"sliding_key": arrays[6], "sliding_value": arrays[7], "offset": offset or 0}
    scores = oracle.forward(*arrays[:6], config, **own).scores
    found = aux.blocks.cpu().numpy()
    assert oracle.choice_excess(found, scores, config, offset or 0) <= 1e-4
    want = oracle.forward(*arrays[:6], config, blocks=found, **own)
    plain = _eager(inputs, found, config, offset or 0)
    assert_close("output", out, want.out, plain, dtype)
    grad_out = torch.randn_like(out)
    exact = oracle.backward(*arrays[:6], config, to_float64(grad_out), blocks=found, **own)
    got, eager = (torch.autograd.grad(x, inputs, grad_out) for x in (out, plain))
    names = ("query", "key", "value", "compressed_key", "compressed_value", "gates")
    least = 0.1 * float(grad_out.float().norm())
    for name, ours, theirs in zip(
        (*names, "sliding_key", "sliding_value"), got, eager, strict=True
    ):
        wanted = getattr(exact, name)
        assert_close(f"gradient of {name}", ours, wanted, theirs, dtype, least=least)


def _eager(inputs: list[Tensor], blocks: Any, config: NSAConfig, offset: Any) -> Tensor:
    """Every step in the inputs' dtype, with the oracle's masks."""
    q, k, v, ck, cv, gates, sk, sv = inputs
    size = (q.shape[2], k.shape[2])
    masks = (
        oracle.compressed_mask(*size, ck.shape[2], config, offset),
        oracle.selected_mask(blocks, size[1], config, offset),
        oracle.sliding_mask(*size, config, offset),
    )
    pairs: tuple[Any, ...] = ((ck, cv), (k, v), (sk, sv))
    attend: Callable[..., Tensor] = eager_attention
    outs = [
        attend(q, *kv, torch.from_numpy(mask).cuda(), q.shape[-1] ** -0.5)
        for kv, mask in zip(pairs, masks, strict=True)
    ]
    return sum(out * gates[..., c, None] for c, out in enumerate(outs))  # type: ignore[return-value]
