"""What claims to run on CUDA, run there: the function, the module, patched models, long rows."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nsa_flex import NSAAttention, NSAConfig, explain, nsa_attention, patch
from nsa_flex.compression import what_is_read
from nsa_flex.dispatch import BRANCHES
from nsa_flex.masks import (
    compressed_mask_mod,
    materialize,
    selected_mask_mod,
    sliding_mask_mod,
)
from reference import oracle
from reference.accuracy import assert_close, eager_attention, leaf, to_float64
from reference.launches import SUBSETS
from reference.modes import deterministic_algorithms

pytestmark = pytest.mark.gpu

PAPER = NSAConfig(compression="mlp")
SMALL = NSAConfig(8, 4, 16, 4, window_size=20, compression="mlp")
NARROW = NSAConfig(select_block_size=32, num_selected_blocks=8, window_size=100, compression="mlp")
WIDE = NSAConfig(64, 32, 128, 5, window_size=200, compression="mlp")
MANY = NSAConfig(8, 4, 16, 64, window_size=50, compression="mlp")
RECALL = NSAConfig(8, 8, 32, 32, num_local_blocks=4)  # what the guide names for recall
NAMES = ("query", "key", "value", "compressed_key", "compressed_value", "gates")
# Blocks whose group scores are this close may be swapped: float32 sums of G probabilities.
CHOICE_ROUNDING = 1e-4

# D, Dv, G, dtype, config, S, batch
WHOLE = [
    (64, 64, 4, torch.bfloat16, PAPER, 1100, 2),
    (128, 128, 8, torch.float16, PAPER, 777, 1),
    (192, 128, 2, torch.bfloat16, PAPER, 333, 1),
    (32, 32, 16, torch.bfloat16, SMALL, 150, 2),
    (80, 80, 3, torch.float16, SMALL, 65, 1),
    (64, 64, 1, torch.float32, PAPER, 400, 1),
    (64, 64, 4, torch.bfloat16, PAPER, 1, 2),
    (64, 64, 4, torch.bfloat16, PAPER, 31, 2),
    (192, 128, 2, torch.bfloat16, PAPER, 50, 2),
    (96, 96, 6, torch.bfloat16, NARROW, 300, 1),
    (128, 128, 12, torch.float16, WIDE, 700, 1),
    (128, 128, 32, torch.bfloat16, PAPER, 300, 1),
    (64, 64, 2, torch.bfloat16, MANY, 1100, 1),
    (64, 64, 2, torch.bfloat16, RECALL, 1300, 2),
    (128, 128, 8, torch.bfloat16, RECALL, 1250, 1),
]


def eager_nsa(inputs: list[Tensor], blocks: Tensor, config: NSAConfig) -> Tensor:
    """The function as one writes it in PyTorch, every step in the inputs' dtype."""
    q, k, v, ck, cv, gates = inputs
    size = q.shape[2], k.shape[2]
    masks = (
        materialize(compressed_mask_mod(config), 1, 1, size[0], ck.shape[2], q.device),
        materialize(selected_mask_mod(config, blocks), *blocks.shape[:2], *size, q.device),
        materialize(sliding_mask_mod(config), 1, 1, *size, q.device),
    )
    scale = q.shape[-1] ** -0.5
    outs = [
        eager_attention(q, *kv, mask, scale)
        for kv, mask in zip(((ck, cv), (k, v), (k, v)), masks, strict=True)
    ]
    return sum(out * gates[..., c, None] for c, out in enumerate(outs))  # type: ignore[return-value]


# Every shape runs on what `auto` takes, some of them compiled: bfloat16 on the core operator, its
# widest head dims, and a small configuration. The other backends run where the function around
# them differs; test_backends.py has them on every shape.
COMPILED = (WHOLE[0], WHOLE[2], WHOLE[3])
CALLS = [
    *((shape, "auto", shape in COMPILED) for shape in WHOLE),
    (WHOLE[6], "flex", False),
    (WHOLE[0], "flex", True),
    (WHOLE[1], "fa2", False),
    (WHOLE[6], "fa2", False),
]


