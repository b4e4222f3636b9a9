"""The choice that NSA-1B was trained with, and branches that are absent, against their oracle."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from nsa_flex import NSAAttention, NSAConfig, nsa_attention
from nsa_flex.attention import NSAAux
from nsa_flex.cache.buffers import num_rows
from nsa_flex.config import BRANCHES
from nsa_flex.selection import best_blocks, choose_blocks
from reference import nsa_1b, oracle
from reference.accuracy import assert_close, eager_attention, leaf, to_float64

TILED = NSAConfig(4, 4, 4, 4, 0, 1, 6, "mean", selection="tiled_top_k")
NSA_1B = NSAConfig(16, 16, 16, 16, 0, 1, 128, "mean", "tiled_top_k")
NAMES = ("output", "query", "key", "value", "compressed key", "compressed value", "gates")
SIZES = nsa_1b.Sizes(head_dim=16)
# The selected branch alone has the compressed keys of all branches to choose by.
SUBSETS = [names for count in (1, 2, 3) for names in itertools.combinations(BRANCHES, count)]


def inputs(length: int, **options) -> tuple[torch.Tensor, ...]:
    heads, kv_heads, dim = SIZES.num_attention_heads, SIZES.num_key_value_heads, SIZES.head_dim
    return tuple(
        torch.randn(2, number, length, dim, dtype=torch.float64, **options)
        for number in (heads, kv_heads, kv_heads)
    )


def pooled(x: torch.Tensor) -> torch.Tensor:
    return x.unfold(2, 4, 4).mean(-1)


def test_the_oracle_is_its_own_derivative() -> None:
    sizes = dataclasses.replace(SIZES, tie_word_embeddings=False)
    rng = np.random.default_rng(torch.randint(2**31, ()).item())
    weights = {name: rng.normal(size=shape) * 0.3 for name, shape in nsa_1b.shapes(sizes).items()}
    ids = rng.integers(0, sizes.vocab_size, (2, 37))
    logits, backward = nsa_1b.forward(weights, sizes, ids)
    grad = rng.normal(size=logits.shape)
    gradients = backward(grad)
    for name, weight in weights.items():
        direction, step = rng.normal(size=weight.shape), 1e-6
        plus, minus = (
            nsa_1b.forward({**weights, name: weight + sign * step * direction}, sizes, ids)[0]
            for sign in (1, -1)
        )
        slope = ((plus - minus) * grad).sum() / (2 * step)
        expected = (gradients[name] * direction).sum()
        # Central differences: step² of truncation, eps/step of rounding, of sums of thousands.
        assert slope == pytest.approx(expected, rel=1e-4, abs=1e-4), name


@pytest.mark.parametrize("n", [2, 4, 8])
def test_blocks_are_those_of_merged_tiles(n: int) -> None:
    """Upstream's tiles have as many blocks as a block has tokens: n of both."""
    config = NSAConfig(n, n, n, n, 0, 1, selection="tiled_top_k")
    sizes = nsa_1b.Sizes(block_size=n, block_counts=n)
    num_blocks = 4 * n + 1
    scores = torch.rand(2, 1, num_blocks * n, num_blocks)
    found = best_blocks(scores, torch.arange(num_blocks * n)[None], None, config)
    for b, t in np.ndindex(2, num_blocks * n):
        expected = nsa_1b.choose(scores[b, 0, t].double().numpy(), t, 4, sizes)
        assert found[b, 0, t].tolist() == expected + [-1] * (n - len(expected))


def test_tiles_are_counted_from_the_documents_start() -> None:
    scores = torch.rand(1, 2, 60, 15)
    positions = torch.arange(60)[None]
    alone = best_blocks(scores[:, :, 12:, 3:], positions[:, :-12], None, TILED)
    start = torch.where(positions < 12, 0, 12)
    packed = best_blocks(scores, positions, start, TILED)[:, :, 12:]
    torch.testing.assert_close(packed, torch.where(alone < 0, -1, alone + 3).int())


