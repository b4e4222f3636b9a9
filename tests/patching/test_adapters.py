"""A decoder that is nobody's but the user's, patched through an adapter."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import nsa_flex
from nsa_flex.hot_path import find_graph_breaks, find_syncs
from nsa_flex.patching import NSALayer, adapters, padded_rows
from patching.tiny_models import NSA, relative_error


class CausalSelfAttention(nn.Module):
    """Multi-head attention of a small GPT, with one fused projection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        qkv = self.qkv(x).unflatten(2, (3, self.heads, -1))  # [B, S, 3, H, D]
        return qkv.permute(2, 0, 3, 1, 4).unbind()

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        query, key, value = self.project(x)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        if real is not None:
            mask = mask & real[:, None, None]
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.out(output.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and MLP with pre-norms."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = CausalSelfAttention(width, heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: Tensor, real: Tensor | None) -> Tensor:
        x = x + self.attention(self.norms[0](x), real=real)
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """A decoder without position embeddings, so that padding may be on either side."""

    def __init__(self, vocabulary: int = 50, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(2))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor, real: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, real)
        return self.head(x)


class GPTAdapter:
    """Tells patch the sizes of a `CausalSelfAttention`, and runs it with NSA."""

    def shape(self, module: CausalSelfAttention) -> nsa_flex.AttentionShape:
        width = module.qkv.in_features
        return nsa_flex.AttentionShape(
            hidden_size=width,
            num_query_heads=module.heads,
            num_kv_heads=module.heads,
            head_dim=width // module.heads,
        )

    def forward(
        self,
        module: CausalSelfAttention,
        attend: NSALayer,
        x: Tensor,
        real: Tensor | None = None,
    ) -> Tensor:
        query, key, value = module.project(x)
        rows = None if real is None else padded_rows(real, num_queries=x.shape[1])
        output = attend(x, query, key, value, rows=rows)
        return module.out(output.transpose(1, 2).flatten(2))


TOKENS = 37 * torch.arange(64).view(2, 32) % 50


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(adapters, "_ADAPTERS", {})
    nsa_flex.register_adapter(CausalSelfAttention, GPTAdapter())
    return


@torch.no_grad()
def run(model: nn.Module, *arguments: Any) -> Tensor:
    return model(*arguments)


def test_dense_start_gives_what_the_model_gave() -> None:
    model = GPT()
    expected = run(copy.deepcopy(model).double(), TOKENS)
    found = run(nsa_flex.patch(model, NSA, init="dense"), TOKENS)
    assert relative_error(found, expected) < 1e-5


def test_gradients_reach_every_new_parameter() -> None:
    model = nsa_flex.patch(GPT(), NSA)
    model(TOKENS).square().mean().backward()
    added = [name for name, _ in model.named_parameters() if ".attention.nsa." in name]
    assert len(added) == 2 * 8
    for name in added:
        assert model.get_parameter(name).grad.norm() > 0, name


def test_unpatch_restores_the_model() -> None:
    model = GPT()
    expected, names = run(model, TOKENS), list(model.state_dict())
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    nsa_flex.unpatch(nsa_flex.patch(model, NSA))
    assert torch.equal(run(model, TOKENS), expected)
    assert list(model.state_dict()) == names
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes


def test_padded_rows_are_computed_as_if_alone() -> None:
    model = nsa_flex.patch(GPT(), NSA)
    real = torch.arange(32) >= torch.tensor([[0], [11]])
    found = run(model, TOKENS, real)
    for row, keep in enumerate(real):
        assert relative_error(found[row][keep], run(model, TOKENS[row][keep][None])[0]) < 1e-5


def test_a_copy_runs_on_its_own_weights() -> None:
    model = nsa_flex.patch(GPT(), NSA)
    twin = copy.deepcopy(model)
    expected = run(model, TOKENS)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(run(twin, TOKENS), expected)


def test_a_pickled_model_runs_through_its_adapter() -> None:
    model = nsa_flex.patch(GPT(), NSA)
    twin = pickle.loads(pickle.dumps(model))
    assert torch.equal(run(twin, TOKENS), run(model, TOKENS))
    nsa_flex.unpatch(twin)
    assert not any(isinstance(module, NSALayer) for module in twin.modules())


def test_the_state_dict_round_trip() -> None:
    model = nsa_flex.patch(GPT(), NSA, init="dense")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    twin = nsa_flex.patch(GPT(), NSA, init="dense")
    twin.load_state_dict(model.state_dict())
    assert torch.equal(run(twin, TOKENS), run(model, TOKENS))


def test_it_is_one_graph_and_waits_for_no_tensor() -> None:
    model = nsa_flex.patch(GPT(), NSA)
    assert find_graph_breaks(model, TOKENS) == []
    assert find_syncs(model, TOKENS) == []