def name_of(call: tuple[tuple[Any, ...], str, bool]) -> str:
    (dim, value_dim, group, _, _, length, batch), backend, compiled = call
    mode = "compiled" if compiled else "eager"
    return f"{backend}-{mode}-D{dim}-{value_dim}-G{group}-S{length}-B{batch}"


@pytest.mark.long
@pytest.mark.parametrize("case", CALLS, ids=name_of)
def test_whole_function(case: tuple[tuple[Any, ...], str, bool]) -> None:
    shape, backend, compiled = case
    _, _, _, dtype, config, _, _ = shape
    inputs = problem(shape)
    call = nsa_attention
    if compiled:  # of this shape alone: other cases here would make theirs symbols of the graph
        torch._dynamo.reset()
        call = torch.compile(nsa_attention, fullgraph=True)
    out, aux = call(*inputs, config=config, backend=backend, return_aux=True)
    arrays = [to_float64(x) for x in inputs]
    scores = oracle.forward(*arrays, config).scores
    assert oracle.choice_excess(aux.blocks.cpu(), scores, config) <= CHOICE_ROUNDING

    blocks = aux.blocks.cpu().numpy()
    want = oracle.forward(*arrays, config, blocks=blocks)
    base = eager_nsa(inputs, aux.blocks, config)
    assert_close("output", out, want.out, base, dtype)
    grad_out = torch.randn_like(out)
    want_grads = oracle.backward(*arrays, config, to_float64(grad_out), blocks=blocks)
    grads, base_grads = (
        torch.autograd.grad(x, inputs, grad_out, allow_unused=True) for x in (out, base)
    )
    least = 0.1 * float(grad_out.float().norm())
    for name, grad, base_grad, x in zip(NAMES, grads, base_grads, inputs, strict=True):
        got, eager = (torch.zeros_like(x) if g is None else g for g in (grad, base_grad))
        want_grad = getattr(want_grads, name)
        assert_close(f"gradient of {name}", got, want_grad, eager, dtype, least=least)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("offset", [0, 384])
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("documents", [False, True])
def test_documents_and_offsets_run_on_the_kernels(
    dtype: torch.dtype, offset: int, on_device: bool, documents: bool
) -> None:
    shape = (64, 64, 4, dtype, PAPER, 800 + offset, 2)
    query, *others, gates = problem(shape)
    inputs = [query[:, :, offset:].detach().requires_grad_(), *others]
    inputs.append(gates[:, :, offset:].detach().requires_grad_())
    starts = np.searchsorted([64, 64, 704, 768], np.arange(offset, 800 + offset), side="right")
    starts = np.array([0, 64, 64, 704, 768])[starts][None].repeat(2, 0)  # an empty one, one of 64
    place: dict[str, Any] = {"document_start": starts} if documents else {}
    given = {k: torch.from_numpy(v).int().cuda() for k, v in place.items()}
    told_offset = torch.full((2,), offset, device="cuda") if on_device else offset
    told = explain(inputs[0], inputs[1], query_offset=told_offset, needs_grad=True, **given)
    if on_device or offset or documents:
        assert {told[branch].backend for branch in BRANCHES} == {"triton"}
    out, aux = nsa_attention(
        *inputs, config=PAPER, query_offset=told_offset, return_aux=True, **given
    )
    arrays = [to_float64(x) for x in inputs]
    scores = oracle.forward(*arrays, PAPER, offset=offset, **place).scores
    blocks = aux.blocks.cpu().numpy()
    assert oracle.choice_excess(blocks, scores, PAPER, offset, **place) <= CHOICE_ROUNDING
    want = oracle.forward(*arrays, PAPER, offset=offset, blocks=blocks, **place)
    plain = eager_with_masks(inputs, blocks, offset, place.get("document_start"))
    assert_close("output", out, want.out, plain, dtype)
    grad_out = torch.randn_like(out)
    want_grads = oracle.backward(
        *arrays, PAPER, to_float64(grad_out), offset=offset, blocks=blocks, **place
    )
    grads, base = (torch.autograd.grad(x, inputs, grad_out) for x in (out, plain))
    least = 0.1 * float(grad_out.float().norm())
    for name, grad, plain_grad in zip(NAMES, grads, base, strict=True):
        exact = getattr(want_grads, name)
        assert_close(f"gradient of {name}", grad, exact, plain_grad, dtype, least=least)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("queries", "offset"), [(1, 799), (16, 500), (7, (3, 600))])
