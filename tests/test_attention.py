"""`nsa_attention` as a whole: the oracle, and the exactness properties of the definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nsa_flex import NSAAux, NSAConfig, align_packed, nsa_attention
from nsa_flex.attention import IMPLEMENTATIONS
from reference import oracle
from reference.accuracy import FLOAT32_LIMIT, assert_close, to_float64

SMALL = NSAConfig(
    compress_block_size=8,
    compress_stride=4,
    select_block_size=16,
    num_selected_blocks=4,
    window_size=20,
)
# Scores are float32 sums of probabilities: a swap of blocks closer than this is rounding.
CHOICE_ROUNDING = 1e-5


@st.composite
def configs(draw: st.DrawFn) -> NSAConfig:
    stride = draw(st.sampled_from([1, 2, 4]))
    block = stride * draw(st.integers(1, 3))
    initial, local = draw(st.integers(0, 2)), draw(st.integers(1, 3))
    return NSAConfig(
        compress_block_size=block,
        compress_stride=stride,
        select_block_size=stride * draw(st.integers(block // stride, 4)),
        num_selected_blocks=initial + local + draw(st.integers(0, 3)),
        num_initial_blocks=initial,
        num_local_blocks=local,
        window_size=draw(st.integers(1, 40)),
    )


def problem(
    config: NSAConfig,
    length: int,
    *,
    batch: int = 1,
    kv_heads: int = 2,
    group: int = 2,
    dims: tuple[int, int] = (8, 6),
    queries: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int | None = None,
) -> list[Tensor]:
    """q, k, v, compressed k and v (random, as a learned map's are) and gates."""
    seed = torch.randint(2**31, ()).item() if seed is None else seed
    arrays = oracle.random_problem(
        np.random.default_rng(seed),
        config,
        length,
        batch=batch,
        kv_heads=kv_heads,
        group_size=group,
        head_dim=dims[0],
        value_dim=dims[1],
        num_queries=queries,
        compression="random",
    )
    return [torch.from_numpy(x).to(device, dtype) for x in arrays]


def run(inputs: list[Tensor], config: NSAConfig, **options: Any) -> tuple[Tensor, NSAAux]:
    return nsa_attention(*inputs, config=config, return_aux=True, **options)


def check(inputs: list[Tensor], config: NSAConfig, call: Any = run, **options: Any) -> None:
    """Choice, values, log-sum-exps and gradients against the oracle, in float32."""
    for x in inputs:
        x.requires_grad_(True)
    out, aux = call(inputs, config, **options)
    arrays = [to_float64(x) for x in inputs]
    where = {
        "offset": options.get("query_offset"),
        "document_start": options.get("document_start"),
    }
    where = {k: v.cpu().numpy() if isinstance(v, Tensor) else v for k, v in where.items()}
    scores = oracle.forward(*arrays, config, **where).scores
    offset = (
        inputs[1].shape[2] - inputs[0].shape[2] if where["offset"] is None else where["offset"]
    )
    excess = oracle.choice_excess(
        aux.blocks.cpu(), scores, config, offset, where["document_start"]
    )
    assert excess <= CHOICE_ROUNDING
    want = oracle.forward(*arrays, config, blocks=aux.blocks.cpu().numpy(), **where)
    assert_close("output", out, want.out, None, torch.float32)
    for name, lse in aux.lse._asdict().items():
        assert_close(f"log-sum-exp of {name}", lse, want.lse[name], None, torch.float32)

    grad_out = torch.randn_like(out)
    grads = torch.autograd.grad(out, inputs, grad_out, allow_unused=True)
    want_grads = oracle.backward(
        *arrays, config, to_float64(grad_out), blocks=aux.blocks.cpu().numpy(), **where
    )
    least = 0.1 * float(grad_out.norm())
    names = ("query", "key", "value", "compressed_key", "compressed_value", "gates")
    for name, grad, x in zip(names, grads, inputs, strict=True):
        got = torch.zeros_like(x) if grad is None else grad
        assert_close(
            f"gradient of {name}", got, getattr(want_grads, name), None, torch.float32, least=least
        )


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 16, 17, 63, 64, 65, 150])
def test_lengths(length: int) -> None:
    check(problem(SMALL, length, batch=2), SMALL)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 8, 16])
