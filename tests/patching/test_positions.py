"""The guard of `position_ids`: what follows the rule goes on, a shard of a sequence is noticed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import DynamicCache, StaticCache

import nsa_flex
from nsa_flex import NSACache
from nsa_flex.documents import POSITIONS_RULE
from nsa_flex.hot_path import find_syncs
from nsa_flex.patching.hf_tokens import asserted
from patching.tiny_models import NSA, relative_error, tiny_model, tokens

BROKEN = r"position_ids break the rule: .* see nsa_flex.context_parallel"
IDS = tokens(2, 40)
PLACES = torch.arange(40)[None]
PADDED = torch.ones(2, 40, dtype=torch.long)
PADDED[0, :6] = 0  # on the left
PADDED[1, 30:] = 0  # on the right
COUNTED = (PADDED.cumsum(1) - 1).clamp(min=0)
ENDS = torch.tensor([0, 13, 40])
PACKED = torch.cat((torch.arange(13), torch.arange(27)))[None]

WAYS: dict[str, dict[str, Any]] = {
    "packed": {"use_cache": False},
    "with a cache to come": {"use_cache": True},
    "with a mask": {"attention_mask": torch.ones_like(IDS), "use_cache": False},
}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    """φ is no mean: it tells one position from another."""
    model = nsa_flex.patch(tiny_model(num_hidden_layers=1), NSA)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".nsa.compress" in name:
                parameter.normal_()
    return model


def shards(rank: int, *, balanced: bool) -> Tensor:
    """Positions of one of two ranks' half of 80 tokens; balanced: its first and last quarter."""
    if not balanced:
        return torch.arange(80).chunk(2)[rank][None]
    quarters = torch.arange(80).chunk(4)
    return torch.cat((quarters[rank], quarters[3 - rank]))[None]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "places",
    [
        shards(1, balanced=False),
        shards(0, balanced=True),
        shards(1, balanced=True),
        PLACES + 1,
        PLACES * 2,
        PLACES.flip(1),
        torch.cat((PLACES[:, :20], PLACES[:, 5:25]), 1),  # a document that does not begin at 0
    ],
)
@torch.no_grad()
def test_positions_of_no_whole_sequence(model: nn.Module, way: str, places: Tensor) -> None:
    with pytest.raises(RuntimeError, match=BROKEN):
        model(IDS, position_ids=places, **WAYS[way])


@torch.no_grad()
def test_a_shard_of_packed_documents(model: nn.Module) -> None:
    """Its first document began on another rank; bounds or not."""
    places, bounds = (PACKED + 7) % 27, torch.tensor([0, 20, 40])
    for call in ({}, {"cu_seq_lens_q": bounds}):
        with pytest.raises(RuntimeError, match=BROKEN):
            model(IDS[:1], position_ids=places, use_cache=False, **call)


@torch.no_grad()
def test_one_token_alone_is_the_first(model: nn.Module) -> None:
    model(IDS[:, :1], position_ids=torch.zeros(1, 1).long(), use_cache=False)
    with pytest.raises(RuntimeError, match=BROKEN):
        model(IDS[:, :1], position_ids=torch.tensor([[7]]), use_cache=False)


# What stays legal


@pytest.mark.parametrize("of_padding", [0, 1, 5])
@torch.no_grad()
def test_padding_may_have_any_position(model: nn.Module, of_padding: int) -> None:
    places = COUNTED.masked_fill(PADDED == 0, of_padding)
    found = model(IDS, attention_mask=PADDED, position_ids=places, use_cache=False).logits
    for row, real in enumerate(PADDED.bool()):
        alone = model(IDS[row][real][None], use_cache=False).logits[0]
        assert relative_error(found[row][real], alone) < 1e-5


@pytest.mark.parametrize(
    "call",
    [
        {"position_ids": PLACES},
        {"position_ids": PLACES.expand(2, -1), "use_cache": False},
        {"position_ids": PLACES, "attention_mask": PADDED},  # which count padding
        {"position_ids": PACKED, "use_cache": False},
        {"position_ids": PACKED, "attention_mask": torch.ones_like(IDS)},
        {"position_ids": PACKED, "attention_mask": PADDED, "use_cache": False},
        {"position_ids": (PLACES - 30).clamp(min=0) % 3, "nsa_max_documents": 99}
        | {"use_cache": False},
    ],
)
@torch.no_grad()
def test_positions_that_follow_the_rule(model: nn.Module, call: dict[str, Any]) -> None:
    assert model(IDS, **call).logits.isfinite().all()