@pytest.mark.parametrize("compiled", [False, True])
def test_few_queries_run_on_the_decode_kernels(
    dtype: torch.dtype, queries: int, offset: Any, compiled: bool
) -> None:
    query, *others, gates = (x.detach() for x in problem((64, 64, 4, dtype, PAPER, 800, 2)))
    inputs = [query[:, :, :queries], *others, gates[:, :, :queries]]
    place = offset if isinstance(offset, int) else torch.tensor(offset, device="cuda")
    told = explain(*inputs[:3], query_offset=place)
    assert {run.stage for run in told.kernels.forward} == {"decode"}
    call = torch.compile(nsa_attention, fullgraph=True) if compiled else nsa_attention
    options: dict[str, Any] = {"config": PAPER, "query_offset": place, "return_aux": True}
    out, aux = call(*inputs, **options)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        call(*inputs, **options)
        torch.cuda.synchronize()
    assert any(event.name.startswith("decode_combine") for event in profiler.events())
    arrays, blocks = [to_float64(x) for x in inputs], aux.blocks.cpu().numpy()
    scores = oracle.forward(*arrays, PAPER, offset=offset).scores
    assert oracle.choice_excess(blocks, scores, PAPER, offset) <= CHOICE_ROUNDING
    want = oracle.forward(*arrays, PAPER, offset=offset, blocks=blocks)
    assert_close("output", out, want.out, eager_with_masks(inputs, blocks, offset, None), dtype)


@pytest.mark.parametrize("branches", SUBSETS, ids="+".join)
def test_few_queries_of_some_branches_run_on_the_decode_kernels(branches: Any) -> None:
    dtype, offset = torch.bfloat16, 600
    query, *others, gates = (x.detach() for x in problem((64, 64, 4, dtype, PAPER, 800, 2)))
    query, gates = query[:, :, :7], gates[:, :, :7]
    there = [BRANCHES.index(name) for name in branches]
    muted = torch.zeros_like(gates)
    muted[..., there] = gates[..., there]
    config = dataclasses.replace(PAPER, branches=branches)
    given = (query, *others[:2], *what_is_read(config, *others[2:]), gates[..., there])
    options: dict[str, Any] = {"config": config, "query_offset": offset, "return_aux": True}
    nsa_attention(*given, **options)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        out, aux = nsa_attention(*given, **options)
        torch.cuda.synchronize()
    assert any(event.name.startswith("decode_combine") for event in profiler.events())
    inputs = [query, *others, muted]
    arrays = [to_float64(x) for x in inputs]
    own = oracle.forward(*arrays, PAPER, offset=offset)
    blocks = own.blocks if aux.blocks is None else aux.blocks.cpu().numpy()
    assert oracle.choice_excess(blocks, own.scores, PAPER, offset) <= CHOICE_ROUNDING
    want = oracle.forward(*arrays, PAPER, offset=offset, blocks=blocks)
    assert_close("output", out, want.out, eager_with_masks(inputs, blocks, offset, None), dtype)


def eager_with_masks(
    inputs: list[Tensor], blocks: np.ndarray, offset: Any, starts: np.ndarray | None
) -> Tensor:
    """`eager_nsa` with the oracle's masks."""
    q, k, v, ck, cv, gates = inputs
    size = (q.shape[2], k.shape[2])
    masks = (
        oracle.compressed_mask(*size, ck.shape[2], PAPER, offset, starts),
        oracle.selected_mask(blocks, size[1], PAPER, offset, starts),
        oracle.sliding_mask(*size, PAPER, offset, starts),
    )
    outs = [
        eager_attention(q, *kv, torch.from_numpy(mask).cuda(), q.shape[-1] ** -0.5)
        for kv, mask in zip(((ck, cv), (k, v), (k, v)), masks, strict=True)
    ]
    return sum(out * gates[..., c, None] for c, out in enumerate(outs))  # type: ignore[return-value]