def test_group_sizes(group: int) -> None:
    check(problem(SMALL, 70, group=group), SMALL)


@given(
    config=configs(),
    length=st.integers(1, 60),
    batch=st.integers(1, 2),
    group=st.integers(1, 4),
    data=st.data(),
)
def test_random_configs(
    config: NSAConfig, length: int, batch: int, group: int, data: st.DataObject
) -> None:
    queries = data.draw(st.integers(1, length))
    check(problem(config, length, batch=batch, group=group, queries=queries), config)


def test_offset_into_a_longer_cache() -> None:
    inputs = problem(SMALL, 90, batch=2, queries=10)
    check(inputs, SMALL, query_offset=41)
    check(inputs, SMALL, query_offset=torch.tensor([3, 77]))


@given(config=configs(), lengths=st.lists(st.integers(0, 25), min_size=1, max_size=4))
def test_packed_documents_are_each_alone(config: NSAConfig, lengths: list[int]) -> None:
    total = sum(lengths)
    if not total:
        return
    q, k, v, _, _, gates = problem(config, total)
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)])
    layout = align_packed(cu_seqlens, total, config)
    q_, k_, v_, gates_ = (layout.align(x) for x in (q, k, v, gates))
    ck, cv = (compress(x, config) for x in (k_, v_))
    out = nsa_attention(q_, k_, v_, ck, cv, gates_, config=config, document_start=layout.start)
    want = oracle.forward_documents(*(to_float64(x) for x in (q, k, v, gates)), config, lengths)
    assert oracle.relative_error(to_float64(layout.restore(out)), want) < FLOAT32_LIMIT


def compress(x: Tensor, config: NSAConfig) -> Tensor:
    return torch.from_numpy(oracle.compress_mean(to_float64(x), config)).to(x.dtype)


@given(config=configs(), length=st.integers(1, 60), seed=st.integers(0, 2**31))
def test_future_tokens_change_nothing(config: NSAConfig, length: int, seed: int) -> None:
    t = seed % length
    inputs = problem(config, length, seed=seed)
    for x in inputs:
        x.requires_grad_(True)
    changed = [x.detach().clone() for x in inputs]
    for x in changed[:3]:
        x[:, :, t + 1 :] = torch.randn_like(x[:, :, t + 1 :])
    seen = config.num_compressed_blocks(t + 1)  # blocks that end at t or before
    for x in changed[3:5]:
        x[:, :, seen:] = torch.randn_like(x[:, :, seen:])
    for x in changed:
        x.requires_grad_(True)
    out, aux = run(inputs, config)
    other, other_aux = run(changed, config)
    assert torch.equal(aux.blocks[:, :, : t + 1], other_aux.blocks[:, :, : t + 1])
    torch.testing.assert_close(out[:, :, : t + 1], other[:, :, : t + 1], rtol=1e-5, atol=1e-6)
    grads = torch.autograd.grad(out[:, :, : t + 1].sum(), inputs, allow_unused=True)
    others = torch.autograd.grad(other[:, :, : t + 1].sum(), changed, allow_unused=True)
    for grad, other_grad in zip(grads, others, strict=True):
        torch.testing.assert_close(grad, other_grad, rtol=1e-4, atol=1e-5)


@given(config=configs(), length=st.integers(2, 60), seed=st.integers(0, 2**31))
def test_chunks_give_what_the_whole_gives(config: NSAConfig, length: int, seed: int) -> None:
    q, k, v, ck, cv, gates = problem(config, length, batch=2, seed=seed)
    out, aux = run([q, k, v, ck, cv, gates], config)
    cut = 1 + seed % (length - 1)
    for start, stop in ((0, cut), (cut, length)):
        n = config.num_compressed_blocks(stop)
        chunk = [
            q[:, :, start:stop],
            k[:, :, :stop],
            v[:, :, :stop],
            ck[:, :, :n],
            cv[:, :, :n],
            gates[:, :, start:stop],
        ]
        part, part_aux = run(chunk, config)
        assert torch.equal(part_aux.blocks, aux.blocks[:, :, start:stop])
        torch.testing.assert_close(part, out[:, :, start:stop], rtol=1e-5, atol=1e-6)


