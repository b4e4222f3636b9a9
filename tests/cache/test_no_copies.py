"""A decode step never copies the cache: compiled code and eager operators alike."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from nsa_flex import NSAAttention, NSAConfig
from nsa_flex.cache import LayerCache
from nsa_flex.config import CompressionKind
from patching.tiny_models import NSA
from reference.old_inductor import fails_to_compile

KINDS = get_args(CompressionKind)
CAPACITY = 4099  # longer than anything that a step may go over

# Sizes that Inductor's kernels go over, and those of new tensors.
_LOOP = re.compile(r"<static_cast<int64_t>\((\d+)L\)")
_NUMEL = re.compile(r"\b[xyzr]\d?_?numel = (\d+)")
_NEW = re.compile(r"empty_strided_\w+\(\(([\d, ]+)\)")
_WRITE = re.compile(r"(?:cpp|triton)_\w*fused\w*(?:index_put|scatter)\w*")


def filled(
    config: NSAConfig, device: str, dtype: torch.dtype, **options: Any
) -> tuple[NSAAttention, LayerCache]:
    """A layer with a static cache of 300 tokens."""
    layer = NSAAttention(64, 4, 2, config=config, **options).to(device, dtype)
    cache = layer.eval().requires_grad_(False).new_cache(max_length=CAPACITY)
    layer(torch.randn(2, 300, 64, device=device, dtype=dtype), cache=cache)
    return layer, cache


def check_code(code: str, cache: LayerCache) -> None:
    """No kernel of Inductor goes over the cache or writes it, and nothing of its size is made."""
    smallest = min(x.numel() for x in cache.buffers.tensors)
    assert not _WRITE.findall(code)
    assert max(map(int, _LOOP.findall(code)), default=0) < CAPACITY
    assert max(map(int, _NUMEL.findall(code)), default=0) < smallest
    for shape in _NEW.findall(code):
        size = 1
        for length in shape.strip(", ").split(","):
            size *= int(length)
        assert size < smallest, shape


def compiled_code(layer: NSAAttention, cache: LayerCache, x: Tensor) -> str:
    torch._dynamo.reset()
    step = torch.compile(lambda x: layer(x, cache=cache), fullgraph=True)
    _, codes = run_and_get_code(step, x)
    assert len(codes) == 1
    return codes[0]


@pytest.mark.kept(lambda kind: kind == "weighted")
@pytest.mark.parametrize(
    ("kind", "separate"),
    [
        pytest.param("mlp", False, marks=fails_to_compile),
        pytest.param("linear", True, marks=fails_to_compile),
        ("weighted", True),
    ],
)
@torch.no_grad()
def test_compiled_operators_alone_write_the_cache(kind: Any, separate: bool) -> None:
    config = replace(NSA, compression=kind)
    layer, cache = filled(config, "cpu", torch.float32, separate_branch_kv=separate)
    code = compiled_code(layer, cache, torch.randn(2, 1, 64))
    check_code(code, cache)
    # In place: what is written is an input of the graph.
    assert len(re.findall(r"nsa_flex\.cache_write\.default\(arg\d+_1,", code)) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_compiled_one_operator_writes_the_cache_on_cuda(kind: Any, separate: bool) -> None:
    config = replace(NSA, compression=kind)
    layer, cache = filled(config, "cuda", torch.bfloat16, separate_branch_kv=separate)
    x = torch.randn(2, 1, 64, device="cuda", dtype=torch.bfloat16)
    code = compiled_code(layer, cache, x)
    check_code(code, cache)
    assert len(re.findall(r"nsa_flex\.decode_step\.default\(", code)) == 1
    assert "cache_write" not in code


@pytest.mark.gpu
@pytest.mark.parametrize("separate", [False, True])
@torch.no_grad()
def test_compiled_one_operator_stores_a_chunk_on_cuda(separate: bool) -> None:
    config = replace(NSA, compression="mean")
    layer, cache = filled(config, "cuda", torch.bfloat16, separate_branch_kv=separate)
    x = torch.randn(2, 40, 64, device="cuda", dtype=torch.bfloat16)
    code = compiled_code(layer, cache, x)
    assert not _WRITE.findall(code)
    # In place: what is written is an input of the graph.
    stored = re.findall(r"nsa_flex\.store_tokens\.default\(([^\[]*)", code)
    assert len(stored) == 1
    assert len(re.findall(r"arg\d+_1", stored[0])) >= 4
    assert "cache_write" not in code


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_step_on_cuda_moves_less_than_the_cache(kind: Any) -> None:
    """By the profiler: kernels of a step, and nothing that copies; at 2 x 256 MB it would show."""
    config = NSAConfig(compression=kind)
    layer = NSAAttention(256, 16, 4, 128, config=config).to("cuda", torch.bfloat16)
    cache = layer.eval().requires_grad_(False).new_cache(max_length=1 << 18)
    x = torch.randn(1, 4096, 256, device="cuda", dtype=torch.bfloat16)
    layer(x, cache=cache)
    step = torch.compile(lambda x: layer(x, cache=cache), fullgraph=True)
    for _ in range(2):
        step(x[:, :1])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step(x[:, :1])
        torch.cuda.synchronize()
    times = {e.key: e.self_device_time_total for e in profiler.key_averages()}
    assert sum(name.startswith("decode_") for name in times) >= 4, times
    copied = cache.memory().raw / 2 / 4.8e12 * 1e6  # µs to read the keys alone
    assert max(times.values()) < copied, times
