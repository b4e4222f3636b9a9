"""Each backend of each branch against the float64 oracle, values and gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from nsa_flex.backends import fold, sdpa, small_block_backward
from nsa_flex.backends.branch import Branch
from nsa_flex.config import NSAConfig
from nsa_flex.dispatch import IMPLEMENTATIONS, BranchName
from reference import oracle
from reference.accuracy import assert_close, eager_attention, gradients, leaf, to_float64

SMALL = NSAConfig(
    compress_block_size=8,
    compress_stride=4,
    select_block_size=16,
    num_selected_blocks=4,
    window_size=20,
)
PAPER = NSAConfig()
NARROW = NSAConfig(select_block_size=32, num_selected_blocks=8, window_size=1)
WIDE = NSAConfig(64, 32, 128, 5, window_size=4096)

# D, Dv, G, dtype, config, S: every head dim and group size, odd lengths, several configs.
SHAPES = [
    (16, 16, 16, torch.bfloat16, PAPER, 333),
    (32, 32, 1, torch.bfloat16, NARROW, 200),
    (64, 64, 4, torch.bfloat16, PAPER, 512),
    (64, 64, 12, torch.float16, WIDE, 700),
    (80, 80, 2, torch.float16, PAPER, 777),
    (96, 96, 6, torch.bfloat16, NARROW, 131),
    (128, 128, 8, torch.bfloat16, PAPER, 1100),
    (128, 128, 3, torch.float16, PAPER, 65),
    (128, 128, 32, torch.bfloat16, PAPER, 40),
    (192, 128, 4, torch.bfloat16, PAPER, 300),
    (256, 256, 2, torch.bfloat16, PAPER, 257),
    (64, 64, 2, torch.float32, PAPER, 400),
    (128, 64, 4, torch.float32, WIDE, 150),
]


def random_choice(
    batch: int, kv_heads: int, length: int, cfg: NSAConfig, past: int, starts: np.ndarray | None
) -> Tensor:
    """Random blocks in the form `choose_blocks` gives: forced ones and any others, ascending."""
    rng = np.random.default_rng(torch.randint(2**31, ()).item())
    scores = rng.uniform(size=(batch, kv_heads, length, cfg.num_select_blocks(length + past)))
    return torch.from_numpy(oracle.choose_all(scores, cfg, past, starts)).int()


def mask_of(
    branch: BranchName,
    cfg: NSAConfig,
    length: int,
    keys: int,
    num_blocks: int,
    blocks: Tensor,
    past: int,
    starts: np.ndarray | None,
) -> np.ndarray:
    if branch == "sliding":
        return oracle.sliding_mask(length, keys, cfg, past, starts)
    if branch == "compressed":
        return oracle.compressed_mask(length, keys, num_blocks, cfg, past, starts)
    return oracle.selected_mask(blocks.numpy(), keys, cfg, past, starts)


def check(
    branch: BranchName,
    backend: str,
    device: str,
    shape: tuple,
    *,
    batch: int = 2,
    kv_heads: int = 2,
    past: int = 0,
    documents: bool = False,
    backward: bool = True,
    compiled: bool = False,
    need_lse: bool = True,
) -> None:
    dim, value_dim, group, dtype, cfg, length = shape
    keys = length + past
    num_keys = max(1, cfg.num_compressed_blocks(keys)) if branch == "compressed" else keys
    q = leaf((batch, kv_heads * group, length, dim), dtype, device, grad=backward)
    k = leaf((batch, kv_heads, num_keys, dim), dtype, device, grad=backward)
    v = leaf((batch, kv_heads, num_keys, value_dim), dtype, device, grad=backward)
    starts = None
    if documents:  # two rows with documents of different lengths
        edges = np.array([[1], [2]]) * cfg.select_block_size
        starts = (np.arange(length) + past) // edges * edges
    blocks = random_choice(batch, kv_heads, length, cfg, past, starts)
    task = {
        "config": cfg,
        "scale": dim**-0.5,
        "offset": torch.full((batch,), past, device=device) if past else None,
        "known_offset": past,
        "document_start": torch.from_numpy(starts).int().to(device) if documents else None,
        "blocks": blocks.to(device) if branch == "selected" else None,
        "need_lse": need_lse,
    }
    mask = mask_of(branch, cfg, length, keys, num_keys, blocks, past, starts)

    lse: list[Tensor] = []

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        return IMPLEMENTATIONS[backend, branch](Branch(q, k, v, **task))

    call = run
    if compiled:  # all calls here share a code object, and with it Dynamo's limit of graphs
        torch._dynamo.reset()
        call = torch.compile(run, fullgraph=True)

    def value(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, got_lse = call(q, k, v)
        lse.append(got_lse)
        return out

    def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return eager_attention(q, k, v, torch.from_numpy(mask).to(device), dim**-0.5)

    arrays = [to_float64(x) for x in (q, k, v)]
    want, want_lse, _ = oracle.branch(*arrays, mask, dim**-0.5)
    if not backward:
        assert_close("output", value(q, k, v), want, eager(q, k, v), dtype)
    else:
        grad_out = leaf(want.shape, dtype, device, grad=False)
        got, grads = gradients(value, (q, k, v), grad_out)
        base, base_grads = gradients(eager, (q, k, v), grad_out)
        assert_close("output", got, want, base, dtype)
        want_grads = oracle.branch_backward(*arrays, mask, dim**-0.5, to_float64(grad_out))
        least = 0.1 * float(np.linalg.norm(to_float64(grad_out)))
        for name, *three in zip("qkv", grads, want_grads, base_grads, strict=True):
            if branch == "compressed" and not mask.any():
                assert not three[0].any(), f"gradient of {name} where nothing is seen"
            else:
                assert_close(f"gradient of {name}", *three, dtype, least=least)
    if lse[0] is not None:
        assert lse[0].dtype == torch.float32
        assert_close("log-sum-exp", lse[0], want_lse, None, torch.float32) if (
            dtype == torch.float32
        ) else np.testing.assert_allclose(to_float64(lse[0]), want_lse, atol=0.03)


BRANCHES: list[BranchName] = ["compressed", "selected", "sliding"]


def name_of(shape: tuple) -> str:
    dim, value_dim, group, dtype, _, length = shape
    return f"D{dim}-Dv{value_dim}-G{group}-{str(dtype)[6:]}-S{length}"


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("length", [1, 5, 7, 8, 9, 64, 150])
def test_dense(branch: BranchName, length: int) -> None:
    check(branch, "dense", "cpu", (16, 12, 3, torch.float32, SMALL, length))


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dense_in_low_precision(branch: BranchName, dtype: torch.dtype) -> None:
    check(branch, "dense", "cpu", (32, 32, 2, dtype, SMALL, 100))


@pytest.mark.parametrize("branch", BRANCHES)
def test_dense_with_a_past_and_with_documents(branch: BranchName) -> None:
    check(branch, "dense", "cpu", (16, 16, 2, torch.float32, SMALL, 37), past=50)
    check(branch, "dense", "cpu", (16, 16, 2, torch.float32, SMALL, 100), documents=True)


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("length", [1, 9, 150])
def test_flex_eager_on_cpu(branch: BranchName, length: int, eager_flex: None) -> None:
    check(branch, "flex", "cpu", (16, 12, 3, torch.float32, SMALL, length), backward=False)


@pytest.mark.kept(lambda branch: branch == "selected")
@pytest.mark.parametrize("branch", BRANCHES)
def test_flex_compiled_on_cpu(branch: BranchName) -> None:
    shape = (16, 12, 3, torch.float32, SMALL, 150)
    options = {"backward": False, "compiled": True, "need_lse": False}
    check(branch, "flex", "cpu", shape, **options)
    check(branch, "flex", "cpu", shape, documents=True, past=7, **options)


def test_flex_compiled_on_cpu_has_no_log_sum_exp() -> None:
    with pytest.raises(Exception, match="gives no log-sum-exp"):
        check(
            "sliding",
            "flex",
            "cpu",
            (16, 16, 2, torch.float32, SMALL, 64),
            backward=False,
            compiled=True,
        )


@pytest.mark.parametrize("branch", BRANCHES)
def test_flex_on_cpu_without_recording_gradients(branch: BranchName, eager_flex: None) -> None:
    q, k, v = (leaf((1, 2, 40, 16), torch.float32, "cpu") for _ in range(3))
    blocks = random_choice(1, 2, 40, SMALL, 0, None)
    count = SMALL.num_compressed_blocks(40) if branch == "compressed" else 40
    task = Branch(q, k[:, :, :count], v[:, :, :count], SMALL, 0.25, blocks=blocks)
    with torch.no_grad():
        got, _ = IMPLEMENTATIONS["flex", branch](task)
        want, _ = IMPLEMENTATIONS["dense", branch](task)
    torch.testing.assert_close(got, want)


@pytest.fixture
def eager_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention's debug mode: no compilation, all scores at once."""
    flex = torch.nn.attention.flex_attention
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