@torch.no_grad()
def test_padding_behind_the_last_document(model: nn.Module) -> None:
    bounds = torch.cat((ENDS, torch.tensor([43])))
    ids, places = tokens(1, 43), torch.nn.functional.pad(PACKED, (0, 3))
    model(ids, position_ids=places, cu_seq_lens_q=bounds, use_cache=False)


# With a cache


def caches(model: Any) -> dict[str, Any]:
    return {
        "growing": DynamicCache(config=model.config),
        "static": StaticCache(config=model.config, max_cache_len=64),
        "nsa": NSACache(model, max_length=64),
    }


@pytest.mark.parametrize("kind", ["growing", "static", "nsa"])
@pytest.mark.parametrize("masked", [False, True])
@torch.no_grad()
def test_new_tokens_go_on_from_the_cache(model: nn.Module, kind: str, masked: bool) -> None:
    cache = caches(model)[kind]

    def step(begin: int, end: int, places: Tensor) -> Tensor:
        mask = torch.ones(2, end, dtype=torch.long) if masked else None
        call = {"attention_mask": mask, "position_ids": places, "past_key_values": cache}
        return model(IDS[:, begin:end], **call).logits

    found = [step(begin, begin + 8, PLACES[:, begin : begin + 8]) for begin in (0, 8, 16)]
    for places in (torch.arange(8)[None], torch.arange(23, 31)[None], torch.arange(48, 56)[None]):
        with pytest.raises(RuntimeError, match="position_ids break the rule"):
            step(24, 32, places)
    found += [step(24, 32, PLACES[:, 24:32])]
    for place in (0, 31, 33):
        with pytest.raises(RuntimeError, match="position_ids break the rule"):
            step(32, 33, torch.tensor([[place]]))
    found += [step(place, place + 1, PLACES[:, place : place + 1]) for place in range(32, 40)]
    expected = model(IDS, use_cache=False).logits
    assert relative_error(torch.cat(found, 1), expected) < 1e-5


@pytest.mark.parametrize("kind", ["growing", "static", "nsa"])
@pytest.mark.parametrize("counting", ["real tokens", "columns"])
@torch.no_grad()
def test_padded_rows_go_on_either_way_to_count(model: nn.Module, kind: str, counting: str) -> None:
    cache = caches(model)[kind]
    mask = torch.cat((PADDED, torch.ones(2, 9, dtype=torch.long)), 1)
    columns = torch.arange(49).expand(2, -1)
    places = (mask.cumsum(1) - 1).clamp(min=0) if counting == "real tokens" else columns
    for begin, end in ((0, 3), (3, 40), (40, 41), (41, 48), (48, 49)):  # 3: padding alone
        ids = tokens(2, 49)[:, begin:end]
        call = {"attention_mask": mask[:, :end], "past_key_values": cache}
        model(ids, position_ids=places[:, begin:end], **call)
    with pytest.raises(RuntimeError, match=BROKEN):
        model(
            ids,
            attention_mask=torch.nn.functional.pad(mask, (0, 1), value=1),
            position_ids=torch.full((2, 1), 47),
            past_key_values=cache,
        )


@torch.no_grad()
def test_rows_padded_before_go_on_without_a_mask(model: nn.Module) -> None:
    cache = NSACache(model)
    model(IDS, attention_mask=PADDED, past_key_values=cache)
    model(IDS[:, :1], position_ids=PADDED.sum(1, keepdim=True), past_key_values=cache)
    with pytest.raises(RuntimeError, match=BROKEN):
        model(IDS[:, :1], position_ids=torch.tensor([[3]]), past_key_values=cache)


def test_a_cache_with_gradients(model: nn.Module) -> None:
    cache = model(IDS[:, :20], use_cache=True).past_key_values
    with pytest.raises(RuntimeError, match=BROKEN):
        model(IDS[:, 20:], position_ids=PLACES[:, :20], past_key_values=cache)
    cache = model(IDS[:, :20], use_cache=True).past_key_values
    model(IDS[:, 20:], position_ids=PLACES[:, 20:], past_key_values=cache)


