"""NSAConfig: defaults of the paper, derived counts, errors."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_flex import NSAConfig


def test_defaults_are_the_papers() -> None:
    assert NSAConfig() == NSAConfig(32, 16, 64, 16, 1, 2, 512, "mean")
    assert NSAConfig().num_forced_blocks == 3


def test_counts_and_back() -> None:
    config = NSAConfig(8, 4, 16, 4, 0, 1, 20)
    assert config.counts == [8, 4, 16, 4, 0, 1, 20]
    assert NSAConfig.of_counts(config.counts) == config


@pytest.mark.parametrize(
    ("changes", "last"),
    [
        ({"selection": "tiled_top_k"}, [1, 0, 1, 2]),
        ({"branches": ("sliding",)}, [0, 2]),
        ({"branches": ["selected"], "selection": "tiled_top_k"}, [1, 1]),
    ],
)
def test_counts_say_what_is_not_the_default(changes: dict[str, Any], last: list[int]) -> None:
    config = NSAConfig(8, 4, 16, 4, 0, 1, 20, **changes)
    assert config.counts == [8, 4, 16, 4, 0, 1, 20, *last]
    assert NSAConfig.of_counts(config.counts) == config


def test_branches_are_in_order() -> None:
    config = NSAConfig(branches=["sliding", "compressed"])  # type: ignore[arg-type]
    assert config.branches == ("compressed", "sliding")
    assert (config.has("sliding"), config.has("selected")) == (True, False)


@pytest.mark.parametrize(
    ("branches", "expected"),
    [(("compressed",), True), (("selected", "sliding"), True), (("sliding",), False)],
)
def test_compresses_where_a_branch_reads_it(branches: Any, expected: bool) -> None:
    assert NSAConfig(branches=branches).compresses == expected


def test_frozen_and_hashable() -> None:
    config = NSAConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.window_size = 3  # type: ignore[misc]
    assert len({config, NSAConfig(), NSAConfig(window_size=1)}) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compress_stride": 5}, "compress_stride=5 must divide compress_block_size=32"),
        ({"select_block_size": 40}, "compress_stride=16 must divide select_block_size=40"),
        ({"select_block_size": 16}, "compress_block_size=32 must be at most select_block_size=16"),
        (
            {"num_selected_blocks": 2},
            r"at least num_initial_blocks \+ num_local_blocks = 3",
        ),
        ({"window_size": 0}, "window_size=0 must be at least 1"),
        ({"num_local_blocks": 0}, "num_local_blocks=0 must be at least 1"),
        ({"num_initial_blocks": -1}, "num_initial_blocks=-1 must be at least 0"),
        ({"compression": "max"}, "compression is 'max'; it must be one of mean, weighted, linear"),
        ({"selection": "max"}, "selection is 'max'; it must be one of top_k, tiled_top_k"),
        ({"branches": ()}, r"branches is \(\); it must name some of compressed, selected"),
        ({"branches": ("window",)}, r"branches is \('window',\); it must name some of compressed"),
        (
            {"selection": "tiled_top_k", "num_selected_blocks": 5},
            "num_selected_blocks=5 must be even: tiled_top_k takes one half before",
        ),
        (
            {"selection": "tiled_top_k"},
            "num_initial_blocks=1 and num_local_blocks=2 must be 0 and 1: tiled_top_k forces",
        ),
    ],
)
def test_values_that_do_not_fit(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NSAConfig(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [1.0, "64", None, True])
def test_counts_are_ints(value: object) -> None:
    with pytest.raises(TypeError, match="window_size must be an int"):
        NSAConfig(window_size=value)  # type: ignore[arg-type]


@given(length=st.integers(0, 300), stride=st.integers(1, 8), parts=st.integers(1, 4))
def test_counts_are_those_of_the_windows(length: int, stride: int, parts: int) -> None:
    config = NSAConfig(stride * parts, stride, stride * parts, 3)
    starts = [s for s in range(0, length, stride) if s + stride * parts <= length]
    assert config.num_compressed_blocks(length) == len(starts)
    assert config.num_select_blocks(length) == math.ceil(length / config.select_block_size)


def test_dict_round_trip_through_json() -> None:
    config = NSAConfig(window_size=77, compression="linear", branches=("selected", "sliding"))
    assert NSAConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(ValueError, match=r"unknown NSAConfig fields \['windows'\]"):
        NSAConfig.from_dict({"windows": 3})


def test_fields_never_become_symbols() -> None:
    """Dynamo makes a symbol of an int that changed; block sizes must stay numbers."""
    sizes: list[object] = []

    def backend(module: torch.fx.GraphModule, inputs: list[object]) -> torch.fx.GraphModule:
        full = next(node for node in module.graph.nodes if node.op == "call_function")
        sizes.extend(full.meta["example_value"].shape)
        return module

    @torch.compile(backend=backend, fullgraph=True)
    def function(x: torch.Tensor, config: NSAConfig) -> torch.Tensor:
        config.specialize()
        return torch.full((config.window_size,), 1.0) * x

    for window in (4, 5, 6):
        assert function(torch.ones(1), NSAConfig(window_size=window)).shape == (window,)
    assert [(size, type(size)) for size in sizes] == [(4, int), (5, int), (6, int)]