def problem(shape: tuple[Any, ...]) -> list[Tensor]:
    dim, value_dim, group, dtype, config, length, batch = shape
    blocks = max(1, config.num_compressed_blocks(length))
    heads, kv_heads = 2 * group, 2
    sizes = [
        (heads, length, dim),
        (kv_heads, length, dim),
        (kv_heads, length, value_dim),
        (kv_heads, blocks, dim),
        (kv_heads, blocks, value_dim),
    ]
    tensors = [leaf((batch, *size), dtype, "cuda") for size in sizes]
    gates = torch.rand(batch, heads, length, 3, device="cuda").to(dtype).requires_grad_(True)
    return [*tensors, gates]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["mean", "weighted", "linear", "mlp"])
def test_module_in_bfloat16(kind: str) -> None:
    """The compiled module against itself in float64 on the CPU; eager bf16 sets the allowance."""
    # So many blocks that all are chosen: bf16 scores would move some choices.
    config = NSAConfig(8, 4, 16, 16, window_size=20, compression=kind)
    exact = NSAAttention(128, 8, 2, config=config, backend="dense").double()
    for parameter in exact.parameters():
        torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    layer = copy.deepcopy(exact).to("cuda", torch.bfloat16)
    exact.load_state_dict({k: v.double().cpu() for k, v in layer.state_dict().items()})
    baseline = copy.deepcopy(layer)
    layer.backend = "auto"
    x = torch.randn(2, 150, 128, device="cuda", dtype=torch.bfloat16)
    grad_out = torch.randn_like(x)
    want = exact(x.double().cpu())
    want.backward(grad_out.double().cpu())
    got = torch.compile(layer, fullgraph=True)(x)
    got.backward(grad_out)
    base = baseline(x)
    base.backward(grad_out)
    error = oracle.relative_error(to_float64(got), to_float64(want))
    allowed = 2 * oracle.relative_error(to_float64(base), to_float64(want)) + 2**-8
    assert error <= allowed
    for name, parameter in layer.named_parameters():
        assert parameter.grad.any(), f"{name} got no gradient"
    # By submodule: the key's position embedding alone has a gradient that is all cancellation, for
    # what it adds to every key alike the softmax does not see.
    for name, part in layer.named_children():
        want_grad = gradient_of(exact.get_submodule(name))
        if want_grad.size:
            error = oracle.relative_error(gradient_of(part), want_grad)
            base_grad = gradient_of(baseline.get_submodule(name))
            allowed = 2 * oracle.relative_error(base_grad, want_grad) + 2**-8
            assert error <= allowed, f"gradient of {name}: {error:.1e}, allowed {allowed:.1e}"


def gradient_of(module: torch.nn.Module) -> np.ndarray[Any, Any]:
    """Every parameter's gradient, end to end."""
    grads = [to_float64(parameter.grad).ravel() for parameter in module.parameters()]
    return np.concatenate(grads) if grads else np.empty(0)


def tiny_llama(**changes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 97,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | changes)).cuda()


@pytest.mark.long
def test_patched_model_is_the_dense_one_on_short_rows() -> None:
    model = tiny_llama().eval()
    ids = torch.randint(2, 97, (2, 64), device="cuda")
    with torch.no_grad():
        want = model(ids).logits
        patch(model, SMALL, init="dense")
        got = model(ids).logits
        compiled = torch.compile(model, fullgraph=True)(ids).logits
    assert oracle.relative_error(to_float64(got), to_float64(want)) < 1e-5
    assert oracle.relative_error(to_float64(compiled), to_float64(want)) < 1e-5


