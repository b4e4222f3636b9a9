"""Every decoder family of transformers: dense at the start, trainable, and exactly undone."""

from __future__ import annotations

import copy

import pytest
import torch

from nsa_flex.config import NSAConfig
from nsa_flex.patching import NSALayer, patch, unpatch
from patching.tiny_models import (
    ABSOLUTE_POSITIONS,
    FAMILIES,
    NSA,
    RECURRENT,
    relative_error,
    tiny_model,
    tokens,
)

DENSE_TOKENS = NSA.num_selected_blocks * NSA.select_block_size

# Layers that see everything; the others have a sliding window or none and stay as they are.
FULL_LAYERS = {"qwen2-sliding": {0}, "gemma2": {1}, "gemma3": {1}}
FULL_LAYERS |= {family: {1} for family in RECURRENT}


def patched_layers(model: torch.nn.Module) -> dict[int, str]:
    """Index -> name in the decoder."""
    decoder = model.base_model.named_modules()
    return {module.layer_idx: name for name, module in decoder if hasattr(module, "nsa")}


def positions(family: str, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a padded batch must bring beside its mask."""
    if family not in ABSOLUTE_POSITIONS:
        return {}
    return {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_that_see_everything_are_patched(family: str) -> None:
    model = patch(tiny_model(family), NSA)
    layers = patched_layers(model)
    assert set(layers) == FULL_LAYERS.get(family, {0, 1})
    assert model.config.nsa_flex["layers"] == [layers[i] for i in sorted(layers)]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_dense_start_gives_the_logits_of_the_unpatched_model(
    family: str, implementation: str
) -> None:
    model = tiny_model(family, attn_implementation=implementation)
    ids = tokens(2, DENSE_TOKENS)
    with torch.no_grad():
        expected = copy.deepcopy(model).double()(ids).logits
        found = patch(model, NSA, init="dense")(ids).logits
    assert relative_error(found, expected) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_paper_start_differs_from_dense(family: str) -> None:
    model = tiny_model(family)
    ids = tokens(1, DENSE_TOKENS)
    with torch.no_grad():
        dense = model(ids).logits
        assert relative_error(patch(model, NSA)(ids).logits, dense) > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_reach_every_new_parameter(family: str) -> None:
    model = patch(tiny_model(family).train(), NSA)
    ids = tokens(2, 40)
    model(ids, labels=ids).loss.backward()
    added = {name: p for name, p in model.named_parameters() if ".nsa." in name}
    assert added
    for name, parameter in added.items():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.norm() > 0, name


@pytest.mark.parametrize("family", FAMILIES)
def test_dense_start_can_leave_it(family: str) -> None:
    model = patch(tiny_model(family).train(), NSA, init="dense")
    ids = tokens(2, 40)
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        if ".nsa.gates." in name:
            assert parameter.grad.isfinite().all(), name
            assert parameter.grad.norm() > 0, name


@pytest.mark.parametrize("family", FAMILIES)
def test_unpatch_restores_the_model_bit_for_bit(family: str) -> None:
    model = tiny_model(family)
    ids = tokens(2, 40)
    with torch.no_grad():
        expected = model(ids).logits
    state, config = copy.deepcopy(model.state_dict()), model.config.to_dict()
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    implementation = model.config._attn_implementation

    unpatch(patch(model, NSA))

    assert model.config.to_dict() == config
    assert model.config._attn_implementation == implementation
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(model.state_dict()[name], x) for name, x in state.items())
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_are_computed_as_if_alone(family: str, side: str) -> None:
    model = patch(tiny_model(family, attn_implementation="sdpa"), NSA)
    ids, lengths = tokens(3, 45), (45, 30, 5)
    mask = torch.zeros_like(ids)
    for row, length in zip(mask, lengths, strict=True):
        row[slice(-length, None) if side == "left" else slice(length)] = 1
    with torch.no_grad():
        found = model(ids * mask, attention_mask=mask, **positions(family, mask)).logits
        for row, keep in enumerate(mask.bool()):
            alone = model(ids[row][keep][None]).logits[0]
            assert relative_error(found[row][keep], alone) < 1e-5


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - RECURRENT))
def test_packed_documents_are_computed_as_if_alone(family: str) -> None:
    model = patch(tiny_model(family, attn_implementation="sdpa"), NSA)
    documents = [tokens(1, length) for length in (20, 41, 3)]
    positions = torch.cat([torch.arange(d.shape[1]) for d in documents])[None]
    with torch.no_grad():
        found = model(torch.cat(documents, 1), position_ids=positions, use_cache=False).logits
        alone = [model(document).logits for document in documents]
    assert relative_error(found, torch.cat(alone, 1)) < 1e-5


@pytest.mark.parametrize("family", sorted(RECURRENT))
def test_packed_documents_beside_recurrent_layers_are_refused(family: str) -> None:
    model = patch(tiny_model(family), NSA)
    ids, places = tokens(1, 40), torch.arange(40)[None]
    boundaries = torch.tensor([0, 20, 40], dtype=torch.int32)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        assert torch.equal(model(ids, position_ids=places, use_cache=False).logits, expected)
        with pytest.raises(RuntimeError, match=r"position_ids restart.* recurrent"):
            model(ids, position_ids=places % 20, use_cache=False)
        with pytest.raises(ValueError, match=r"cu_seq_lens_q .* recurrent"):
            model(ids, position_ids=places % 20, cu_seq_lens_q=boundaries, use_cache=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_logit_depends_on_later_tokens(family: str) -> None:
    model = patch(tiny_model(family, attn_implementation="sdpa"), NSA)
    ids = tokens(1, 45)
    changed = ids.clone()
    changed[:, 30:] = (ids[:, 30:] + 1) % 90 + 2
    with torch.no_grad():
        before, after = model(ids).logits, model(changed).logits
    assert relative_error(after[:, :30], before[:, :30]) < 1e-6
    assert relative_error(after[:, 30:], before[:, 30:]) > 1e-2


def is_its_turn(family: str, padding: int, cache: str) -> bool:
    """Each family takes one of the four in `make test`."""
    turn = sorted(FAMILIES).index(family) % 4
    return (padding, cache) == [(0, "dynamic"), (5, "static"), (0, "static"), (5, "dynamic")][turn]


@pytest.mark.kept.with_args(is_its_turn)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_equals_one_forward_a_step(family: str, padding: int, cache: str) -> None:
    model = patch(tiny_model(family, attn_implementation="sdpa"), NSA)
    ids = tokens(2, 14)
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    ids = ids * mask
    generated = {
        use_cache: model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=9,
            do_sample=False,
            use_cache=use_cache,
            cache_implementation=cache if use_cache else None,
        )
        for use_cache in (True, False)
    }
    for row, first in ((0, padding), (1, 0)):
        expected = ids[row, first:][None]
        for _ in range(9):
            with torch.no_grad():
                following = model(expected, use_cache=False).logits[:, -1].argmax(-1)
            expected = torch.cat((expected, following[None]), 1)
        for found in generated.values():
            assert torch.equal(found[row, first:], expected[0])


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_gpu_it_errs_as_eager_attention_does(family: str) -> None:
    # S <= n * l': every block is chosen, so that rounding cannot choose others.
    config = NSAConfig(num_selected_blocks=4, window_size=64, compression="mlp")
    wide = {"hidden_size": 256}
    if not family.startswith("falcon"):  # whose head_dim follows from the hidden size
        wide["head_dim"] = 64
    model = patch(tiny_model(family, **wide), config, backend="dense")
    ids = tokens(2, 200)
    with torch.no_grad():
        expected = copy.deepcopy(model).double()(ids).logits
        eager = copy.deepcopy(model).bfloat16()(ids).logits
        for layer in model.modules():
            if isinstance(layer, NSALayer):
                layer.backend = "auto"
        found = model.bfloat16().cuda()(ids.cuda()).logits.cpu()
    assert relative_error(found, expected) < 2 * relative_error(eager, expected)