@given(config=configs(), length=st.integers(1, 50), group=st.integers(1, 4))
def test_order_of_heads_inside_a_group(config: NSAConfig, length: int, group: int) -> None:
    inputs = problem(config, length, group=group)
    order = torch.cat([torch.randperm(group), group + torch.randperm(group)])
    q, k, v, ck, cv, gates = inputs
    out, aux = run(inputs, config)
    other, other_aux = run([q[:, order], k, v, ck, cv, gates[:, order]], config)
    torch.testing.assert_close(other, out[:, order], rtol=1e-5, atol=1e-6)
    if not torch.equal(aux.blocks, other_aux.blocks):  # only another order of summation
        scores = oracle.forward(*(to_float64(x) for x in inputs), config).scores
        assert oracle.choice_excess(other_aux.blocks, scores, config) <= CHOICE_ROUNDING


def test_a_row_of_the_batch_is_as_alone() -> None:
    inputs = problem(SMALL, 77, batch=3)
    out, aux = run(inputs, SMALL)
    for b in range(3):
        alone, alone_aux = run([x[b : b + 1] for x in inputs], SMALL)
        torch.testing.assert_close(alone, out[b : b + 1], rtol=1e-5, atol=1e-6)
        assert torch.equal(alone_aux.blocks, aux.blocks[b : b + 1])


@pytest.mark.parametrize(("branch", "length"), [(1, 64), (1, 63), (2, 20), (2, 5)])
def test_dense_attention_while_everything_fits(branch: int, length: int) -> None:
    """n * l' = 64 tokens of chosen blocks, a window of 20."""
    q, k, v, ck, cv, gates = problem(SMALL, length)
    gates = torch.zeros_like(gates)
    gates[..., branch] = 1.0
    out = nsa_attention(q, k, v, ck, cv, gates, config=SMALL)
    want = oracle.dense_causal(*(to_float64(x) for x in (q, k, v)))
    assert oracle.relative_error(to_float64(out), want) < FLOAT32_LIMIT


def test_separate_keys_and_values_of_the_sliding_branch() -> None:
    q, k, v, ck, cv, gates = (x.requires_grad_(True) for x in problem(SMALL, 60))
    sk, sv = (torch.randn_like(x).requires_grad_(True) for x in (k, v))
    out = nsa_attention(
        q, k, v, ck, cv, gates, config=SMALL, sliding_key=sk, sliding_value=sv, scale=0.3
    )
    arrays = [to_float64(x) for x in (q, k, v, ck, cv, gates)]
    options = {"scale": 0.3, "sliding_key": to_float64(sk), "sliding_value": to_float64(sv)}
    want = oracle.forward(*arrays, SMALL, **options)
    assert oracle.relative_error(to_float64(out), want.out) < FLOAT32_LIMIT
    grad_out = torch.randn_like(out)
    grads = torch.autograd.grad(out, (k, v, sk, sv), grad_out)
    wants = oracle.backward(*arrays, SMALL, to_float64(grad_out), **options)
    for name, grad in zip(("key", "value", "sliding_key", "sliding_value"), grads, strict=True):
        assert oracle.relative_error(to_float64(grad), getattr(wants, name)) < FLOAT32_LIMIT


def test_float64_gradients() -> None:
    inputs = problem(SMALL, 21, dtype=torch.float64, dims=(4, 3))
    for x in inputs:
        x.requires_grad_(True)
    assert torch.autograd.gradcheck(lambda *xs: nsa_attention(*xs, config=SMALL), inputs)


