"""NSAAttention: the layer against the oracle, documents and padding, training, errors."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from nsa_flex.config import NSAConfig
from nsa_flex.module import NSAAttention
from reference import oracle

CONFIG = NSAConfig(
    compress_block_size=4,
    compress_stride=2,
    select_block_size=8,
    num_selected_blocks=3,
    num_local_blocks=1,
    window_size=5,
    compression="mlp",
)
LENGTHS = (19, 1, 40, 3, 16)


def layer(gates_spread: float = 1.0, **options) -> NSAAttention:
    """4 query heads on 2 KV heads, E = 24, D = 8; φ and gates off their start."""
    options = {"head_dim": 8, "config": CONFIG} | options
    module = NSAAttention(24, 4, 2, **options)
    with torch.no_grad():
        for phi in (module.compress_key, module.compress_value):
            for parameter in phi.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        for parameter in module.gates.parameters():
            parameter.normal_(std=gates_spread)
    return module


def linear(projection: nn.Linear, x: np.ndarray) -> np.ndarray:
    out = x @ projection.weight.detach().double().numpy().T
    return out if projection.bias is None else out + projection.bias.detach().double().numpy()


def heads(x: np.ndarray, head_dim: int) -> np.ndarray:
    return x.reshape(*x.shape[:2], -1, head_dim).transpose(0, 2, 1, 3)


def rotate(x: np.ndarray, theta: float | None) -> np.ndarray:
    if theta is None:
        return x
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[2])[:, None] * theta ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def compress(phi: nn.Module, x: np.ndarray) -> np.ndarray:
    """φ in float64; tests/test_compression.py holds it to its formula."""
    return copy.deepcopy(phi).double()(torch.from_numpy(x)).detach().numpy()


def by_definition(module: NSAAttention, x: Tensor, blocks: Tensor) -> oracle.Forward:
    """The layer in float64 NumPy up to the output projection, given the choice of blocks."""
    x = x.double().numpy()
    query = rotate(heads(linear(module.q_proj, x), module.head_dim), module.rope_theta)
    keys = rotate(heads(linear(module.k_proj, x), module.head_dim), module.rope_theta)
    values = heads(linear(module.v_proj, x), module.value_head_dim)
    kv = module.num_kv_heads
    compressed, selected, sliding = (
        slice(i * kv, (i + 1) * kv) if module.separate_branch_kv else slice(None) for i in range(3)
    )
    gates = 1 / (1 + np.exp(-linear(module.gates.linear, x)))
    return oracle.forward(
        query,
        keys[:, selected],
        values[:, selected],
        compress(module.compress_key, keys[:, compressed]),
        compress(module.compress_value, values[:, compressed]),
        heads(gates + module.gates.offset.double().numpy()[np.arange(gates.shape[-1]) % 3], 3),
        module.config,
        sliding_key=keys[:, sliding],
        sliding_value=values[:, sliding],
        blocks=blocks.numpy(),
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"separate_branch_kv": True},
        {"value_head_dim": 6, "bias": True},
        {"rope_theta": None, "gate_init": "dense"},
        {"separate_branch_kv": True, "value_head_dim": 12, "rope_theta": 500.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("num_tokens", [1, 3, 61])
def test_equals_the_oracle(options, num_tokens):
    module = layer(**options)
    x = torch.randn(2, num_tokens, 24)
    got, aux = module(x, return_aux=True)
    want = by_definition(module, x, aux.blocks)
    assert oracle.choice_excess(aux.blocks, want.scores, CONFIG) < 1e-5
    flat = want.out.transpose(0, 2, 1, 3).reshape(2, num_tokens, -1)
    assert got.dtype == torch.float32
    assert oracle.relative_error(got.detach(), linear(module.o_proj, flat)) < 1e-5
    for name in oracle.BRANCHES:
        assert oracle.relative_error(getattr(aux.lse, name), want.lse[name]) < 1e-5


def test_dense_start_is_dense_causal_attention():
    module = NSAAttention(24, 4, 2, config=CONFIG, gate_init="dense", rope_theta=None)
    x = torch.randn(2, 24, 24)  # 24 = n * l'
    query, key, value = (
        projection(x).unflatten(2, (-1, 6)).transpose(1, 2)
        for projection in (module.q_proj, module.k_proj, module.v_proj)
    )
    dense = nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True
    )
    want = module.o_proj(dense.transpose(1, 2).flatten(2))
    assert oracle.relative_error(module(x).detach(), want.detach()) < 1e-6


@pytest.mark.parametrize("separate_branch_kv", [False, True])
def test_gradients_against_finite_differences(separate_branch_kv):
    # 17 tokens are 3 blocks: no choice that could jump
    config = NSAConfig(4, 2, 8, 3, 1, 1, 5, compression="mlp")
    module = layer(config=config, separate_branch_kv=separate_branch_kv, dtype=torch.float64)
    names = [name for name, _ in module.named_parameters()]
    x = torch.randn(1, 17, 24, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), x)

    # The rotation is in float32, alike on both sides: its error is no error of the gradient.
    assert torch.autograd.gradcheck(run, (x, *module.parameters()), fast_mode=True)


@pytest.mark.parametrize("separate_branch_kv", [False, True])
@pytest.mark.parametrize("kind", ["mean", "weighted", "linear", "mlp"])
def test_gradients_reach_every_parameter_at_the_start(kind, separate_branch_kv):
    config = NSAConfig(4, 2, 8, 3, 1, 1, 5, compression=kind)
    module = NSAAttention(
        24, 4, 2, config=config, separate_branch_kv=separate_branch_kv, bias=True
    )
    module(torch.randn(2, 61, 24)).square().sum().backward()
    for name, parameter in module.named_parameters():
        if name == "compress_key.position":
            continue  # zero then, but for rounding: the next test
        reached = (parameter.grad != 0).float().mean()
        assert reached > 0.99, f"{name}: {reached:.0%} of the gradient is nonzero"


def test_positions_of_keys_learn_as_soon_as_the_network_has():
    """At the start they add one vector to all compressed keys, which no softmax sees."""
    config = NSAConfig(4, 2, 8, 3, 1, 1, 5, compression="mlp")
    module = NSAAttention(24, 4, 2, config=config)
    x = torch.randn(2, 61, 24)

    def gradients() -> tuple[Tensor, Tensor]:
        module.zero_grad()
        module(x).square().sum().backward()
        return module.compress_key.position.grad, module.compress_value.position.grad

    of_key, of_value = gradients()
    assert of_key.norm() <= 1e-5 * of_value.norm()
    with torch.no_grad():
        module.compress_key.output_weight += 0.1 * torch.randn_like(
            module.compress_key.output_weight
        )
    of_key, of_value = gradients()
    assert (of_key != 0).all()
    assert of_key.norm() > 1e-4 * of_value.norm()


def test_gates_learn_from_the_dense_start():
    module = NSAAttention(24, 4, 2, config=CONFIG, gate_init="dense")
    module(torch.randn(2, 61, 24)).square().sum().backward()
    assert (module.gates.linear.weight.grad != 0).all()


def test_future_tokens_change_nothing():
    module = layer()
    x = torch.randn(1, 61, 24)
    changed = x.clone()
    changed[:, 33:] = torch.randn(1, 28, 24)
    got, aux = module(changed, return_aux=True)
    want, want_aux = module(x, return_aux=True)
    torch.testing.assert_close(got[:, :33], want[:, :33])
    assert torch.equal(aux.blocks[:, :, :33], want_aux.blocks[:, :, :33])
    assert not torch.allclose(got[:, 33:], want[:, 33:])


def one_by_one(module: NSAAttention, documents: list[Tensor]) -> tuple[list[Tensor], list, dict]:
    """Each document alone: outputs, aux and the summed gradients of sum(out²)."""
    module.zero_grad()
    outs, auxes = zip(*(module(x[None], return_aux=True) for x in documents), strict=True)
    sum(out.square().sum() for out in outs).backward()
    return [out[0] for out in outs], list(auxes), gradients(module)


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in module.named_parameters()}


def assert_gradients_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    for name in want:
        assert oracle.relative_error(got[name], want[name]) < 1e-5, name


@pytest.mark.parametrize("options", [{}, {"separate_branch_kv": True}, {"bias": True}], ids=str)
def test_packed_documents_as_if_alone(options):
    module = layer(**options)
    documents = [torch.randn(length, 24) for length in LENGTHS]
    want, want_aux, want_gradients = one_by_one(module, documents)

    module.zero_grad()
    cu_seqlens = torch.tensor((0, *np.cumsum(LENGTHS)), dtype=torch.int32)
    named = {"cu_seqlens": cu_seqlens, "max_document_length": max(LENGTHS)}
    got, aux = module(torch.cat(documents)[None], **named, return_aux=True)
    got.square().sum().backward()

    assert oracle.relative_error(got[0].detach(), torch.cat(want).detach()) < 1e-5
    assert_gradients_equal(gradients(module), want_gradients)
    assert torch.equal(aux.blocks[0], torch.cat([a.blocks[0] for a in want_aux], dim=1))
    for name in oracle.BRANCHES:
        alone = torch.cat([getattr(a.lse, name)[0] for a in want_aux], dim=1)
        assert oracle.relative_error(getattr(aux.lse, name)[0], alone) < 1e-5


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("options", [{}, {"separate_branch_kv": True}, {"bias": True}], ids=str)
def test_padded_rows_as_if_alone(options, side):
    module = layer(**options)
    documents = [torch.randn(length, 24) for length in LENGTHS]
    want, want_aux, want_gradients = one_by_one(module, documents)

    module.zero_grad()
    x, mask = 100 * torch.randn(len(LENGTHS), 40, 24), torch.zeros(len(LENGTHS), 40)
    places = [slice(40 - n, 40) if side == "left" else slice(0, n) for n in LENGTHS]
    for row, (document, place) in enumerate(zip(documents, places, strict=True)):
        x[row, place] = document
        mask[row, place] = 1
    got, aux = module(x, attention_mask=mask, return_aux=True)
    got.square().sum().backward()

    assert (got[mask == 0] == 0).all()
    for row, place in enumerate(places):
        assert oracle.relative_error(got[row, place].detach(), want[row].detach()) < 1e-5
        assert torch.equal(aux.blocks[row, :, place], want_aux[row].blocks[0])
    assert_gradients_equal(gradients(module), want_gradients)


def test_boolean_mask_of_ones_is_no_mask():
    module, x = layer(), torch.randn(2, 30, 24)
    mask = torch.ones(2, 30, dtype=torch.bool)
    torch.testing.assert_close(module(x, attention_mask=mask), module(x))


@pytest.mark.parametrize("shape", [(61,), (1, 61), (2, 61)])
def test_positions_are_what_rotates(shape):
    module, x = layer(config=replace(CONFIG, compression="mean")), torch.randn(2, 61, 24)
    positions = torch.arange(61).expand(shape)
    want = module(x).detach()
    assert torch.equal(module(x, positions=positions), want)
    # Only differences of positions count (for a φ that is linear and one for all features).
    shifted = module(x, positions=positions + 7).detach()
    assert oracle.relative_error(shifted, want) < 1e-5
    doubled = module(x, positions=2 * positions).detach()
    assert oracle.relative_error(doubled, want) > 1e-2


@pytest.mark.parametrize("shape", [(79,), (1, 79)])
def test_positions_of_packed_documents(shape):
    module, x = layer(), torch.randn(1, 79, 24)
    cu_seqlens = torch.tensor((0, *np.cumsum(LENGTHS)))
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).reshape(shape)
    want = module(x, cu_seqlens=cu_seqlens)
    assert torch.equal(module(x, cu_seqlens=cu_seqlens, positions=positions), want)
    doubled = module(x, cu_seqlens=cu_seqlens, positions=2 * positions)
    assert not torch.allclose(doubled, want, rtol=1e-2)


def test_positions_of_padded_rows():
    module, x, mask = layer(), torch.randn(2, 30, 24), torch.ones(2, 30)
    mask[1, :9] = 0
    want = module(x, attention_mask=mask)
    positions = (mask.cumsum(1) - 1).clamp(min=0).long()
    assert torch.equal(module(x, attention_mask=mask, positions=positions), want)


def inputs(case: str, num_tokens: int) -> dict[str, Tensor]:
    if case == "packed":
        x = torch.randn(1, num_tokens, 24)
        return {"x": x, "cu_seqlens": torch.tensor([0, 11, 30, num_tokens])}
    x = torch.randn(2, num_tokens, 24)
    if case == "padded":
        mask = torch.ones(2, num_tokens)
        mask[1, :7] = 0
        return {"x": x, "attention_mask": mask}
    return {"x": x}


@pytest.mark.kept(lambda case: case != "plain")
@pytest.mark.parametrize("case", ["plain", "packed", "padded"])
def test_compiles_whole(case):
    module = layer()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert_compiled_equals_eager(module, compiled, inputs(case, 61))


@pytest.mark.parametrize("max_length", [None, 64])
def test_compiles_whole_with_a_fresh_cache(max_length):
    module = layer()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    x, cache = torch.randn(1, 41, 24), module.new_cache(max_length=max_length)
    with torch.no_grad():
        found = [compiled(part, cache=cache) for part in (x[:, :40], x[:, 40:])]
        torch.testing.assert_close(torch.cat(found, 1), module(x), atol=1e-5, rtol=1e-5)


@pytest.mark.exhaustive
def test_compiles_once_for_all_lengths():
    module = layer()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True, dynamic=True)
    for num_tokens in (61, 45, 130):
        assert_compiled_equals_eager(module, compiled, inputs("plain", num_tokens))
    assert counter.frame_count == 1


def test_compiles_whole_with_inductor():
    module, x = layer(separate_branch_kv=True), torch.randn(2, 61, 24)
    with torch.no_grad():
        got = torch.compile(module, fullgraph=True)(x)
        assert oracle.relative_error(got, module(x)) < 1e-5


def assert_compiled_equals_eager(module, compiled, arguments):
    results = []
    for run in (module, compiled):
        module.zero_grad()
        out = run(**arguments)
        out.square().sum().backward()
        results.append((out.detach(), gradients(module)))
    (want, want_gradients), (got, got_gradients) = results
    assert oracle.relative_error(got, want) < 1e-5
    assert_gradients_equal(got_gradients, want_gradients)


def test_state_dict_round_trip():
    module, x = layer(gate_init="dense"), torch.randn(2, 61, 24)
    twin = NSAAttention(24, 4, 2, head_dim=8, config=CONFIG)
    assert not torch.equal(twin(x), module(x))
    twin.load_state_dict(module.state_dict())
    assert torch.equal(twin(x), module(x))


def test_meta_device_then_reset():
    options = {"config": CONFIG, "separate_branch_kv": True, "bias": True, "gate_init": "dense"}
    module = NSAAttention(24, 4, 2, **options, device="meta")
    assert all(tensor.is_meta for tensor in module.state_dict().values())
    module = module.to_empty(device="cpu")
    torch.manual_seed(0)
    module.reset_parameters()
    torch.manual_seed(0)
    twin = NSAAttention(24, 4, 2, **options)
    twin.reset_parameters()
    for (name, got), want in zip(
        module.state_dict().items(), twin.state_dict().values(), strict=True
    ):
        assert got.isfinite().all(), name
        assert got.shape == want.shape, name
    torch.manual_seed(0)
    twin.reset_parameters()
    x = torch.randn(1, 30, 24)
    assert torch.equal(module(x), twin(x))


def test_half_precision():
    module, x = layer(), torch.randn(2, 61, 24)
    want = module(x)
    got = copy.deepcopy(module).bfloat16()(x.bfloat16())
    assert got.dtype == torch.bfloat16
    # Early tokens choose every block there is: no choice that rounding could change.
    error = oracle.relative_error(got[:, :24].detach().float(), want[:, :24].detach())
    assert error < 2**-5


def test_autocast_trains_float32_parameters():
    module, x = layer(), torch.randn(2, 61, 24)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(x)
    out.float().square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.isfinite().all(), name


def test_a_step_of_training_lowers_the_loss():
    module = NSAAttention(24, 4, 2, config=CONFIG)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    x = torch.randn(4, 61, 24)
    target = x.roll(1, dims=1)
    losses = []
    for _ in range(30):
        loss = (module(x) - target)[:, 1:].square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_default_head_dims():
    module = NSAAttention(24, 4, 2)
    assert (module.head_dim, module.value_head_dim) == (6, 6)
    assert module.config == NSAConfig()
    assert "num_query_heads=4, num_kv_heads=2, head_dim=6" in repr(module)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((24, 4, 3), {}, "num_query_heads=4 must be a multiple of num_kv_heads=3"),
        ((25, 4, 2), {}, "hidden_size=25 is not a multiple of num_query_heads=4: pass head_dim"),
        ((24, 8, 2), {}, "head_dim=3 must be even for rotation, or rope_theta None"),
        ((24, 4, 2, 0), {}, "head_dim=0 must be at least 1"),
        ((0, 4, 2), {}, "hidden_size=0 must be at least 1"),
        ((24, 4, 0), {}, "num_kv_heads=0 must be at least 1"),
        ((24, 4, 2), {"value_head_dim": 0}, "value_head_dim=0 must be at least 1"),
        ((24, 4, 2), {"rope_theta": 0.0}, "rope_theta=0.0 must be positive and finite, or None"),
        ((24, 4, 2), {"gate_init": "half"}, "init is 'half'; it must be one of paper, dense"),
    ],
)
def test_bad_construction(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        NSAAttention(*arguments, **options)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((9, 24), {}, r"x has shape \(9, 24\); expected \(batch, tokens, hidden_size=24\)"),
        ((2, 9, 23), {}, r"x has shape \(2, 9, 23\); expected"),
        ((2, 0, 24), {}, "expected at least one token"),
        (
            (1, 9, 24),
            {"cu_seqlens": torch.tensor([0, 9]), "attention_mask": torch.ones(1, 9)},
            "cu_seqlens and attention_mask were both given",
        ),
        ((1, 9, 24), {"max_document_length": 9}, "max_document_length=9 was given without cu_seq"),
        ((2, 9, 24), {"cu_seqlens": torch.tensor([0, 9])}, "x has 2 rows; cu_seqlens needs one"),
        ((1, 9, 24), {"cu_seqlens": torch.tensor([0.0, 9.0])}, "cu_seqlens must be a 1-D integer"),
        (
            (2, 9, 24),
            {"attention_mask": torch.ones(2, 1, 9, 9)},
            r"attention_mask has shape \(2, 1, 9, 9\); expected \(batch, tokens\) = \(2, 9\)",
        ),
        (
            (2, 9, 24),
            {"positions": torch.arange(8)},
            r"positions has shape \(8,\); expected \(tokens,\) = \(9,\) or \(batch, tokens\)",
        ),
    ],
)
def test_bad_calls(shape, options, message):
    with pytest.raises(ValueError, match=message):
        layer()(torch.randn(shape), **options)


def test_unknown_backend_names_the_known_ones():
    with pytest.raises(ValueError, match="backend is 'magic'; it must be one of auto, dense"):
        layer(backend="magic")(torch.randn(1, 9, 24))