# Code is generated for every shape and branch, which takes seconds: the selected branch, whose
# groups are rows of a tile, has all shapes, the two that are masks over plain heads share them.
FLEX = [
    *(("selected", shape) for shape in SHAPES),
    *(("compressed", shape) for shape in SHAPES[::4]),
    *(("sliding", shape) for shape in SHAPES[1::4]),
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("branch", "shape"), FLEX, ids=lambda x: x if isinstance(x, str) else name_of(x)
)
def test_flex_on_cuda(branch: BranchName, shape: tuple) -> None:
    check(branch, "flex", "cuda", shape)


@pytest.mark.long
@pytest.mark.gpu
@pytest.mark.parametrize("branch", BRANCHES)
def test_flex_on_cuda_with_a_past_and_with_documents(branch: BranchName) -> None:
    for length in (1, 200):  # one tile of queries is a case of its own
        check(branch, "flex", "cuda", (64, 64, 4, torch.bfloat16, PAPER, length), past=300)
    check(branch, "flex", "cuda", (64, 64, 4, torch.bfloat16, PAPER, 500), documents=True)


@pytest.mark.gpu
@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_triton_on_cuda_with_a_past_and_with_documents(branch: BranchName, shape: tuple) -> None:
    check(branch, "triton", "cuda", shape, past=300)
    check(branch, "triton", "cuda", shape, documents=True)
    past = 2 * shape[4].select_block_size
    check(branch, "triton", "cuda", shape, past=past, documents=True)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_triton_compressed_on_cuda(shape: tuple) -> None:
    check("compressed", "triton", "cuda", shape)


