"""The choice of blocks in PyTorch operations against the float64 oracle, on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from nsa_flex import config as config_module
from nsa_flex import nsa_attention, selection
from nsa_flex.attention import NSAAux
from nsa_flex.config import NSAConfig
from nsa_flex.selection import Rule, best_blocks, block_scores, choose_blocks, take_best
from reference import infllm_v2, oracle

SMALL = NSAConfig(
    compress_block_size=8, compress_stride=4, select_block_size=16, num_selected_blocks=4
)
CONFIGS = {
    "small": SMALL,
    "paper": NSAConfig(),
    "narrow": NSAConfig(select_block_size=32, num_selected_blocks=8),
    "wide": NSAConfig(64, 32, 128, 5),
    "apart": NSAConfig(8, 8, 16, 4),
    "dense": NSAConfig(16, 4, 16, 5),
    "no initial block": NSAConfig(8, 4, 16, 3, num_initial_blocks=0, num_local_blocks=1),
    "forced alone": NSAConfig(8, 4, 16, 4, num_initial_blocks=2, num_local_blocks=2),
}


def inputs(
    config: NSAConfig, num_queries: int, num_keys: int, *, batch: int = 2, group: int = 3
) -> tuple[Tensor, Tensor]:
    """Query (B, 2 G, Sq, 16) and compressed keys (B, 2, N, 16)."""
    num_compressed = max(1, config.num_compressed_blocks(num_keys))
    return torch.randn(batch, 2 * group, num_queries, 16), torch.randn(
        batch, 2, num_compressed, 16
    )


def exact_scores(
    config: NSAConfig,
    q: Tensor,
    k: Tensor,
    num_keys: int,
    past: int = 0,
    starts: np.ndarray | None = None,
) -> np.ndarray:
    mask = oracle.compressed_mask(q.shape[2], num_keys, k.shape[2], config, past, starts)
    queries, keys = (x.double().numpy() for x in (q, k))
    p = oracle.branch(queries, keys, keys, mask, 0.25)[2]
    return oracle.block_scores(p, config, config.num_select_blocks(num_keys), k.shape[1])


def choice(
    config: NSAConfig,
    q: Tensor,
    k: Tensor,
    num_keys: int,
    past: int = 0,
    starts: np.ndarray | None = None,
) -> Tensor:
    return choose_blocks(
        q,
        k,
        config=config,
        scale=0.25,
        num_blocks=config.num_select_blocks(num_keys),
        positions=torch.arange(q.shape[2])[None] + past,
        document_start=None if starts is None else torch.from_numpy(starts).int(),
    )


def check(config: NSAConfig, num_queries: int, past: int = 0, unused: int = 0) -> None:
    num_keys = past + num_queries + unused
    q, k = inputs(config, num_queries, num_keys)
    scores = exact_scores(config, q, k, num_keys, past)
    blocks = choice(config, q, k, num_keys, past)
    assert blocks.dtype == torch.int32
    # A score sums at most G probabilities, each counted l/d times.
    overlap = config.compress_block_size // config.compress_stride
    rounding = 32 * torch.finfo(torch.float32).eps * 3 * overlap
    assert oracle.choice_excess(blocks.numpy(), scores, config, past) <= rounding


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_configs(config: NSAConfig) -> None:
    check(config, (config.num_selected_blocks + 3) * config.select_block_size + 3)


@pytest.mark.parametrize("num_queries", [1, 7, 8, 15, 16, 17, 64, 65])
def test_short_sequences(num_queries: int) -> None:
    check(SMALL, num_queries)


@pytest.mark.parametrize(
    ("num_queries", "past", "unused"), [(1, 200, 0), (9, 150, 30), (33, 64, 1)]
)
def test_query_offset(num_queries: int, past: int, unused: int) -> None:
    check(SMALL, num_queries, past, unused)


def test_documents() -> None:
    q, k = inputs(SMALL, 200, 200)
    lengths = np.array([[96], [112]])
    starts = np.arange(200) // lengths * lengths
    scores = exact_scores(SMALL, q, k, 200, starts=starts)
    blocks = choice(SMALL, q, k, 200, starts=starts)
    assert oracle.choice_excess(blocks.numpy(), scores, SMALL, 0, starts) <= 1e-4


def test_equal_scores_take_the_lower_index() -> None:
    q, k = inputs(SMALL, 200, 200)
    blocks = choice(SMALL, q, torch.zeros_like(k), 200)
    assert blocks[0, 0, 199].tolist() == [0, 1, 11, 12]


def test_nan_leaves_the_forced_blocks() -> None:
    q, k = inputs(SMALL, 200, 200)
    q[:, :, 199] = float("nan")
    assert choice(SMALL, q, k, 200)[0, 0, 199].tolist() == [0, 1, 11, 12]


def test_chunks_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = inputs(SMALL, 150, 150)
    want = choice(SMALL, q, k, 150)
    monkeypatch.setattr(selection, "MAX_SCORES", 40 * q.shape[0] * q.shape[1] * k.shape[2])
    assert torch.equal(choice(SMALL, q, k, 150), want)


def test_autocast_changes_nothing() -> None:
    """Scores stay float32, so that eager and compiled code choose alike."""
    q, k = inputs(SMALL, 150, 150)
    want = choice(SMALL, q, k, 150)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(choice(SMALL, q, k, 150), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_scored_in_float32(dtype: torch.dtype) -> None:
    q, k = ((16 * x).round() / 16 for x in inputs(SMALL, 150, 150))  # exact in all of them
    want = choice(SMALL, q, k, 150)
    assert torch.equal(choice(SMALL, q.to(dtype), k.to(dtype), 150), want)


def test_log_sum_exp_is_not_needed_on_the_cpu() -> None:
    q, k = inputs(SMALL, 150, 150)
    options = {"config": SMALL, "scale": 0.25, "num_blocks": 10}
    lse = torch.full(q.shape[:3], float("nan"))
    got = choose_blocks(q, k, positions=torch.arange(150)[None], lse=lse, **options)
    assert torch.equal(got, choice(SMALL, q, k, 150))


def test_carries_no_gradient() -> None:
    q, k = inputs(SMALL, 80, 80)
    assert not choice(SMALL, q.requires_grad_(), k.requires_grad_(), 80).requires_grad


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_block_scores(config: NSAConfig) -> None:
    num_blocks = 6
    num_compressed = config.num_compressed_blocks(num_blocks * config.select_block_size - 1)
    p = torch.rand(2, 3, num_compressed, dtype=torch.float64)
    want = oracle.block_scores(p.numpy()[:, :, None], config, num_blocks, 3)[:, :, 0]
    np.testing.assert_allclose(block_scores(p, num_blocks, config).numpy(), want, rtol=1e-12)


def test_best_blocks_are_the_oracles() -> None:
    """Scores of few values: many ties, and the same answer."""
    scores = torch.randint(0, 4, (2, 3, 90, 12)).float()
    positions = torch.arange(90)[None] + 100
    got = best_blocks(scores, positions, None, SMALL)
    want = oracle.choose_all(scores.double().numpy(), SMALL, 100)
    np.testing.assert_array_equal(got.numpy(), want)


def test_operator_obeys_the_library_rules() -> None:
    q, k = inputs(SMALL, 90, 90)
    positions = torch.arange(90)[None]
    arguments = (q, k, positions, None, 0.25, 6, SMALL.counts)
    torch.library.opcheck(selection._choose_blocks, arguments)


def test_compiles_into_one_graph_with_dynamic_length() -> None:
    def chosen(q: Tensor, k: Tensor) -> Tensor:
        positions = torch.arange(q.shape[2])[None]
        options = {"config": SMALL, "scale": 0.25, "num_blocks": -(-q.shape[2] // 16)}
        return choose_blocks(q, k, positions=positions, **options)

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(chosen, fullgraph=True, dynamic=True, backend=counter)
    for length in (73, 90, 141):
        q, k = inputs(SMALL, length, length)
        assert torch.equal(compiled(q, k), chosen(q, k))
    assert counter.frame_count == 1


def test_a_fourth_rule_is_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its name: the least probable blocks, forward and backward under their mask."""

    def least(p: Tensor, num_blocks: int, config: NSAConfig) -> Tensor:
        return 1 / (1 + block_scores(p, num_blocks, config))

    monkeypatch.setattr(config_module, "RULES", (*config_module.RULES, "least"))
    monkeypatch.setitem(selection.RULES, "least", Rule(least, take_best))  # type: ignore[misc]
    config = NSAConfig(
        *(4, 4, 4, 3, 0, 1), selection="least", branches=("selected",)  # type: ignore[arg-type]
    )  # fmt: skip
    shapes = [(1, heads, 61, 16) for heads in (4, 2, 2)]
    leaves = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    pooled = leaves[1].unfold(2, 4, 4).mean(-1)  # [B, Hkv, N, D]
    gates = torch.ones(1, 4, 61, 1, dtype=torch.float64)
    out, aux = nsa_attention(*leaves, pooled, None, gates, config=config, return_aux=True)
    assert isinstance(aux, NSAAux)
    assert aux.blocks is not None
    q, k, v = (x.detach()[0].numpy() for x in leaves)
    mask = oracle.compressed_mask(61, 61, 15, config)
    keys = pooled.detach().numpy()
    p = oracle.branch(q[None], keys, keys, mask, 0.25)[2]
    scores = oracle.block_scores(p, config, 16, 2)[0]
    place, visible = np.arange(61), np.zeros((2, 61, 61), bool)
    for head, t in np.ndindex(2, 61):
        chosen = {block for block in aux.blocks[0, head, t].tolist() if block >= 0}
        others = set(range(t // 4 + 1)) - chosen
        assert t // 4 in chosen
        assert len(chosen) == min(3, t // 4 + 1)
        highest = max([scores[head, t, j] for j in chosen - {t // 4}], default=0)
        assert all(scores[head, t, j] >= highest - 1e-5 for j in others)
        visible[head, t] = np.isin(place // 4, list(chosen)) & (place <= t)
    want, backward = infllm_v2.masked_attention(q, k, v, visible)
    grad = torch.randn_like(out)
    found = [out, *torch.autograd.grad(out, leaves, grad)]
    for mine, theirs in zip(found, [want, *backward(grad[0].numpy())], strict=True):
        np.testing.assert_allclose(mine.detach()[0].numpy(), theirs, rtol=0, atol=1e-12)


@pytest.mark.gpu
def test_kernels_leave_a_fourth_rule_to_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "RULES", (*config_module.RULES, "alike"))

    def alike(p: Tensor, num_blocks: int, config: NSAConfig) -> Tensor:
        return p.new_ones((*p.shape[:-1], num_blocks))

    monkeypatch.setitem(selection.RULES, "alike", Rule(alike, take_best))  # type: ignore[misc]
    config = NSAConfig(16, 16, 16, 4, 0, 1, selection="alike")  # type: ignore[arg-type]
    q, k = (x.cuda() for x in inputs(config, 200, 200))
    positions = torch.arange(200, device="cuda")[None]
    blocks = choose_blocks(q, k, config=config, scale=1.0, num_blocks=13, positions=positions)
    assert (blocks[:, :, 48:, :3].cpu() == torch.arange(3)).all()  # equal scores: the first