@pytest.mark.parametrize("length", [3, 16, 21, 61])
def test_attention_is_the_oracles(length: int) -> None:
    q, k, v = inputs(length, requires_grad=True)
    gates = torch.rand(2, 4, length, 3, dtype=torch.float64, requires_grad=True)
    compressed = (pooled(k), pooled(v)) if length >= 4 else (k[:, :, :0], v[:, :, :0])
    out = nsa_attention(q, k, v, *compressed, gates, config=TILED)
    arrays = [x.detach().numpy() for x in (q, k, v, gates)]
    expected, backward = nsa_1b.attention(*arrays, SIZES)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v, gates), grad)
    np.testing.assert_allclose(out.detach().numpy(), expected, rtol=0, atol=1e-12)
    for mine, theirs in zip(found, backward(grad.numpy()), strict=True):
        np.testing.assert_allclose(mine.numpy(), theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("branches", SUBSETS, ids="+".join)
def test_absent_branches_are_gates_of_zero(branches: tuple[str, ...]) -> None:
    """What they read need not be given."""
    config = dataclasses.replace(TILED, branches=branches)
    q, k, v = inputs(45)
    gates = torch.rand(2, 4, 45, 3, dtype=torch.float64)
    there = [BRANCHES.index(name) for name in branches]
    muted = torch.zeros_like(gates)
    muted[..., there] = gates[..., there]
    whole, all_aux = nsa_attention(
        q, k, v, pooled(k), pooled(v), muted, config=TILED, return_aux=True
    )
    compressed = (
        None if branches == ("sliding",) else pooled(k),
        pooled(v) if "compressed" in branches else None,
    )
    out, aux = nsa_attention(
        q, k, v, *compressed, gates[..., there], config=config, return_aux=True
    )
    torch.testing.assert_close(out, whole, rtol=0, atol=1e-14)
    assert isinstance(aux, NSAAux)
    assert [name for name, x in aux.lse._asdict().items() if x is not None] == list(branches)
    if "selected" in branches:
        torch.testing.assert_close(aux.blocks, all_aux.blocks)
    else:
        assert aux.blocks is None


def test_an_absent_branch_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sliding branch alone scores nothing and calls no other branch."""
    from nsa_flex import attention

    called = []
    monkeypatch.setattr(attention, "choose_blocks", lambda *args, **_: called.append("choose"))
    for key, run in list(attention.IMPLEMENTATIONS.items()):
        monkeypatch.setitem(
            attention.IMPLEMENTATIONS,
            key,
            lambda task, key=key, run=run: (called.append(key), run(task))[1],
        )
    q, k, v = inputs(20)
    config = dataclasses.replace(TILED, branches=("sliding",))
    nsa_attention(q, k, v, None, None, torch.rand(2, 4, 20, 1).double(), config=config)
    assert called == [("dense", "sliding")]


@pytest.mark.parametrize("max_length", [None, 401])
@pytest.mark.parametrize("branches", SUBSETS, ids="+".join)
def test_a_cache_compresses_what_a_branch_reads(
    branches: tuple[str, ...], max_length: int | None
) -> None:
    """And has memory for that; one row beside it is where kernels put values that none reads."""
    config = dataclasses.replace(TILED, branches=branches)
    layer = NSAAttention(24, 4, 2, config=config).double().requires_grad_(False)
    x, real = torch.randn(2, 401, 24, dtype=torch.float64), torch.ones(2, 401)
    real[1, :5] = 0
    expected = layer(x, attention_mask=real)
    seen = set()
    for name in ("key", "value"):
        phi = getattr(layer, f"compress_{name}")
        phi.register_forward_hook(lambda *_, name=name: seen.add(name))
    cache, found, start = layer.new_cache(max_length=max_length), [], 0
    for count in (30, 300, 20, 1, 1, 1, 39, 9):
        stop = start + count
        found.append(layer(x[:, start:stop], cache=cache, attention_mask=real[:, start:stop]))
        cache.reorder_cache(torch.tensor([0, 1]))
        start = stop
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=0, atol=1e-13)
    reads = {"key"} if config.compresses else set()
    reads |= {"value"} if "compressed" in branches else set()
    assert seen == reads
    rows = num_rows(config, cache.capacity)
    rows *= len(reads)
    rows += len(reads) == 1
    assert cache.memory().compressed == rows * 2 * 2 * 6 * 8


@pytest.mark.parametrize(
    ("branches", "missing", "error"),
    [
        (("selected",), (0,), "compressed_key is None, and is read by one of the branches sel"),
        (("compressed",), (1,), "compressed_value is None, and is read by one of the branches"),
    ],
)
def test_none_for_what_is_read(branches, missing, error) -> None:
    config = dataclasses.replace(TILED, branches=branches)
    q, k, v = inputs(20)
    compressed = [None if i in missing else pooled(x) for i, x in enumerate((k, v))]
    with pytest.raises(TypeError, match=error):
        nsa_attention(q, k, v, *compressed, torch.rand(2, 4, 20, 1).double(), config=config)


def test_a_backend_of_an_absent_branch() -> None:
    config = dataclasses.replace(TILED, branches=("sliding",))
    q, k, v = inputs(20)
    gates, backend = torch.rand(2, 4, 20, 1).double(), {"selected": "dense"}
    with pytest.raises(
        ValueError, match="backend names selected, and the config's branches are s"
    ):
        nsa_attention(q, k, v, None, None, gates, config=config, backend=backend)


def test_gates_of_another_number() -> None:
    config = dataclasses.replace(TILED, branches=("selected", "sliding"))
    q, k, v = inputs(20)
    with pytest.raises(ValueError, match=r"gates has shape .*3\); expected \(2, 4, 20, 2\)"):
        nsa_attention(q, k, v, pooled(k), None, torch.rand(2, 4, 20, 3).double(), config=config)


def test_a_chunk_chooses_as_the_whole() -> None:
    q, k, _ = inputs(61)
    positions, options = torch.arange(61)[None], {"config": TILED, "scale": 0.3, "num_blocks": 16}
    whole = choose_blocks(q, pooled(k), positions=positions, **options)
    part = choose_blocks(q[:, :, 50:], pooled(k), positions=positions[:, 50:], **options)
    torch.testing.assert_close(part, whole[:, :, 50:])


@pytest.mark.kept(lambda branches: branches in (("selected",), ("compressed", "sliding")))
@pytest.mark.parametrize("branches", SUBSETS, ids="+".join)
def test_a_layer_of_some_branches_with_a_cache_packed_and_compiled(
    branches: tuple[str, ...],
) -> None:
    config = dataclasses.replace(TILED, branches=branches)
    layer = NSAAttention(24, 4, 2, config=config, gate_init="unbiased").double()
    torch.nn.init.normal_(layer.gates.linear.weight)
    x = torch.randn(1, 61, 24, dtype=torch.float64)
    with torch.no_grad():
        expected = layer(x)
        cache = layer.new_cache()
        found = torch.cat([layer(part, cache=cache) for part in x.split([30, 20, 1, 1, 9], 1)], 1)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
        twice = torch.cat((x, x[:, :37]), 1)
        packed = layer(twice, cu_seqlens=torch.tensor([0, 61, 98]))
        torch.testing.assert_close(packed[:, :61], expected, rtol=0, atol=1e-13)
        torch.testing.assert_close(packed[:, 61:], expected[:, :37], rtol=0, atol=1e-13)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    grad = torch.randn_like(expected)
    eager, graph = (
        torch.autograd.grad(run(x), [layer.k_proj.weight, layer.gates.linear.weight], grad)
        for run in (layer, compiled)
    )
    for one, other in zip(eager, graph, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("device", "heads", "length"),
    [("cpu", 4, 333), pytest.param("cuda", 32, 700, marks=pytest.mark.gpu)],
)
def test_bfloat16_errs_at_most_twice_as_eager_attention(
    device: str, heads: int, length: int
) -> None:
    """NSA-1B's sizes, forward and backward, for the blocks that the call chose."""
    shapes = [(1, number, length, 64) for number in (heads, 2, 2)]
    shapes += [(1, 2, NSA_1B.num_compressed_blocks(length), 64)] * 2
    leaves = [leaf(shape, torch.bfloat16, device) for shape in shapes]
    gates = torch.rand(1, heads, length, 3, device=device).bfloat16().requires_grad_()
    out, aux = nsa_attention(*leaves, gates, config=NSA_1B, return_aux=True)
    assert isinstance(aux, NSAAux)
    assert aux.blocks is not None
    blocks, arrays = aux.blocks.cpu().numpy(), [to_float64(x) for x in (*leaves, gates)]
    want = oracle.forward(*arrays, NSA_1B, blocks=blocks)
    assert oracle.choice_excess(blocks, want.scores, NSA_1B) <= 1e-4
    sizes = (length, length)
    masks = (
        oracle.compressed_mask(*sizes, leaves[3].shape[2], NSA_1B, 0),
        oracle.selected_mask(blocks, length, NSA_1B, 0),
        oracle.sliding_mask(*sizes, NSA_1B, 0),
    )
    q, k, v, *compressed = leaves
    eager = sum(
        gates[..., c, None] * eager_attention(q, *keys, torch.from_numpy(mask).to(device), 0.125)
        for c, (keys, mask) in enumerate(zip((compressed, (k, v), (k, v)), masks, strict=True))
    )
    grad = torch.randn_like(out)
    gradients = oracle.backward(*arrays, NSA_1B, to_float64(grad), blocks=blocks)
    wanted = [want.out, *[x for x in dataclasses.astuple(gradients) if x is not None]]
    ours, theirs = (
        [each, *torch.autograd.grad(each, [*leaves, gates], grad)] for each in (out, eager)
    )
    for name, mine, exact, plain in zip(NAMES, ours, wanted, theirs, strict=True):
        assert_close(name, mine, exact, plain, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("branches", SUBSETS, ids="+".join)
def test_some_branches_on_kernels(branches: tuple[str, ...]) -> None:
    """Where the choice is the same, `auto` errs about as `dense` does; with gradients."""
    config = dataclasses.replace(NSA_1B, branches=branches)
    shapes = [(1, heads, 700, 64) for heads in (32, 2, 2)]
    leaves = [torch.randn(shape, device="cuda").bfloat16().requires_grad_() for shape in shapes]
    gates = torch.rand(1, 32, 700, len(branches), device="cuda").bfloat16().requires_grad_()
    grad, results = torch.randn(1, 32, 700, 64, device="cuda").bfloat16(), []
    for backend in ("auto", "dense"):
        q, k, v = leaves
        ck, cv = (x.unfold(2, 16, 16).mean(-1) for x in (k, v))
        out, aux = nsa_attention(
            q, k, v, ck, cv, gates, config=config, backend=backend, return_aux=True
        )
        grads = torch.autograd.grad(out, [*leaves, gates], grad)
        results.append((aux.blocks, [out, *grads]))
    (blocks, found), (want_blocks, want) = results
    if blocks is not None:
        assert (blocks == want_blocks).all(-1).float().mean() > 0.999
    for x, y in zip(found, want, strict=True):
        assert (x.float() - y.float()).norm() < 2**-6 * y.float().norm()
