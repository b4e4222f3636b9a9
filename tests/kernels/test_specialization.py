"""A call of another length compiles no kernel anew: serving meets every length there is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa_flex import NSAConfig, nsa_attention
from nsa_flex.explaining import rehearsal
from reference.interpreter import INTERPRETED

pytest.importorskip("triton")
from nsa_flex.fallback_kernels.common import launches
from nsa_flex.fallback_kernels.common.launches import intercepting_launches

pytestmark = pytest.mark.skipif(INTERPRETED, reason="kernels are compiled, not interpreted")
CONFIG = NSAConfig()
GPU = torch.device("cuda", 0)
HEADS, KV_HEADS, DIM = 32, 8, 128
# Of new tokens and of those before: what 16 divides and what it does not, all of one kind of plan.
CHUNKS = [(8192, 16384), (8187, 16384), (8176, 16389), (7001, 16400), (8192, 20001)]
PROMPTS = [(8192, 0), (8187, 0), (7008, 0), (7001, 0)]
Facts = dict[str, dict[str, set[tuple[bool, ...]]]]


@contextmanager
def noting(found: Facts, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within a rehearsal: by kernel and integer argument, what Triton compiles anew for."""

    def note(kernel: Any, _grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
        for parameter in kernel.params:
            x = given.get(parameter.name)
            if type(x) is not int or parameter.is_constexpr or "_stride_" in parameter.name:
                continue
            facts = () if parameter.do_not_specialize else (x == 1, x % 16 == 0)
            found[kernel.fn.__name__][parameter.name].add(facts)

    with monkeypatch.context() as patch:
        patch.setattr(launches, "intercepting_launches", lambda _: intercepting_launches(note))
        yield


def tokens_of(heads: int, count: int, dim: int = DIM) -> Tensor:
    """(1, heads, count, dim) in memory (1, count, heads, dim), without values."""
    x = torch.empty((1, count, heads, dim), dtype=torch.bfloat16, device="meta")
    return x.transpose(1, 2)


def attend(new: int, past: int) -> None:
    """What a chunk of a prefill launches on an H200."""
    keys, rows = past + new, CONFIG.num_compressed_blocks(past + new)
    with torch.no_grad(), rehearsal.rehearsing(GPU):
        nsa_attention(
            tokens_of(HEADS, new),
            *(tokens_of(KV_HEADS, count) for count in (keys, keys, rows, rows)),
            tokens_of(HEADS, new, 3),
            config=CONFIG,
            query_offset=past,
        )


@pytest.mark.parametrize("lengths", [CHUNKS, PROMPTS], ids=["chunks", "prompts"])
def test_lengths_compile_nothing_anew(
    lengths: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: Facts = defaultdict(lambda: defaultdict(set))
    with noting(found, monkeypatch):
        for new, past in lengths:
            attend(new, past)
    assert {"topk_select_kernel", "index_count_kernel"} <= set(found)
    several = {
        f"{kernel}: {name}"
        for kernel, arguments in found.items()
        for name, facts in arguments.items()
        if len(facts) > 1
    }
    assert several == set()