def test_patch_is_idempotent_and_takes_a_filter() -> None:
    def last(module: nn.Module, name: str) -> bool:
        return name == "blocks.1.attention"

    model = nsa_flex.patch(GPT(), NSA, filter_fn=last)
    assert nsa_flex.patch(model, NSA, filter_fn=last) is model
    assert not hasattr(model.blocks[0].attention, "nsa")
    with pytest.raises(ValueError, match="patched already, with other arguments"):
        nsa_flex.patch(model, NSA)


def test_the_nearest_base_class_decides() -> None:
    class Special(CausalSelfAttention):
        pass

    model = GPT()
    model.blocks[0].attention = Special(32, 4)
    assert hasattr(nsa_flex.patch(model, NSA).blocks[0].attention, "nsa")

    class Picky(GPTAdapter):
        def shape(self, module: CausalSelfAttention) -> nsa_flex.AttentionShape:
            raise ValueError("ALiBi is not something that NSA computes")

    nsa_flex.unpatch(model)
    nsa_flex.register_adapter(Special, Picky())
    with pytest.raises(ValueError, match="ALiBi is not something"):
        nsa_flex.patch(model, NSA)
    assert not hasattr(model.blocks[1].attention, "nsa")


class GPT2Adapter:
    """For a transformers model, in the place of what `patch` knows of its attention."""

    def shape(self, module: Any) -> nsa_flex.AttentionShape:
        return nsa_flex.AttentionShape(
            module.embed_dim, module.num_heads, module.num_heads, module.head_dim
        )

    def forward(
        self,
        module: Any,
        attend: NSALayer,
        hidden_states: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        if past_key_values is not None or attention_mask is not None:
            raise ValueError("this adapter takes neither a cache nor a mask")
        parts = module.c_attn(hidden_states).unflatten(2, (3, module.num_heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind()
        output = attend(hidden_states, query, key, value)
        return module.c_proj(output.transpose(1, 2).flatten(2)), None


def test_an_adapter_for_a_transformers_model() -> None:
    sizes = {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 50, "n_positions": 64}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    nsa_flex.register_adapter(type(model.transformer.h[0].attn), GPT2Adapter())
    with torch.no_grad():
        expected = copy.deepcopy(model).double()(TOKENS, use_cache=False).logits
        found = nsa_flex.patch(model, NSA, init="dense")(TOKENS, use_cache=False).logits
    assert relative_error(found, expected) < 1e-5
    assert not hasattr(model.config, "nsa_flex")
    assert not hasattr(nsa_flex.unpatch(model).transformer.h[0].attn, "nsa")


def test_without_an_adapter_the_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "_ADAPTERS", {})
    with pytest.raises(ValueError, match=r"GPT has no attention module .*register_adapter"):
        nsa_flex.patch(GPT(), NSA)


def test_a_patched_model_needs_its_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nsa_flex.patch(GPT(), NSA)
    monkeypatch.setattr(adapters, "_ADAPTERS", {})
    with pytest.raises(RuntimeError, match=r"CausalSelfAttention was patched .*register_adapter"):
        model(TOKENS)


def test_a_wrapped_forward_is_not_hidden() -> None:
    model = GPT()
    model.blocks[1].attention.forward = model.blocks[1].attention.forward
    with pytest.raises(ValueError, match=r"blocks\.1\.attention has a forward of its own"):
        nsa_flex.patch(model, NSA)
    assert not hasattr(model.blocks[0].attention, "nsa")


@pytest.mark.parametrize(
    ("module_type", "adapter", "message"),
    [
        (GPT(), GPTAdapter(), r"module_type is GPT.*must be a subclass of nn\.Module"),
        (int, GPTAdapter(), r"module_type is <class 'int'>"),
        (GPT, GPTAdapter, r"must be an instance with methods shape\(module\) and forward"),
        (GPT, object(), r"must be an instance with methods shape\(module\) and forward"),
    ],
)
def test_bad_registrations_are_named(module_type: Any, adapter: Any, message: str) -> None:
    with pytest.raises(TypeError, match=f"(?s){message}"):
        nsa_flex.register_adapter(module_type, adapter)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((32, 4, 3, 8), "num_query_heads=4 must be a multiple of num_kv_heads=3"),
        ((32, 4, 0, 8), "num_kv_heads=0 must be at least 1"),
    ],
)
def test_bad_shapes_are_named(sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nsa_flex.AttentionShape(*sizes)


def test_different_value_dims_and_grouped_heads() -> None:
    shape = nsa_flex.AttentionShape(32, 4, 2, 8, value_head_dim=6)
    layer = NSALayer(shape, NSA)
    query, key = torch.randn(1, 4, 20, 8), torch.randn(1, 2, 20, 8)
    found = layer(torch.randn(1, 20, 32), query, key, torch.randn(1, 2, 20, 6), scale=0.3)
    assert found.shape == (1, 4, 20, 6)
