"""One route a call: what `explain` tells is what the operators of forward and backward take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa_flex import NSAConfig, explain
from nsa_flex.fallback_kernels.common import arch
from nsa_flex.fallback_kernels.fused import operators
from nsa_flex.fallback_kernels.fused.route import Route
from reference.random_calls import CONFIGS, Call, longest_document, random_call

GPU = torch.device("cuda", 0)
SEEDS = range(60)


@pytest.fixture(
    autouse=True, params=[arch.SM90, arch.Device((8, 0), arch.SM90_SHARED_MEMORY)], ids=str
)
def _device(request: pytest.FixtureRequest) -> Iterator[None]:
    with arch.imagining(GPU, request.param):
        yield


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """The routes that the operators of forward and backward asked for."""
    found: dict[str, list[Any]] = {}
    for name in ("route_of", "backward_route_of"):
        ask = getattr(operators, name)

        def note(*args: Any, ask: Any = ask, name: str = name, **options: Any) -> Any:
            route = ask(*args, **options)
            found.setdefault(name, []).append(route)
            return route

        monkeypatch.setattr(operators, name, note)
    return found


def meta(heads: int, tokens: int, dim: int, batch: int = 1, dtype: Any = torch.bfloat16) -> Tensor:
    return torch.empty(batch, tokens, heads, dim, dtype=dtype, device="meta").transpose(1, 2)


def explained(call: Call) -> Any:
    keys = call.num_tokens + (call.offset or 0)
    sizes = {"batch": call.batch, "dtype": getattr(torch, call.dtype)}
    query = meta(call.num_kv_heads * call.group, call.num_tokens, call.head_dim, **sizes)
    key = meta(call.num_kv_heads, keys, call.head_dim, **sizes)
    value = meta(call.num_kv_heads, keys, call.value_head_dim, **sizes)
    options: dict[str, Any] = {"query_offset": call.offset, "needs_grad": call.needs_grad}
    if call.own_window_keys:
        options |= {f"sliding_{name}": x.clone() for name, x in (("key", key), ("value", value))}
    if call.documents is not None:
        rows = (call.batch, call.num_tokens)
        options["document_start"] = torch.empty(rows, dtype=torch.int32, device="meta")
        if call.tells_longest:
            options["max_document_length"] = longest_document(call)
    config = CONFIGS[call.config]
    return explain(query, key, value, config=config, device=GPU, **options)


@pytest.mark.parametrize("seed", SEEDS)
def test_explain_tells_the_route_of_both_operators(seed: int, taken: dict[str, list[Any]]) -> None:
    call = random_call(seed)
    kernels = explained(call).kernels
    route = kernels.route
    if route is None:  # the branches run one by one
        assert not taken
        return
    (forward,) = taken["route_of"]
    assert forward == route
    assert (route.backward is None) == (not call.needs_grad)
    assert all(backward == route.backward for backward in taken.get("backward_route_of", []))
    assert bool(taken.get("backward_route_of")) == call.needs_grad
    stages = {run.stage for run in kernels.forward}
    assert ("ranges" in stages) == (route.compressed == "ranges" and route.forward != "short")
    assert ("selected" in stages) == (
        route.forward in ("epilogue", "two_kernels") or route.needs_index
    )


def test_every_route_is_taken() -> None:
    """By the random calls: a route that none takes would not be compared, either."""
    routes = [explained(random_call(seed)).kernels.route for seed in SEEDS]
    taken = [route for route in routes if route is not None]
    forwards = {route.forward for route in taken}
    if arch.device_properties(GPU).capability == (9, 0):
        assert forwards == {"short", "masked", "epilogue", "two_kernels"}
    assert {route.compressed for route in taken} == {"cudnn", "ranges"}
    kernels = {route.backward.kernels for route in taken if route.backward is not None}
    assert kernels == {"short", "masked", "lists"}
    assert any(route.short_queries for route in taken)
    assert any(route.short_documents for route in taken)


def route_of(tokens: int, *, group: int = 16, dim: int = 128, **options: Any) -> Route:
    query, key = meta(2 * group, tokens, dim), meta(2, tokens, dim)
    route = explain(query, key, device=GPU, **options).kernels.route
    assert route is not None
    return route


def test_lengths_decide() -> None:
    """Up to n * l' tokens all blocks are selected; twice that is masked; then blocks count."""
    of_lengths = {x: route_of(x, needs_grad=True) for x in (1024, 1025, 2048, 2049, 8192, 8193)}
    backwards = {x: route.backward.kernels for x, route in of_lengths.items() if route.backward}
    assert of_lengths[1024].forward == "short"
    assert of_lengths[1025].forward != "short"
    assert backwards == {
        1024: "short", 1025: "masked", 2048: "masked", 2049: "lists", 8192: "lists", 8193: "lists",
    }  # fmt: skip
    compressed = {x: route.compressed for x, route in of_lengths.items()}
    assert compressed[8192] == "ranges"
    assert compressed[8193] == "cudnn"


def test_documents_that_are_told_decide() -> None:
    start = torch.empty(1, 8192, dtype=torch.int32, device="meta")
    told, not_told = (
        route_of(8192, needs_grad=True, document_start=start, max_document_length=longest)
        for longest in (1024, None)
    )
    assert told.forward == "short"
    assert not_told.compressed == "ranges"
    assert not_told.short_queries == NSAConfig().num_selected_tokens
    assert not_told.short_documents == 2 * NSAConfig().num_selected_tokens
    assert "documents of up to 2048 tokens masked" in str(not_told)


def test_keys_of_its_own_keep_the_window_out_of_the_epilogue() -> None:
    key = meta(2, 4096, 128)
    route = route_of(4096, sliding_key=key, sliding_value=key)
    assert route.forward == "two_kernels"
    assert "keys and values of its own" in str(route)