# What it costs, compiled and on a GPU


@torch.no_grad()
def test_a_compiled_step(model: nn.Module) -> None:
    torch._dynamo.reset()
    cache, compiler = NSACache(model, max_length=64), CompileCounterWithBackend("aot_eager")
    model(IDS[:, :20], past_key_values=cache)
    step = torch.compile(model, fullgraph=True, backend=compiler)
    for place in range(20, 26):
        step(IDS[:, :1], position_ids=torch.tensor([[place]]), past_key_values=cache)
    assert compiler.frame_count == 1
    for place in (25, 27, 0):
        with pytest.raises(RuntimeError, match=BROKEN):
            step(IDS[:, :1], position_ids=torch.tensor([[place]]), past_key_values=cache)
    step(IDS[:, :1], position_ids=torch.tensor([[26]]), past_key_values=cache)


@pytest.mark.parametrize("way", ["packed", "with a mask"])
@torch.no_grad()
def test_a_compiled_forward(model: nn.Module, way: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    compiled(IDS, position_ids=PLACES, **WAYS[way])
    with pytest.raises(RuntimeError, match=BROKEN):
        compiled(IDS, position_ids=PLACES + 40, **WAYS[way])


@pytest.mark.parametrize("masked", [False, True])
@torch.no_grad()
def test_nobody_waits(model: nn.Module, masked: bool) -> None:
    mask = PADDED if masked else None
    assert find_syncs(lambda: model(IDS, attention_mask=mask, position_ids=PLACES)) == []
    cache = NSACache(model)
    model(IDS, past_key_values=cache, attention_mask=mask)
    longer = torch.nn.functional.pad(PADDED, (0, 1), value=1) if masked else None
    place = {"position_ids": torch.full((2, 1), 40), "past_key_values": cache}

    def step_and_back() -> None:
        model(IDS[:, :1], attention_mask=longer, **place)
        cache.crop(-1)

    assert find_syncs(step_and_back) == []


def test_the_operator() -> None:
    torch.library.opcheck(asserted, (PLACES, torch.tensor(True)))
    # The most that CUDA takes (`_assert_async` there raises), and MPS.
    assert len(POSITIONS_RULE) < 250


GPU = """
import sys, torch, nsa_flex
from nsa_flex import NSACache
from patching.tiny_models import tiny_model, tokens
config = nsa_flex.NSAConfig(num_selected_blocks=5, window_size=128, compression="mlp")
sizes = {"hidden_size": 256, "head_dim": 64, "max_position_embeddings": 2048}
model, case = nsa_flex.patch(tiny_model(**sizes), config).to("cuda", torch.bfloat16), sys.argv[1]
ids, places = tokens(2, 640).cuda(), torch.arange(640, device="cuda")[None]
shift = 640 * ("shard" in case)
with torch.no_grad():
    if "step" in case:
        cache = NSACache(model, max_length=700)
        model(ids, past_key_values=cache)
        step = torch.compile(model, mode="reduce-overhead") if "compiled" in case else model
        for place in range(640, 646):
            torch.compiler.cudagraph_mark_step_begin()
            step(ids[:, :1], position_ids=places[:, :1] + place + shift, past_key_values=cache)
    else:
        forward = torch.compile(model) if "compiled" in case else model
        mask = torch.ones_like(ids) if "compiled" in case else None
        forward(ids, position_ids=places + shift, attention_mask=mask, use_cache=False)
torch.cuda.synchronize()
print("went through")
"""


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["forward", "compiled forward", "step", "compiled step"])
def test_on_a_gpu(case: str) -> None:
    """In processes of their own: an assertion that fails takes the context with it."""
    for positions in ("whole", "shard"):
        command = [sys.executable, "-c", GPU, f"{case}, {positions}"]
        tests = str(Path(__file__).parents[1])
        # Otherwise the process may end before the driver has printed the message.
        blocking = {**os.environ, "CUDA_LAUNCH_BLOCKING": "1"}
        done = subprocess.run(command, cwd=tests, env=blocking, capture_output=True, text=True)
        output = done.stdout + done.stderr
        assert ("went through" in output) == (positions == "whole"), output
        assert ("break the rule" in output) == (positions == "shard"), output
