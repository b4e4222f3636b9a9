"""The oracle against scalar loops, hand-computed numbers and finite differences."""

import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nsa_flex.config import NSAConfig
from reference import oracle

# float64 on sums of some dozen terms of order one: a few hundred units in the last place.
EXACT = 1e-13
SMALL = NSAConfig(
    compress_block_size=4,
    compress_stride=2,
    select_block_size=4,
    num_selected_blocks=3,
    window_size=5,
)
WIDE_BLOCKS = NSAConfig(
    compress_block_size=6,
    compress_stride=3,
    select_block_size=9,
    num_selected_blocks=2,
    num_initial_blocks=0,
    num_local_blocks=1,
    window_size=4,
)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def literal_forward(q, k, v, ck, cv, gates, cfg):
    """Section 3 of the paper, one query head and position at a time, in scalar loops."""
    out, blocks = np.zeros((*q.shape[:3], v.shape[3])), {}
    group_size = q.shape[1] // k.shape[1]
    for b, head, t in np.ndindex(q.shape[:3]):
        kv_head = head // group_size
        group = range(kv_head * group_size, (kv_head + 1) * group_size)
        scores = [0.0] * (t // cfg.select_block_size + 1)
        for other in group:
            visible = literal_compressed(t, cfg)
            p, _ = literal_attention(q[b, other, t], ck[b, kv_head], cv[b, kv_head], visible)
            for j in range(len(scores)):
                for m in range(cfg.select_block_size // cfg.compress_stride):
                    for n in range(cfg.compress_block_size // cfg.compress_stride):
                        i = cfg.select_block_size // cfg.compress_stride * j + m - n
                        scores[j] += p.get(i, 0.0)
        chosen = literal_choice(scores, cfg)
        blocks[b, kv_head, t] = chosen
        tokens = [s for s in range(t + 1) if s // cfg.select_block_size in chosen]
        window = list(range(max(0, t - cfg.window_size + 1), t + 1))
        keys, values = k[b, kv_head], v[b, kv_head]
        _, compressed = literal_attention(q[b, head, t], ck[b, kv_head], cv[b, kv_head], visible)
        _, selected = literal_attention(q[b, head, t], keys, values, tokens)
        _, sliding = literal_attention(q[b, head, t], keys, values, window)
        g = gates[b, head, t]
        out[b, head, t] = g[0] * compressed + g[1] * selected + g[2] * sliding
    return out, blocks


def literal_compressed(t, cfg):
    visible, i = [], 0
    while i * cfg.compress_stride + cfg.compress_block_size - 1 <= t:
        visible.append(i)
        i += 1
    return visible


def literal_attention(query, keys, values, visible):
    out = np.zeros(values.shape[1])
    weights = {i: math.exp(query @ keys[i] / math.sqrt(len(query))) for i in visible}
    p = {i: weight / sum(weights.values()) for i, weight in weights.items()}
    for i in visible:
        out += p[i] * values[i]
    return p, out


def literal_choice(scores, cfg):
    own = len(scores) - 1
    chosen = {j for j in range(own + 1) if j < cfg.num_initial_blocks}
    chosen |= {j for j in range(own + 1) if j > own - cfg.num_local_blocks}
    while len(chosen) < min(cfg.num_selected_blocks, own + 1):
        left = [j for j in range(own + 1) if j not in chosen]
        chosen.add(next(j for j in left if scores[j] == max(scores[i] for i in left)))
    return sorted(chosen)


@pytest.mark.parametrize("cfg", [SMALL, WIDE_BLOCKS], ids=["small", "wide_blocks"])
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 37])
def test_forward_is_the_definition(rng, cfg, num_tokens):
    problem = oracle.random_problem(
        rng, cfg, num_tokens, batch=2, value_dim=5, compression="random"
    )
    result = oracle.forward(*problem, cfg)
    out, blocks = literal_forward(*problem, cfg)
    assert oracle.relative_error(result.out, out) < EXACT
    for place, chosen in blocks.items():
        assert [j for j in result.blocks[place] if j >= 0] == chosen


def difference_quotients(loss, x, step=1e-5):
    """Central differences of a scalar function, in every element of x (changed in place)."""
    grad = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        kept = x[i]
        x[i] = kept + step
        above = loss()
        x[i] = kept - step
        grad[i] = (above - loss()) / (2 * step)
        x[i] = kept
    return grad


def assert_gradients_are_difference_quotients(
    problem: oracle.Problem, cfg: NSAConfig, grad_out, **options
):
    # The choice is a step function and carries no gradient: hold it while differencing.
    options["blocks"] = oracle.forward(*problem, cfg, **options).blocks

    def loss():
        return float((oracle.forward(*problem, cfg, **options).out * grad_out).sum())

    separate = {name: x for name, x in options.items() if name.startswith("sliding_")}
    inputs = {**problem._asdict(), **separate}
    grads = oracle.backward(*problem, cfg, grad_out, **options)
    for name, x in inputs.items():
        want = difference_quotients(loss, x)
        # Truncation step^2 = 1e-10 and rounding 1e-16 / step = 1e-11, with two digits to spare.
        assert oracle.relative_error(getattr(grads, name), want) < 1e-8, name
        assert np.abs(want).max() > 1e-3, f"{name}: nothing was tested"
    assert {name for name, grad in vars(grads).items() if grad is not None} == set(inputs)


def test_gradients(rng):
    problem = oracle.random_problem(rng, SMALL, 14, head_dim=3, value_dim=2, compression="random")
    grad_out = rng.standard_normal((1, 4, 14, 2))
    assert_gradients_are_difference_quotients(problem, SMALL, grad_out)


def test_gradients_of_separate_sliding_keys_with_scale_and_offset(rng):
    problem = oracle.random_problem(
        rng, SMALL, 13, batch=2, kv_heads=1, head_dim=2, value_dim=3, num_queries=4
    )
    options = {
        "sliding_key": rng.standard_normal(problem.key.shape),
        "sliding_value": rng.standard_normal(problem.value.shape),
        "scale": 0.9,
        "offset": np.array([2, 9]),
    }
    grad_out = rng.standard_normal((2, 2, 4, 3))
    assert_gradients_are_difference_quotients(problem, SMALL, grad_out, **options)


def test_gradients_of_packed_documents(rng):
    problem = oracle.random_problem(rng, SMALL, 15, kv_heads=1, head_dim=2, compression="random")
    start = np.repeat([0, 4], [4, 11])[None]
    grad_out = rng.standard_normal((1, 2, 15, 2))
    assert_gradients_are_difference_quotients(problem, SMALL, grad_out, document_start=start)


def test_queries_that_see_no_block_have_zero_gradients(rng):
    problem = oracle.random_problem(rng, SMALL, 3)
    problem.gates[..., 1:] = 0
    grads = oracle.backward(*problem, SMALL, np.ones(problem.query.shape))
    for name in ("query", "key", "value", "compressed_key", "compressed_value"):
        assert not getattr(grads, name).any(), name


def test_masks_by_hand():
    # l 4, d 2: blocks end at tokens 3, 5, 7; w 5.
    seen = oracle.compressed_mask(8, 8, 3, SMALL)
    assert seen.shape == (1, 1, 8, 3)
    assert seen[0, 0].sum(-1).tolist() == [0, 0, 0, 1, 1, 2, 2, 3]
    sliding = oracle.sliding_mask(8, 8, SMALL)[0, 0]
    assert sliding.sum(-1).tolist() == [1, 2, 3, 4, 5, 5, 5, 5]
    assert np.flatnonzero(sliding[6]).tolist() == [2, 3, 4, 5, 6]
    selected = oracle.selected_mask([[[[0, 2, -1]]]], 12, SMALL, offset=9)[0, 0]
    assert np.flatnonzero(selected[0]).tolist() == [0, 1, 2, 3, 8, 9]


def test_masks_clip_at_the_document():
    start = [[4]]
    # Block 1 begins at token 2, of the previous document.
    seen = oracle.compressed_mask(1, 12, 5, SMALL, 10, start)
    assert np.flatnonzero(seen).tolist() == [2, 3]
    assert np.flatnonzero(oracle.sliding_mask(1, 12, SMALL, 6, start)).tolist() == [4, 5, 6]
    selected = oracle.selected_mask([[[[0, 1, -1]]]], 12, SMALL, 6, start)
    assert np.flatnonzero(selected).tolist() == [4, 5, 6]


def test_a_block_past_the_keys_is_never_seen():
    # Shapes stay nonempty when S < l: one block, which does not exist.
    assert not oracle.compressed_mask(3, 3, 1, SMALL).any()
    assert oracle.compressed_mask(1, 9, 4, SMALL, offset=20).sum() == 3


@pytest.mark.parametrize("offset", [3, np.array([3, 0])])
def test_masks_take_an_offset_per_row(offset):
    sliding = oracle.sliding_mask(2, 6, SMALL, offset)
    assert sliding.shape == (np.size(offset), 1, 2, 6)
    assert np.flatnonzero(sliding[0, 0, 1]).tolist() == [0, 1, 2, 3, 4]


def test_scores_weigh_the_paper_sizes_1_2_2_2_1():
    cfg = NSAConfig()
    num_compressed, num_blocks = 19, 5
    for i in range(num_compressed):
        p = np.zeros((1, 1, 1, num_compressed))
        p[..., i] = 1.0
        weights = oracle.block_scores(p, cfg, num_blocks, 1)[0, 0, 0]
        expected = [{-1: 1, 0: 2, 1: 2, 2: 2, 3: 1}.get(i - 4 * j, 0) for j in range(num_blocks)]
        assert weights.tolist() == expected


def test_scores_by_hand_and_summed_over_the_group():
    # l'/d = 2, l/d = 2: p_slc[j] = p[2j-1] + 2 p[2j] + p[2j+1].
    p = np.array([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
    scores = oracle.block_scores(p[None, :, None], SMALL, 3, 2)  # two heads a group
    assert scores[0, :, 0].tolist() == [[1.25 + 2.0, 0.75, 0.0], [1.0, 2.0 + 1.0, 0.0]]


@pytest.mark.parametrize(
    ("scores", "t", "n", "expected"),
    [
        ([0, 0, 0, 0, 0, 0], 23, 4, [0, 1, 4, 5]),  # a tie takes the lower index
        ([0, 1, 3, 3, 0, 0], 23, 4, [0, 2, 4, 5]),
        ([0, 1, 2, 3, 0, 9], 19, 4, [0, 2, 3, 4]),  # block 5 is in the future of token 19
        ([9, 1, 3, 2, 9, 9], 23, 5, [0, 2, 3, 4, 5]),  # forced blocks take no second slot
        ([0, 0, 0, 0, 0, 0], 0, 4, [0]),  # initial, local and own are one block
        ([0, 0, 0, 0, 0, 0], 7, 4, [0, 1]),
        ([0, 0, 0, 0, 0, 0], 8, 3, [0, 1, 2]),
        ([5, 1, 2, 3, 4, 5], 23, 16, [0, 1, 2, 3, 4, 5]),  # fewer candidates than n
    ],
)
def test_choose_by_hand(scores, t, n, expected):
    cfg = dataclasses.replace(SMALL, num_selected_blocks=n)
    assert oracle.choose(scores, t, cfg) == expected


def test_choose_counts_initial_blocks_from_the_document():
    cfg = dataclasses.replace(SMALL, num_selected_blocks=4)
    assert oracle.choose([9, 9, 0, 0, 1, 0, 0], 27, cfg, first_block=2) == [2, 4, 5, 6]
    assert oracle.choose([9, 9, 0], 11, cfg, first_block=2) == [2]
    assert oracle.choose([9, 9, 0], 3, cfg, first_block=2) == []


def test_choice_excess_of_a_best_and_of_a_worse_choice():
    scores = np.array([0.0, 0.25, 0.5, 0.0, 0.0]).reshape(1, 1, 1, 5)
    cfg = dataclasses.replace(SMALL, num_selected_blocks=4)
    assert oracle.choice_excess([[[[0, 2, 3, 4]]]], scores, cfg, 19) == 0.0
    assert oracle.choice_excess([[[[0, 1, 3, 4]]]], scores, cfg, 19) == 0.25


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([0, 3, 2, 4], "expected ascending, each once"),
        ([0, 3, 3, 4], "expected ascending, each once"),
        ([0, 3, 4, 5], "candidates are"),
        ([0, 1, 2, 4], "forced are"),
        ([0, 3, 4, -1], "expected ascending, each once"),
    ],
)
def test_choice_excess_rejects(blocks, message):
    cfg = dataclasses.replace(SMALL, num_selected_blocks=4)
    with pytest.raises(AssertionError, match=message):
        oracle.choice_excess([[[blocks]]], np.zeros((1, 1, 1, 6)), cfg, 19)


def test_choice_excess_rejects_a_padding_that_is_attended():
    with pytest.raises(AssertionError, match="expected 1, then -1"):
        oracle.choice_excess([[[[0, 0, -1]]]], np.zeros((1, 1, 1, 1)), SMALL, 2)


def test_one_token_attends_itself(rng):
    problem = oracle.random_problem(rng, SMALL, 1)
    result = oracle.forward(*problem, SMALL)
    own_value = np.repeat(problem.value, 2, axis=1)
    want = (problem.gates[..., 1:2] + problem.gates[..., 2:3]) * own_value
    assert oracle.relative_error(result.out, want) < EXACT
    assert result.blocks[0, :, 0].tolist() == [[0, -1, -1]] * 2


def test_shorter_than_a_block_sees_no_compressed_key(rng):
    problem = oracle.random_problem(rng, SMALL, 3)
    result = oracle.forward(*problem, SMALL)
    assert problem.compressed_key.shape[2] == 0
    assert not result.outputs["compressed"].any()
    assert np.isneginf(result.lse["compressed"]).all()
    padded = problem._replace(
        compressed_key=np.ones((1, 2, 1, 8)), compressed_value=np.ones((1, 2, 1, 8))
    )
    np.testing.assert_array_equal(oracle.forward(*padded, SMALL).out, result.out)


def test_lse_by_hand():
    q, k, v = (np.zeros((1, 1, 4, 2)) for _ in range(3))
    mask = oracle.compressed_mask(4, 4, 1, SMALL)
    _, lse, p = oracle.branch(q, k[:, :, :1], v[:, :, :1], mask, 1.0)
    assert lse[0, 0].tolist() == [-math.inf] * 3 + [0.0]
    assert p[0, 0, :, 0].tolist() == [0, 0, 0, 1]
    _, lse, _ = oracle.branch(q, k, v, oracle.sliding_mask(4, 4, SMALL), 1.0)
    np.testing.assert_allclose(lse[0, 0], np.log([1, 2, 3, 4]), rtol=EXACT)


def test_logits_beyond_the_range_of_exp_are_right(rng):
    q, k = np.full((1, 1, 1, 1), 100.0), np.array([50.0, 49.99]).reshape(1, 1, 2, 1)
    v = np.array([1.0, 3.0]).reshape(1, 1, 2, 1)
    mask = np.ones((1, 1, 1, 2), bool)
    out, lse, _ = oracle.branch(q, k, v, mask, 1.0)
    second = 1 / (1 + math.e)
    assert abs(float(out[0, 0, 0, 0]) - (1 + 2 * second)) < 1e-9
    assert abs(float(lse[0, 0, 0]) - (5000 - math.log(1 - second))) < 1e-9


@pytest.mark.parametrize(("branch", "num_tokens"), [(1, 12), (2, 5)], ids=["selected", "sliding"])
def test_a_branch_that_sees_everything_is_dense_causal_attention(rng, branch, num_tokens):
    problem = oracle.random_problem(rng, SMALL, num_tokens, batch=2, value_dim=3)
    problem.gates[:] = np.eye(3)[branch]
    dense = oracle.dense_causal(*problem[:3])
    assert oracle.relative_error(oracle.forward(*problem, SMALL).out, dense) < EXACT
    longer = oracle.random_problem(rng, SMALL, num_tokens + 1)
    longer.gates[:] = np.eye(3)[branch]
    dense = oracle.dense_causal(*longer[:3])
    assert oracle.relative_error(oracle.forward(*longer, SMALL).out, dense) > 1e-3


def test_dense_causal_aligns_the_last_query_with_the_last_key(rng):
    q, k, v = oracle.random_problem(rng, SMALL, 9)[:3]
    whole = oracle.dense_causal(q, k, v)
    assert oracle.relative_error(oracle.dense_causal(q[:, :, 6:], k, v), whole[:, :, 6:]) < EXACT
    first = oracle.dense_causal(q[:, :, :2], k, v, offset=0)
    assert oracle.relative_error(first, whole[:, :, :2]) < EXACT


def test_the_future_changes_nothing(rng):
    t = 21
    problem = oracle.random_problem(rng, SMALL, 40)
    grad_out = np.zeros(problem.query.shape)
    grad_out[:, :, : t + 1] = rng.standard_normal((1, 4, t + 1, 8))
    before = oracle.forward(*problem, SMALL)
    grads_before = oracle.backward(*problem, SMALL, grad_out)
    q, k, v, *_, gates = (x.copy() for x in problem)
    for x in (q, k, v, gates):
        x[:, :, t + 1 :] = 10 * rng.standard_normal(x[:, :, t + 1 :].shape)
    changed = (q, k, v, oracle.compress_mean(k, SMALL), oracle.compress_mean(v, SMALL), gates)
    after = oracle.forward(*changed, SMALL)
    grads_after = oracle.backward(*changed, SMALL, grad_out)
    past = np.s_[:, :, : t + 1]
    np.testing.assert_array_equal(after.blocks[past], before.blocks[past])
    np.testing.assert_allclose(after.out[past], before.out[past], rtol=EXACT, atol=EXACT)
    for name in oracle.Problem._fields:
        got, want = getattr(grads_after, name), getattr(grads_before, name)
        assert oracle.relative_error(got, want) < EXACT, name
    assert np.abs(after.out[:, :, t + 1 :] - before.out[:, :, t + 1 :]).max() > 1e-3


def test_prefill_chunks_and_decode_give_the_same(rng):
    whole = oracle.random_problem(rng, SMALL, 30, batch=2)
    want = oracle.forward(*whole, SMALL)
    q, k, v, _, _, gates = whole
    for begin, end in [(0, 1), (1, 8), (8, 29), (29, 30)]:
        keys, values = k[:, :, :end], v[:, :, :end]
        ck, cv = oracle.compress_mean(keys, SMALL), oracle.compress_mean(values, SMALL)
        new = np.s_[:, :, begin:end]
        got = oracle.forward(q[new], keys, values, ck, cv, gates[new], SMALL)
        assert oracle.relative_error(got.out, want.out[new]) < EXACT
        np.testing.assert_array_equal(got.blocks, want.blocks[new])
        # A static cache: keys behind the last query are there, and not seen.
        got = oracle.forward(q[new], *whole[1:5], gates[new], SMALL, offset=begin)
        assert oracle.relative_error(got.out, want.out[new]) < EXACT
        np.testing.assert_array_equal(got.blocks, want.blocks[new])


def test_an_offset_per_row_is_each_row_alone(rng):
    problem = oracle.random_problem(rng, SMALL, 30, batch=2, num_queries=3)
    offsets = np.array([6, 22])
    together = oracle.forward(*problem, SMALL, offset=offsets)
    for b in range(2):
        row = oracle.Problem(*(x[b : b + 1] for x in problem))
        alone = oracle.forward(*row, SMALL, offset=int(offsets[b]))
        assert oracle.relative_error(together.out[b : b + 1], alone.out) < EXACT
        np.testing.assert_array_equal(together.blocks[b : b + 1], alone.blocks)


def test_permuting_heads_inside_a_group_permutes_the_output(rng):
    problem = oracle.random_problem(rng, SMALL, 40, group_size=3)
    order = [2, 0, 1, 4, 5, 3]
    moved = problem._replace(query=problem.query[:, order], gates=problem.gates[:, order])
    before, after = oracle.forward(*problem, SMALL), oracle.forward(*moved, SMALL)
    assert oracle.relative_error(after.out, before.out[:, order]) < EXACT
    np.testing.assert_array_equal(after.blocks, before.blocks)


def test_a_given_choice_is_used(rng):
    problem = oracle.random_problem(rng, SMALL, 20)
    chosen = oracle.forward(*problem, SMALL)
    again = oracle.forward(*problem, SMALL, blocks=chosen.blocks)
    np.testing.assert_array_equal(again.out, chosen.out)
    own_only = np.full_like(chosen.blocks, -1)
    own_only[..., 0] = np.arange(20) // 4
    other = oracle.forward(*problem, SMALL, blocks=own_only)
    own_block = np.arange(20)[:, None] // 4 == np.arange(20) // 4
    mask = (own_block & np.tri(20, dtype=bool))[None, None]
    want, *_ = oracle.branch(*problem[:3], mask, 8**-0.5)
    assert oracle.relative_error(other.outputs["selected"], want) < EXACT


def aligned(x, lengths, block):
    """Documents of (B, H, S, D) moved to the next multiples of l', with large numbers between."""
    ends = np.cumsum(lengths)
    pieces = []
    for start, end in zip(ends - lengths, ends, strict=True):
        gap = np.full((*x.shape[:2], -(end - start) % block, x.shape[3]), 7.0)
        pieces += [x[:, :, start:end], gap]
    return np.concatenate(pieces, axis=2)


@pytest.mark.parametrize(
    ("cfg", "lengths"),
    [(SMALL, [17, 1, 8, 3, 22]), (SMALL, [4]), (WIDE_BLOCKS, [20, 9, 31])],
)
def test_aligned_documents_are_each_document_alone(rng, cfg, lengths):
    block = cfg.select_block_size
    q, k, v, *_, gates = oracle.random_problem(rng, cfg, sum(lengths), batch=2)
    want = oracle.forward_documents(q, k, v, gates, cfg, lengths)
    alone = oracle.forward_each_document(q, k, v, gates, cfg, lengths)

    padded = [-(-length // block) * block for length in lengths]
    starts = np.cumsum(padded) - padded
    document_start = np.repeat(starts, padded)[None].repeat(2, axis=0)
    q, k, v, gates = (aligned(x, lengths, block) for x in (q, k, v, gates))
    ck, cv = oracle.compress_mean(k, cfg), oracle.compress_mean(v, cfg)
    got = oracle.forward(q, k, v, ck, cv, gates, cfg, document_start=document_start)

    kept = np.concatenate([start + np.arange(n) for start, n in zip(starts, lengths, strict=True)])
    assert oracle.relative_error(got.out[:, :, kept], want) < EXACT
    for start, length, document in zip(starts, lengths, alone, strict=True):
        blocks = got.blocks[:, :, start : start + length]
        own = np.where(blocks < 0, -1, blocks - start // block)
        np.testing.assert_array_equal(own, document.blocks)
    assert oracle.choice_excess(got.blocks, got.scores, cfg, 0, document_start) == 0.0


def test_an_empty_document_adds_nothing(rng):
    q, k, v, *_, gates = oracle.random_problem(rng, SMALL, 13)
    want = oracle.forward_documents(q, k, v, gates, SMALL, [6, 7])
    got = oracle.forward_documents(q, k, v, gates, SMALL, [0, 6, 0, 7])
    np.testing.assert_array_equal(got, want)


def test_documents_with_separate_sliding_keys(rng):
    q, k, v, *_, gates = oracle.random_problem(rng, SMALL, 13)
    gates[:] = [0, 0, 1]
    own = {"sliding_key": -k, "sliding_value": -v}
    got = oracle.forward_documents(q, k, v, gates, SMALL, [13], **own)
    want = oracle.forward_documents(q, -k, -v, gates, SMALL, [13])
    assert oracle.relative_error(got, want) < EXACT


@pytest.mark.parametrize(
    ("num_tokens", "count"), [(0, 0), (3, 0), (4, 1), (5, 1), (6, 2), (13, 5)]
)
def test_compress_mean_counts_whole_blocks(num_tokens, count):
    tokens = np.arange(num_tokens, dtype=float).reshape(1, 1, -1, 1)
    means = oracle.compress_mean(tokens, SMALL)[0, 0, :, 0]
    assert means.tolist() == [2 * i + 1.5 for i in range(count)]
    assert SMALL.num_compressed_blocks(num_tokens) == count


def test_relative_error():
    assert oracle.relative_error([3.0, 4.0], [3.0, 4.0]) == 0.0
    assert oracle.relative_error([3.0, 5.0], [3.0, 4.0]) == pytest.approx(0.2)
    assert oracle.relative_error([0.0], [0.0]) == 0.0
    assert oracle.relative_error([], []) == 0.0
    assert oracle.relative_error([1e-9], [0.0]) == math.inf
    assert oracle.relative_error([-math.inf, 1.0], [-math.inf, 1.0]) == 0.0
    assert oracle.relative_error([-math.inf, 1.0], [0.0, 1.0]) == math.inf
    assert oracle.relative_error([math.nan], [0.0]) == math.inf
    assert oracle.relative_error([math.nan], [math.nan]) == math.inf
    with pytest.raises(ValueError, match=r"got has shape \(1,\), want has \(2,\)"):
        oracle.relative_error([1.0], [1.0, 1.0])


def test_the_oracle_stands_alone():
    """It may not borrow from what it judges."""
    code = (
        "import sys, reference.oracle\n"
        "print(*{name.split('.')[0] for name in sys.modules} & {'torch', 'nsa_flex'})"
    )
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=here, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []
