"""Copies of a cache in a decode step: planted ones are found, what a step must do is not."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import nsa_flex
from nsa_flex import audit
from nsa_flex.auditing import measuring
from nsa_flex.auditing.batches import batches_of
from nsa_flex.auditing.checks import Checks
from nsa_flex.auditing.sources import place_of
from nsa_flex.auditing.targets import decoding_batches, logits
from nsa_flex.hot_path.cache_copies import find_cache_copies
from patching.tiny_models import NSA, SIZES, tiny_model, tokens
from reference.old_inductor import fails_to_compile


class Cache:
    """Keys and a small state, as objects hold them."""

    def __init__(self) -> None:
        self.key = torch.randn(1, 2, 64, 8)
        self.state = torch.randn(1, 8, 3)
        self.lengths = torch.tensor([40])


@torch.library.custom_op("nsa_flex_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return torch.cat([x, x])


def repeated(new: Tensor, cache: Cache) -> Tensor:
    key = cache.key[:, :, None].expand(-1, -1, 3, -1, -1).reshape(1, 6, 64, 8)
    return new.repeat(1, 3, 1, 1) @ key.mT


def stored_out_of_place(new: Tensor, cache: Cache) -> None:
    cache.key = cache.key.transpose(1, 2).clone().transpose(1, 2)


# One line each that reads or writes all of the cache, and writes as much.
COPIES: dict[str, Callable[[Tensor, Cache], Any]] = {
    "cat": lambda new, cache: torch.cat([cache.key, new], 2),
    "repeated heads": repeated,
    "assigned": stored_out_of_place,
    "cast": lambda new, cache: new.double() @ cache.key.double().mT,
    "masked": lambda new, cache: new @ torch.where(cache.lengths > 3, cache.key, 0.0).mT,
    "in place": lambda new, cache: cache.key.mul_(2.0),
    "copied into": lambda new, cache: cache.key.copy_(torch.cat([cache.key[:, :, 1:], new], 2)),
    "in a custom operator": lambda new, cache: doubled(cache.key),
}
FINE: dict[str, Callable[[Tensor, Cache], Any]] = {
    "attention": lambda new, cache: torch.softmax(new @ cache.key.mT, -1) @ cache.key,
    "stored in place": lambda new, cache: cache.key.index_copy_(2, cache.lengths, new),
    "stored by a slice": lambda new, cache: cache.key[:, :, 40:41].copy_(new),
    "chosen rows": lambda new, cache: cache.key[:, :, torch.arange(64)],
    "window": lambda new, cache: cache.key[:, :, 20:41].contiguous(),
    "small state": lambda new, cache: cache.state.roll(1, -1),
    "lengths": lambda new, cache: cache.lengths + 1,
    "sparse": lambda new, cache: cache.state.to_sparse() * 2,
    "no cache": lambda new, cache: torch.cat([new] * 100, 2),
}


def found_in(step: Callable[[Tensor, Cache], Any]) -> list[Any]:
    return find_cache_copies(lambda: functools.partial(step, torch.ones(1, 2, 1, 8), Cache()))


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_is_found_with_its_line(name: str) -> None:
    (found,) = found_in(COPIES[name])
    assert found.kind == "cache-copy"
    assert "(1, 2, 64, 8)" in found.detail
    lines, first = inspect.getsourcelines(doubled._init_fn if "custom" in name else COPIES[name])
    file, line, _ = place_of(found.location)
    assert Path(file).name == Path(__file__).name
    assert first <= line < first + len(lines)


@pytest.mark.parametrize("name", FINE)
def test_what_a_step_must_do_is_no_finding(name: str) -> None:
    assert found_in(FINE[name]) == []


def test_what_was_copied_is_a_cache_too() -> None:
    def step(new: Tensor, cache: Cache) -> Tensor:
        cache.key = torch.cat([cache.key, new], 2)
        return cache.key.transpose(1, 2).contiguous()

    assert [found.detail.split()[0] for found in found_in(step)] == [
        "aten.cat.default",
        "aten.clone.default",
    ]


def test_the_audit_tells_what_a_growing_dense_cache_costs() -> None:
    """And that NSA's, in its place, copies nothing."""
    for patched in (False, True):
        model = tiny_model(attn_implementation="sdpa")
        if patched:
            nsa_flex.patch(model, NSA)

        def longer() -> dict[str, Any]:
            return step(length=50)

        def step(model: Any = model, length: int = 40) -> dict[str, Any]:
            cache = transformers.DynamicCache(config=model.config)
            with torch.no_grad():
                model(tokens(1, length), past_key_values=cache)
            return {"input_ids": tokens(1, 1), "past_key_values": cache}

        inputs = {"input_ids": tokens(1, 8), "use_cache": False}
        report = audit(logits(model), inputs, decode=[step, longer], measured=False, train=False)
        copies = [found for found in report.findings if found.kind == "cache-copy"]
        assert bool(copies) != patched
        assert len({found.location for found in copies}) == len(copies)  # whatever the length
        assert all(found.phases == ("decode",) and found.mend for found in copies)
        assert all("cache_utils.py" in found.location for found in copies)


@pytest.mark.parametrize("patched", [False, True])
def test_static_caches_are_written_in_place(patched: bool) -> None:
    # transformers before 5.21 repeats keys that several heads share, which is a copy.
    heads = {} if patched else {"num_key_value_heads": SIZES["num_attention_heads"]}
    model = tiny_model(attn_implementation="sdpa", **heads)
    if patched:
        nsa_flex.patch(model, NSA)
    make = decoding_batches(model)[0]
    with torch.no_grad():
        assert find_cache_copies(lambda: functools.partial(logits(model), **make())) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=fails_to_compile), pytest.param("cuda", marks=pytest.mark.gpu)],
)
def test_a_measured_decode_phase_names_what_writes_the_cache(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "LISTED_KERNELS", 1000)  # which are the longest is luck
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    kind: Any = {"device": device, "dtype": dtype}
    layer = nsa_flex.NSAAttention(64, 4, 2, config=NSA, **kind).eval()

    def step() -> dict[str, Any]:
        cache = layer.new_cache(max_length=100)
        with torch.no_grad():
            layer(torch.randn(1, 40, 64, **kind), cache=cache)
        return {"x": torch.randn(1, 1, 64, **kind), "cache": cache}

    work = Checks(layer, None, None, True, lambda line: None)
    work.phase("decode", batches_of([step]), train=False)
    (phase,) = work.phases
    names = [kernel["name"] for kernel in phase.kernels]
    # Not the operator that calls it: torch 2.14 keeps no record of operators that write.
    wanted = "decode_" if device == "cuda" else "index_put"
    assert any(wanted in name for name in names), (names, work.notes)
    assert not [found for found in work.findings if found.kind == "cache-copy"]