def test_log_sum_exps_carry_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of a backend either that would let them."""
    dense = IMPLEMENTATIONS["dense", "sliding"]

    def leaking(branch: Any) -> tuple[Tensor, Tensor | None]:
        out, lse = dense(branch)
        return out, lse + branch.query.sum()

    monkeypatch.setitem(IMPLEMENTATIONS, ("dense", "sliding"), leaking)
    config = NSAConfig(8, 4, 8, 4, window_size=12)
    inputs = [x.requires_grad_() for x in problem(config, 40)]
    out, aux = run(inputs, config, backend="dense")
    assert out.requires_grad
    assert not any(lse.requires_grad for lse in aux.lse)


def test_any_strides() -> None:
    inputs = problem(SMALL, 50, batch=2)
    out = nsa_attention(*inputs, config=SMALL)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    padded = [torch.randn(*x.shape[:3], x.shape[3] + 3)[..., 1:-2].copy_(x) for x in inputs]
    torch.testing.assert_close(nsa_attention(*strided, config=SMALL), out)
    torch.testing.assert_close(nsa_attention(*padded, config=SMALL), out)


def test_nan_in_the_future_stays_there() -> None:
    q, k, v, ck, cv, gates = problem(SMALL, 40)
    out = nsa_attention(q, k, v, ck, cv, gates, config=SMALL)
    q[:, :, 30:] = float("nan")
    other = nsa_attention(q, k, v, ck, cv, gates, config=SMALL)
    assert torch.equal(other[:, :, :30], out[:, :, :30])
    assert other[:, :, 30:].isnan().all()


@pytest.mark.kept(lambda dynamic: dynamic)
@pytest.mark.parametrize(("dynamic", "backend"), [(False, "inductor"), (True, "aot_eager")])
def test_compiled_equals_eager(dynamic: bool, backend: str) -> None:
    """Generated code of symbolic lengths, minutes of C++, is held to eager on CUDA alone."""
    compiled = torch.compile(nsa_attention, fullgraph=True, dynamic=dynamic, backend=backend)
    for length in (60, 85) if dynamic else (60,):
        inputs = problem(SMALL, length, batch=2)
        check(inputs, SMALL, lambda xs, c: compiled(*xs, config=c, return_aux=True))


def test_autocast_takes_mixed_gates() -> None:
    """Gates may keep float32 beside bf16 queries."""
    *tensors, gates = problem(SMALL, 40)
    half = [x.bfloat16() for x in tensors]
    out = nsa_attention(*half, gates, config=SMALL)
    assert out.dtype == torch.bfloat16


def twice_as_long(x: Tensor) -> Tensor:
    return x.repeat(1, 1, 2, 1)


def bad(**changes: Any) -> dict[str, Any]:
    names = ("query", "key", "value", "compressed_key", "compressed_value", "gates")
    arguments: dict[str, Any] = dict(zip(names, problem(SMALL, 40), strict=True))
    arguments["config"] = SMALL
    for name, change in changes.items():
        arguments[name] = change(arguments[name]) if callable(change) else change
    return arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (bad(query=lambda x: x[0]), r"query must be 4-D \(B, H, S, D\), got \(4, 40, 8\)"),
        (bad(query=lambda x: x[:, :3]), "key has 2 heads; query's 3 must be a multiple of it"),
        (
            bad(query=lambda x: x[..., :7]),
            r"key has shape \(1, 2, 40, 8\); expected",
        ),
        (bad(value=lambda x: x[:, :, 1:]), r"value has shape \(1, 2, 39, 6\)"),
        (bad(compressed_key=lambda x: x[:, :, 1:]), r"compressed_key has shape \(1, 2, 8, 8\)"),
        (bad(compressed_value=lambda x: x[:, :1]), r"compressed_value has shape \(1, 1, 9, 6\)"),
        (bad(gates=lambda x: x[..., :2]), r"gates has shape \(1, 4, 40, 2\)"),
        (bad(gates=lambda x: x.int()), "gates must be floating point, got torch.int32"),
        (bad(key=lambda x: x.half()), "key is torch.float16, query torch.float32: cast one"),
        (bad(query=lambda x: x.to("meta")), "key is on cpu, query on meta: move one"),
        (bad(query=lambda x: x[:, :, :0]), r"query \(1, 4, 0, 8\) and key .* must not be empty"),
        (bad(key=lambda x: x[:, :, :30]), "query has 40 tokens, key only 30|expected"),
        (bad(query_offset=1), "query_offset=1 with 40 queries leaves the 40 keys"),
        (bad(query_offset=-1), "query_offset=-1 with 40 queries leaves"),
        (bad(query_offset=torch.zeros(2)), r"query_offset must be an int or int \(1,\)"),
        (
            bad(query_offset=torch.zeros(1).int(), query=twice_as_long, gates=twice_as_long),
            "query has 80 tokens, key only 40",
        ),
        (bad(document_start=torch.zeros(1, 3)), r"document_start must be int \(1, 40\)"),
        (bad(max_document_length=40), "max_document_length=40 was given without document_start"),
        (
            bad(max_document_length=0, document_start=torch.zeros(1, 40).int()),
            "max_document_length=0 must be at least 1",
        ),
        (bad(sliding_key=torch.zeros(1, 2, 40, 8)), "must be given together"),
        (bad(scale=0.0), r"scale is 0.0; it must be positive"),
        (bad(scale=float("nan")), r"scale is nan; it must be positive and finite"),
        (bad(scale=float("inf")), r"scale is inf; it must be positive and finite"),
        (bad(query_offset=torch.tensor([True])), r"query_offset must be an int or int \(1,\)"),
        (bad(query_offset=torch.zeros(1).to("meta")), "query_offset is on meta, query on cpu"),
        (bad(document_start=torch.zeros(1, 40).bool()), r"document_start must be int \(1, 40\)"),
        (bad(document_start=torch.zeros(1, 40, device="meta")), "document_start is on meta"),
        (bad(backend="flash"), "backend is 'flash'; it must be one of auto, dense"),
        (bad(backend=3), "backend is 3; it must be one of auto, .*, or a mapping from branches"),
        (bad(backend={"window": "flex"}), r"backend names branches \['window'\]"),
        (
            bad(backend={"selected": "fa2"}),
            "backend 'fa2' has no selected branch; dense, flex, triton have",
        ),
        (bad(backend="fa2"), "cannot compute the compressed branch: it needs a CUDA device"),
        (bad(backend="triton"), "cannot compute the compressed branch: it needs a CUDA device"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value[:40],
)
def test_errors_name_what_is_wrong(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nsa_attention(**arguments)


def test_wrong_types() -> None:
    with pytest.raises(TypeError, match="config must be an NSAConfig, got dict"):
        nsa_attention(**bad(config={}))
    with pytest.raises(TypeError, match="max_document_length must be an int or None, got Tensor"):
        nsa_attention(**bad(max_document_length=torch.tensor(40)))
    with pytest.raises(TypeError, match="key must be a Tensor, got NoneType"):
        nsa_attention(**bad(key=None))
    for offset in (3.5, True, "3", [3]):
        with pytest.raises(TypeError, match="query_offset must be an int or an int Tensor, got"):
            nsa_attention(**bad(query_offset=offset))
    given = bad()
    given["query"], given["gates"] = given["query"][:, :, 4:], given["gates"][:, :, 4:]
    taken = [nsa_attention(**given, query_offset=offset) for offset in (4, np.int64(4))]
    assert torch.equal(*taken)
    with pytest.raises(TypeError, match="document_start must be a Tensor, got list"):
        nsa_attention(**bad(document_start=[0] * 40))


def test_half_precision_products_that_only_the_scale_brings_into_range() -> None:
    """float16 ends at 65504: a product of keys and queries may not, where a softmax is sharp."""
    query, key, value, compressed_key, *others = problem(SMALL, 40)
    query, key, compressed_key = (200 * x for x in (query, key, compressed_key))
    half = [x.half() for x in (query, key, value, compressed_key, *others)]
    expected = nsa_attention(*[x.double() for x in half], config=SMALL)
    found = nsa_attention(*half, config=SMALL)
    assert (query.unflatten(1, (2, -1)) @ key[:, :, None].mT).abs().max() > 65504
    torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=0.02)


def test_explicit_flex_refuses_training_on_cpu() -> None:
    arguments = bad(query=lambda x: x.requires_grad_(True), backend="flex")
    with pytest.raises(ValueError, match="FlexAttention has no backward on CPU"):
        nsa_attention(**arguments)