@pytest.mark.gpu
@pytest.mark.parametrize("branch", BRANCHES)
def test_dense_on_cuda(branch: BranchName) -> None:
    check(branch, "dense", "cuda", (64, 64, 4, torch.bfloat16, PAPER, 333))
    check(branch, "dense", "cuda", (64, 64, 4, torch.bfloat16, PAPER, 1), past=300)


def flash_shapes(*, equal_dims: bool, largest: int) -> list[tuple]:
    half = [s for s in SHAPES if s[3] != torch.float32 and max(s[:2]) <= largest]
    return [s for s in half if s[0] == s[1] or not equal_dims]


@pytest.mark.gpu
@pytest.mark.parametrize("branch", ["compressed", "sliding"])
@pytest.mark.parametrize("shape", flash_shapes(equal_dims=True, largest=256), ids=name_of)
def test_fa2_on_cuda(branch: BranchName, shape: tuple) -> None:
    check(branch, "fa2", "cuda", shape)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["fa2", "triton"])
@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 299, 300, 301, 5000])
def test_window_boundaries(backend: str, window: int) -> None:
    cfg = NSAConfig(window_size=window)
    check("sliding", backend, "cuda", (64, 64, 4, torch.bfloat16, cfg, 300))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape",
    [
        *flash_shapes(equal_dims=False, largest=128),
        (192, 128, 4, torch.bfloat16, PAPER, 300),
        (192, 128, 2, torch.float16, PAPER, 33),
        (192, 128, 1, torch.bfloat16, PAPER, 1),
    ],
    ids=name_of,
)
def test_sdpa_on_cuda(shape: tuple) -> None:
    check("compressed", "sdpa", "cuda", shape)


