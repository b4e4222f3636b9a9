"""Rotary embedding: the convention of Llama, relative positions, partial rotation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nsa_flex.rotary import apply_rotary, rotary_cos_sin
from reference import oracle


def rotated(x, positions, rotary_dim=None, theta=10000.0):
    return apply_rotary(x, *rotary_cos_sin(positions, rotary_dim or x.shape[-1], theta))


def by_definition(x, positions, rotary_dim, theta):
    """Feature i and i + rotary_dim/2 as one complex number, turned."""
    x, half = np.asarray(x, np.float64), rotary_dim // 2
    frequencies = theta ** (-2 * np.arange(half) / rotary_dim)
    angles = np.asarray(positions, np.float64)[:, None] * frequencies
    turned = (x[..., :half] + 1j * x[..., half:rotary_dim]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag, x[..., rotary_dim:]], axis=-1)


@pytest.mark.parametrize(("rotary_dim", "theta"), [(8, 1e4), (4, 5e5), (2, 1e4)])
def test_definition(rotary_dim, theta):
    x, positions = torch.randn(2, 3, 11, 8), torch.arange(11)
    want = by_definition(x, positions, rotary_dim, theta)
    assert oracle.relative_error(rotated(x, positions, rotary_dim, theta), want) < 1e-6


def test_agrees_with_transformers():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(hidden_size=32, num_attention_heads=2, num_key_value_heads=2)
    positions = torch.arange(5, 25)[None]
    query, key = torch.randn(1, 2, 20, 16), torch.randn(1, 2, 20, 16)
    cos, sin = llama.LlamaRotaryEmbedding(config)(query, positions)
    want_query, want_key = llama.apply_rotary_pos_emb(query, key, cos, sin)
    torch.testing.assert_close(rotated(query, positions), want_query)
    torch.testing.assert_close(rotated(key, positions), want_key)


def test_logits_depend_on_distance_only():
    query, key = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)
    near = rotated(query, torch.tensor([3])) * rotated(key, torch.tensor([1]))
    far = rotated(query, torch.tensor([103])) * rotated(key, torch.tensor([101]))
    assert near.sum().item() == pytest.approx(far.sum().item(), abs=1e-4)


def test_positions_of_each_row():
    x = torch.randn(2, 3, 5, 8)
    positions = torch.stack((torch.arange(5), torch.arange(7, 12)))
    got = rotated(x, positions)
    assert torch.equal(got[:1], rotated(x[:1], positions[0]))
    assert torch.equal(got[1:], rotated(x[1:], positions[1]))


def test_half_precision_rounds_once():
    x = torch.randn(1, 2, 50, 16).bfloat16()
    positions = torch.arange(1000, 1050)
    got = rotated(x, positions)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, rotated(x.float(), positions).bfloat16())


@pytest.mark.parametrize("rotary_dim", [0, 3])
def test_bad_rotary_dim(rotary_dim):
    with pytest.raises(ValueError, match=f"rotary_dim={rotary_dim} must be even and at least 2"):
        rotary_cos_sin(torch.arange(4), rotary_dim, 1e4)


def test_bad_shapes():
    with pytest.raises(ValueError, match=r"positions has shape \(1, 1, 4\); expected \(tokens,\)"):
        rotary_cos_sin(torch.zeros(1, 1, 4), 8, 1e4)
    with pytest.raises(ValueError, match="x has head dim 8; rotary_dim=16 must not exceed it"):
        rotated(torch.randn(1, 1, 4, 8), torch.arange(4), rotary_dim=16)


def test_result_is_in_token_major_memory():
    x = torch.randn(2, 3, 5, 8)
    for rotary_dim in (8, 4):
        assert rotated(x, torch.arange(5), rotary_dim).transpose(1, 2).is_contiguous()