@pytest.mark.long
def test_patched_model_trains_compiled_in_bfloat16() -> None:
    model = patch(tiny_llama(num_hidden_layers=1).bfloat16(), SMALL)
    ids = torch.randint(2, 97, (2, 200), device="cuda")
    compiled = torch.compile(model, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(8):
        loss = compiled(ids, labels=ids, use_cache=False).loss
        loss.backward()
        if step == 0:
            for name, parameter in model.named_parameters():
                if ".nsa." in name:
                    assert parameter.grad is not None, name
                    assert parameter.grad.any(), name
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    assert torch.stack(losses).isfinite().all()
    assert losses[-1] < losses[0] - 0.3


def test_patched_model_without_launch_plans() -> None:
    """Gradients and generated tokens are those of a model that replays plans."""
    from nsa_flex.fallback_kernels.launch import plans

    model = patch(tiny_llama().bfloat16(), SMALL)
    ids = torch.randint(2, 97, (2, 200), device="cuda")

    def run() -> list[Tensor]:
        loss = model(ids, labels=ids, use_cache=False).loss
        grads = torch.autograd.grad(loss, [x for x in model.parameters() if x.requires_grad])
        out = model.generate(ids[:, :60], max_new_tokens=20, do_sample=False)
        return [loss, *grads, out]

    plans.forget_plans()
    with deterministic_algorithms(warn_only=True):
        for _ in range(2):
            run()
        before = [(each, each.replayed) for each in plans._all_plans]
        expected = run()
        assert any(each.replayed > count for each, count in before), plans.plan_problems()
        before = [(each, each.replayed) for each in plans._all_plans]
        with plans.without_plans():
            found = run()
    assert all(each.replayed == count for each, count in before)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("padding", [0, 5])
def test_generate_with_a_cache_is_the_full_pass(padding: int) -> None:
    model = patch(tiny_llama().eval(), SMALL)
    for name, parameter in model.named_parameters():
        if ".nsa." in name:
            torch.nn.init.normal_(parameter, std=0.1)
    ids = torch.randint(2, 97, (2, 60), device="cuda")
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    with torch.no_grad():
        out = model.generate(ids, attention_mask=mask, max_new_tokens=40, do_sample=False)
        full = torch.nn.functional.pad(mask, (0, out.shape[1] - mask.shape[1]), value=1)
        # The positions that `generate` counts: keys are compressed as they are rotated.
        positions = (full.cumsum(-1) - 1).clamp(min=0)
        logits = model(out, attention_mask=full, position_ids=positions).logits
    # Greedy up to rounding: the token taken is the best of the full pass, or as good.
    best = logits[:, 59:-1].max(-1).values
    taken = logits[:, 59:-1].gather(-1, out[:, 60:, None])[..., 0]
    assert (best - taken).max() < 1e-3


@pytest.mark.large
@pytest.mark.parametrize("backend", ["auto", "flex"])
def test_offsets_past_two_to_the_31(backend: str) -> None:
    """64 heads of 128 over 2^18 tokens and some: sampled rows, the last ones among them."""
    length, heads, kv_heads, dim = 2**18 + 77, 64, 2, 128
    assert length * heads * dim > 2**31
    config = PAPER

    def tensor(h: int, s: int) -> Tensor:
        return torch.randn(1, s, h, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)

    q, k, v = tensor(heads, length), tensor(kv_heads, length), tensor(kv_heads, length)
    blocks = config.num_compressed_blocks(length)
    ck, cv = tensor(kv_heads, blocks), tensor(kv_heads, blocks)
    gates = torch.rand(1, heads, length, 3, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        out, aux = nsa_attention(
            q, k, v, ck, cv, gates, config=config, backend=backend, return_aux=True
        )
    rows = [0, 31, 63, 64, 4096, 2**17 + 5, 2**18 - 1, 2**18, 2**18 + 1, length - 1]
    for t in rows:
        want = row_of(q, k, v, ck, cv, gates, aux.blocks, t, config)
        error = oracle.relative_error(to_float64(out[0, :, t]), want)
        assert error < 2**-7, f"row {t}: {error:.1e}"


@pytest.mark.large
def test_documents_past_two_to_the_31() -> None:
    """The last of three documents, all of it behind 2^31 elements, as if it were alone."""
    last, heads, kv_heads, dim = 2**18, 64, 2, 128
    length = last + 5003
    assert last * heads * dim >= 2**31

    def tensor(h: int, s: int) -> Tensor:
        return leaf((1, h, s, dim), torch.bfloat16, "cuda")

    q, k, v = tensor(heads, length), tensor(kv_heads, length), tensor(kv_heads, length)
    blocks = PAPER.num_compressed_blocks(length)
    ck, cv = tensor(kv_heads, blocks), tensor(kv_heads, blocks)
    gates = torch.rand(1, length, heads, 3, device="cuda", dtype=torch.bfloat16)
    gates = gates.transpose(1, 2).requires_grad_()
    starts = torch.arange(length, device="cuda", dtype=torch.int32)[None]
    starts = torch.where(starts < last, starts // 2**17 * 2**17, last)
    inputs = [q, k, v, ck, cv, gates]
    out = nsa_attention(*inputs, config=PAPER, document_start=starts)
    grad_out = torch.zeros_like(out)
    grad_out[:, :, last:] = torch.randn_like(out[:, :, last:])
    grads = torch.autograd.grad(out, inputs, grad_out)
    firsts = [last, last, last, last // 16, last // 16, last]  # of tokens and compressed blocks
    alone = [
        x.detach()[:, :, n:].clone().requires_grad_() for x, n in zip(inputs, firsts, strict=True)
    ]
    # With `document_start`, the kernels are those of documents here too.
    want = nsa_attention(*alone, config=PAPER, document_start=starts[:, last:] - last)
    want_grads = torch.autograd.grad(want, alone, grad_out[:, :, last:])
    cut = [x[:, :, n:] for x, n in zip(grads, firsts, strict=True)]
    for name, x, y in zip(
        ("out", *NAMES), (out[:, :, last:], *cut), (want, *want_grads), strict=True
    ):
        assert float((x - y).float().norm() / y.float().norm()) < 2**-7, name
    for name, x, n in zip(NAMES, grads, firsts, strict=True):
        assert not x[:, :, :n].any(), f"{name}: another document has a gradient"


def row_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ck: Tensor,
    cv: Tensor,
    gates: Tensor,
    blocks: Tensor,
    t: int,
    config: NSAConfig,
) -> np.ndarray[Any, Any]:
    """One query of every head by the definition, float64."""
    group, size = q.shape[1] // k.shape[1], config.select_block_size
    ends = torch.arange(config.num_compressed_blocks(t + 1), device=q.device)
    window = torch.arange(max(0, t - config.window_size + 1), t + 1, device=q.device)
    out = torch.zeros(k.shape[1], group, v.shape[-1], dtype=torch.float64, device=q.device)
    for kv in range(k.shape[1]):
        chosen = blocks[0, kv, t].long()
        tokens = (chosen[chosen >= 0, None] * size + torch.arange(size, device=q.device)).flatten()
        heads = slice(kv * group, (kv + 1) * group)
        branches = ((ck, cv, ends), (k, v, tokens[tokens <= t]), (k, v, window))
        for c, (keys, values, seen) in enumerate(branches):
            logits = q[0, heads, t].double() @ keys[0, kv, seen].double().mT * q.shape[-1] ** -0.5
            branch = logits.softmax(-1) @ values[0, kv, seen].double()  # 0 where nothing is seen
            out[kv] += gates[0, heads, t, c, None].double() * branch
    return to_float64(out.flatten(0, 1))


def test_twice_the_same() -> None:
    """What is right once and not again is a race."""
    inputs = problem((64, 64, 4, torch.bfloat16, PAPER, 3000, 2))
    first, aux = nsa_attention(*inputs, config=PAPER, return_aux=True)
    again, again_aux = nsa_attention(*inputs, config=PAPER, return_aux=True)
    assert torch.equal(aux.blocks, again_aux.blocks)
    torch.testing.assert_close(first, again, rtol=2**-7, atol=2**-7)


def test_inference_in_a_cuda_graph() -> None:
    inputs = [x.detach() for x in problem((64, 64, 4, torch.bfloat16, PAPER, 1000, 1))]
    with torch.no_grad():
        want = nsa_attention(*inputs, config=PAPER)  # compiles outside of the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = nsa_attention(*inputs, config=PAPER)
        for x in inputs[:3]:
            x.copy_(torch.randn_like(x))
        graph.replay()
        torch.testing.assert_close(
            out, nsa_attention(*inputs, config=PAPER), rtol=2**-6, atol=2**-6
        )
    assert not torch.equal(out, want)