# The kernels themselves have a file each, with these shapes and more.
TRITON = [
    *(("selected", shape) for shape in SHAPES[::3]),
    *(("sliding", shape) for shape in SHAPES[2::3]),
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("branch", "shape"), TRITON, ids=lambda x: x if isinstance(x, str) else name_of(x)
)
def test_triton_on_cuda(branch: BranchName, shape: tuple) -> None:
    check(branch, "triton", "cuda", shape)


@pytest.mark.gpu
def test_triton_on_cuda_with_documents() -> None:
    check("selected", "triton", "cuda", (64, 64, 4, torch.bfloat16, PAPER, 500), documents=True)


def test_the_way_back_from_the_fold_passes_opcheck() -> None:
    folded = torch.randn(2, 4 * 3, 5, 16, requires_grad=True)  # d = 4 residues of 3 heads
    torch.library.opcheck(fold._unfold, (folded, 21, 7, 4, 0.0))
    torch.library.opcheck(fold._unfold, (folded.detach()[..., 0], 21, 7, 4, float("-inf")))


@pytest.mark.gpu
def test_operators_around_cudnn_pass_opcheck() -> None:
    """All but the check of gradients by AOTAutograd, which wants more than two bits of a half."""
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    q, k, v = (leaf((2, 4, 33, 64), torch.bfloat16, "cuda").transpose(1, 2) for _ in range(3))
    torch.library.opcheck(sdpa.cudnn_causal, (q, k, v, 0.1), test_utils=checks)
    q, k, v = (x.detach() for x in (q, k, v))
    out, lse = sdpa.cudnn_causal(q, k, v, 0.1)
    arguments = (torch.randn_like(out), q, k, v, out, lse, 0.1)
    torch.library.opcheck(sdpa.cudnn_causal_backward, arguments, test_utils=checks)


@pytest.mark.gpu
def test_cudnn_and_the_gated_sum_in_a_cuda_graph() -> None:
    """What `auto` takes where the core is not one operator, with the backward."""
    pytest.importorskip("triton")
    from nsa_flex.fallback_kernels.fused.gated_sum import gated_sum

    q, selected, sliding = (leaf((1, 8, 500, 64), torch.bfloat16, "cuda") for _ in range(3))
    blocks = PAPER.num_compressed_blocks(500)
    k, v = (leaf((1, 2, blocks, 64), torch.bfloat16, "cuda") for _ in range(2))
    gates = torch.rand(1, 8, 500, 3, device="cuda", requires_grad=True)
    inputs = (q, k, v, selected, sliding, gates)
    grad_out = torch.randn_like(q)

    def step() -> list[Tensor]:
        out, lse = IMPLEMENTATIONS["sdpa", "compressed"](
            Branch(q, k, v, PAPER, 0.125, need_lse=True)
        )
        total = gated_sum(out, selected, sliding, gates)
        assert lse is not None
        return [total, lse, *torch.autograd.grad(total, inputs, grad_out)]

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for x in inputs:
            x.copy_(torch.rand_like(x))
    graph.replay()
    for got, want in zip(captured, step(), strict=True):
        # cuDNN adds up a query's gradient in no fixed order.
        torch.testing.assert_close(got, want, rtol=2**-6, atol=2**-6)


def test_a_block_size_that_was_a_symbol() -> None:
    """A second config compiled in a process makes sizes nodes of the graph, known later."""
    node = torch.fx.Graph().placeholder("block_size")
    node.meta["val"] = 64
    assert small_block_backward._size(node) == small_block_backward._size(64) == 64
