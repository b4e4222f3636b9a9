"""Steps over a cache on several ranks find what a cache on one finds."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.problem import new_model
from distributed.ranks import TWO_GPUS, on_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import nsa_flex
from nsa_flex import Compression, NSAConfig
from nsa_flex.cache.columns import incoming_batch
from nsa_flex.cache.layer import LayerCache, advance
from nsa_flex.parallel import ShardedCache, last_tokens, shard_sequence
from nsa_flex.parallel.decoding import NUM_COLLECTIVES, sent_bytes_per_step
from nsa_flex.patching import ShardedNSACache
from patching.tiny_models import NSA, tokens

LIMIT = 1e-10
DIM, VALUE_DIM, HEADS = 8, 6, 2


@dataclasses.dataclass
class Case:
    """A prompt and steps, the same on all ranks.

    lengths: real tokens of each row of the prompt, on which padding follows.
    steps: new tokens of each step.
    """

    group: int = 3
    lengths: tuple[int, ...] = (61, 37)
    steps: tuple[int, ...] = (1,) * 12
    max_length: int = 96
    config: NSAConfig = NSA
    phi: Any = "mlp"
    num_sets: int = 1
    dtype: torch.dtype = torch.float64

    def __post_init__(self) -> None:
        torch.manual_seed(3)
        self.rows, prompt = len(self.lengths), max(self.lengths)
        total = prompt + sum(self.steps)
        heads = HEADS * self.num_sets
        self.key, self.value, self.query = (
            self.tensor(number, total, width)
            for number, width in ((heads, DIM), (heads, VALUE_DIM), (HEADS * self.group, DIM))
        )
        self.gates = self.tensor(HEADS * self.group, total, len(self.config.branches)).sigmoid()
        self.phis = [
            Compression(self.config, HEADS, width, self.phi, dtype=self.dtype)
            for width in (DIM, VALUE_DIM)
        ]
        for phi in self.phis:
            for parameter in phi.parameters():
                parameter.requires_grad_(False).add_(torch.randn_like(parameter), alpha=0.3)

    def tensor(self, heads: int, tokens: int, width: int) -> Tensor:
        return torch.randn(self.rows, heads, tokens, width, dtype=self.dtype)

    def parts(self) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Of the prompt, then of each step: query, key, value and gates."""
        sizes = [max(self.lengths), *self.steps]
        yield from zip(
            *(x.split(sizes, 2) for x in (self.query, self.key, self.value, self.gates)),
            strict=True,
        )

    def alone(self) -> list[Tensor]:
        """What steps give over the cache of one process."""
        cache = LayerCache(*self.phis, max_length=2 * self.max_length, num_sets=self.num_sets)
        found = []
        for query, key, value, gates in self.parts():
            real = torch.ones(self.rows, query.shape[2], dtype=torch.bool)
            if not found:
                real = torch.arange(query.shape[2]) < torch.tensor(self.lengths)[:, None]
            cache.expect(incoming_batch(real))
            stored = cache.update(key, value)
            found.append(cache.attend(query, *stored, gates)[0])
            assert cache.incoming is not None
            advance([cache], cache.incoming)
        return found[1:]

    def sharded(self, mesh: Any) -> list[Tensor]:
        """The same over several ranks; filled from whole rows, or from their shards."""
        cache = ShardedCache(*self.phis, mesh, max_length=self.max_length, num_sets=self.num_sets)
        (_, key, value, _), *steps = self.parts()
        cache.fill(key, value, self.lengths)
        return [cache.step(*step) for step in steps]


TWO_BRANCHES = dataclasses.replace(NSA, branches=("selected", "sliding"))
COMPRESSED = dataclasses.replace(NSA, branches=("compressed",))
NOT_SELECTED = dataclasses.replace(NSA, branches=("compressed", "sliding"))
SELECTED = dataclasses.replace(NSA, branches=("selected",))
SLIDING = dataclasses.replace(NSA, branches=("sliding",))
WIDE = dataclasses.replace(NSA, compress_stride=2)  # blocks that reach three strides over an edge
NO_EDGE = dataclasses.replace(NSA, compress_stride=8)
POOLED = dataclasses.replace(NSA, selection="max_pool")
# A part of 48 tokens on two ranks: rows of 46 tokens and more cross the edge, with their windows,
# their local blocks and compressed blocks.
CASES: dict[str, dict[str, Any]] = {
    "G 3": {},
    "G 1, over the edge": {"group": 1, "lengths": (46, 44, 47), "phi": "weighted"},
    "G 4, three tokens a step": {"group": 4, "lengths": (46, 40), "steps": (3, 3, 2, 4)},
    "G 16": {"group": 16, "lengths": (80,), "phi": "linear"},
    "the first rank alone": {"lengths": (9, 3), "steps": (1,) * 9, "max_length": 128},
    "before any compressed block": {"lengths": (1, 2), "steps": (1,) * 4},
    "keys of each branch": {"num_sets": 3, "lengths": (46, 30)},
    "selected and sliding": {"config": TWO_BRANCHES, "lengths": (47, 70), "phi": "mean"},
    "compressed alone": {"config": COMPRESSED, "lengths": (47, 70), "phi": "mean"},
    "compressed and sliding": {"config": NOT_SELECTED, "lengths": (47, 70)},
    "selected alone": {"config": SELECTED, "lengths": (44, 70), "steps": (1, 1, 5, 3, 1)},
    "sliding alone": {"config": SLIDING, "lengths": (44, 70), "num_sets": 3},
    "three strides over the edge": {"config": WIDE, "lengths": (44, 70)},
    "blocks side by side": {"config": NO_EDGE, "lengths": (44, 70)},
    "max_pool": {"config": POOLED, "lengths": (44, 70)},
}


@pytest.mark.kept(lambda world: world == 2)
@pytest.mark.parametrize("world", [2, 4])
def test_steps_find_what_one_process_finds(world: int, tmp_path: Path) -> None:
    on_ranks(world, "cpu", tmp_path, every_case)


def every_case(device: torch.device) -> None:
    for name, options in CASES.items():
        case = Case(**options)
        found, expected = case.sharded(dist.group.WORLD), case.alone()
        assert len(found) == len(expected) == len(case.steps)
        for step, (got, want) in enumerate(zip(found, expected, strict=True)):
            assert float(want.abs().max()) > 0
            error = float((got - want).abs().max() / want.abs().max())
            assert error < LIMIT, f"{name}: {error} at step {step}"


def test_shards_of_a_prompt_and_bfloat16(tmp_path: Path) -> None:
    on_ranks(2, "cpu", tmp_path, from_shards)


def from_shards(device: torch.device) -> None:
    case = Case(lengths=(64, 50))
    _, key, value, _ = next(case.parts())
    whole, pieces = (
        ShardedCache(*case.phis, dist.group.WORLD, max_length=96, prompt=case.lengths)
        for _ in range(2)
    )
    whole.fill(*(torch.randn_like(x) for x in (key, value)))  # what was there before goes
    memory = [x.data_ptr() for x in whole.stored]
    whole.fill(key, value, case.lengths)
    assert memory == [x.data_ptr() for x in whole.stored]
    pieces.fill_from_shards(*(shard_sequence(x, dist.group.WORLD, 2) for x in (key, value)))
    for got, want in zip(pieces.stored, whole.stored, strict=True):
        assert torch.equal(got, want)
    # A rank holds half of the tokens, and a block more.
    one = key.nbytes + value.nbytes
    assert whole.memory() < one * 96 / 64 * (1 / 2 + 8 / 96) * (1 + 1 / 4)
    # In half precision no further from float64 than twice what one process is.
    half, exact = Case(lengths=(64, 50), dtype=torch.bfloat16), Case(lengths=(64, 50))
    for name in ("key", "value", "query", "gates"):
        setattr(exact, name, getattr(half, name).double())
    exact.phis = [copy.deepcopy(phi).double() for phi in half.phis]
    steps_of = (half.sharded(dist.group.WORLD), half.alone(), exact.alone())
    for got, plain, want in zip(*steps_of, strict=True):
        assert got.dtype == torch.bfloat16
        assert (got - want).norm() <= 2 * (plain - want).norm()


class Collectives(TorchDispatchMode):
    """Counts those of a call, and what they take from this rank: a ring passes it P - 1 times."""

    def __init__(self) -> None:
        super().__init__()
        self.number = self.sent = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name == "_c10d_functional::all_gather_into_tensor":
            self.number += 1
            self.sent += args[0].nbytes * (dist.get_world_size() - 1)
        elif "c10d" in name and "wait_tensor" not in name:
            raise AssertionError(f"{name} is not counted")
        elif "_local_scalar_dense" in name or "nonzero" in name:
            raise AssertionError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


def test_collectives_and_bytes_are_those_of_the_closed_form(tmp_path: Path) -> None:
    # Of each of 4 query heads two outputs of 8 and two log-sum-exps: nothing to select blocks by.
    assert sent_bytes_per_step(2, 4, 2, 8, config=NOT_SELECTED) == 4 * (2 * 8 + 2) * 4
    on_ranks(2, "cpu", tmp_path, count_collectives)


def count_collectives(device: torch.device) -> None:
    for options, number in (
        ({"phi": "mean"}, NUM_COLLECTIVES),
        ({"dtype": torch.bfloat16, "steps": (2,)}, NUM_COLLECTIVES),
        ({"config": TWO_BRANCHES}, NUM_COLLECTIVES),
        ({"config": WIDE, "num_sets": 3}, NUM_COLLECTIVES),
        ({"config": NOT_SELECTED}, 2),
        ({"config": SLIDING}, 1),
    ):
        case = Case(**options)
        cache = ShardedCache(*case.phis, dist.group.WORLD, max_length=96, num_sets=case.num_sets)
        (_, key, value, _), step, *_ = case.parts()
        cache.fill(key, value)
        with Collectives() as counted:
            cache.step(*step)
        expected = sent_bytes_per_step(
            2,
            *(HEADS * case.group, HEADS, VALUE_DIM),
            config=case.config,
            batch_size=case.rows,
            num_tokens=step[0].shape[2],
            dtype=case.dtype,
        )
        assert (counted.number, counted.sent) == (number, expected)


@pytest.mark.parametrize("num_new", [1, 3])
@pytest.mark.parametrize(("config", "read"), [(NSA, 2), (TWO_BRANCHES, 1), (SLIDING, 0)])
def test_what_no_branch_reads_is_neither_compressed_nor_held(
    config: NSAConfig, read: int, num_new: int, alone: dist.ProcessGroup
) -> None:
    case = Case(config=config, steps=(num_new,) * 8)
    cache = ShardedCache(*case.phis, alone, max_length=96)
    called: set[int] = set()
    for place, phi in enumerate(case.phis):
        phi.register_forward_hook(lambda *_, place=place: called.add(place))
    (_, key, value, _), *steps = case.parts()
    cache.fill(key, value, case.lengths)
    for step in steps:
        cache.step(*step)
    assert called == set(range(read))
    stored = cache.stored
    held = [stored.key, stored.value, *stored[2 : 2 + read]]
    assert cache.memory() == sum(x.untyped_storage().nbytes() for x in held)
    for x in stored[2 + read : 4]:
        assert x.untyped_storage().nbytes() == x[:, :, :1].nbytes  # one row


def test_a_rank_that_attends_alone_is_wrong(tmp_path: Path) -> None:
    """The numbers of other ranks count: a token of the other part changes the output here."""
    on_ranks(2, "cpu", tmp_path, perturb)


def perturb(device: torch.device) -> None:
    case = Case(lengths=(70, 70), steps=(1,))
    before = case.sharded(dist.group.WORLD)[0]
    for token in (3, 60):
        case.value[:, :, token] += 1.0
        after = case.sharded(dist.group.WORLD)[0]
        assert float((after - before).abs().max()) > 1e-3
        before = after


def test_refused(alone: dist.ProcessGroup) -> None:
    case = Case()
    (_, key, value, _), step, *_ = case.parts()
    cache = ShardedCache(*case.phis, alone, max_length=62)
    assert cache.part.total == 64
    with pytest.raises(ValueError, match="the cache is empty: fill it with the keys and values"):
        cache.step(*step)
    with pytest.raises(ValueError, match=r"key has shape \(2, 1, 61, 8\); expected \(B, 2, T, 8"):
        cache.fill(key[:, :1], value[:, :1])
    with pytest.raises(ValueError, match="a prompt of 66 tokens does not fit the 64 of the cache"):
        cache.fill(*(torch.zeros(2, 2, 66, width).double() for width in (DIM, VALUE_DIM)))
    cache.fill(key, value)
    with pytest.raises(ValueError, match="key has 1 rows, the cache 2"):
        cache.step(*(x[:1] for x in step))
    many = [x.expand(-1, -1, 17, -1) for x in step]
    with pytest.raises(ValueError, match="a step has 17 tokens; expected 1 to 16"):
        cache.step(*many)
    for _ in range(3):
        cache.step(*step)
    before = cache.stored.key.clone()
    with pytest.raises(ValueError, match=r"lengths are \(61, 70\); expected 2 of 0 to 61, the"):
        cache.fill(key, value, (61, 70))
    text = "the cache holds 64 of at most 64 tokens: no room for 1 more; make one with a larger"
    with pytest.raises(ValueError, match=text):
        cache.step(*step)
    assert torch.equal(cache.stored.key, before)
    with pytest.raises(ValueError, match="max_length=0 must be at least 1"):
        ShardedCache(*case.phis, alone, max_length=0)
    other = Compression(NO_EDGE, HEADS, VALUE_DIM)
    with pytest.raises(ValueError, match="φ of keys and of values differ in their NSAConfig"):
        ShardedCache(case.phis[0], other, alone, max_length=8)


def test_tiles_of_blocks_are_refused(alone: dist.ProcessGroup) -> None:
    tiled = dataclasses.replace(
        NSA, selection="tiled_top_k", num_initial_blocks=0, num_local_blocks=1
    )
    case = Case(config=tiled)
    with pytest.raises(ValueError, match=re.escape('"top_k" or "max_pool", got "tiled_top_k"')):
        case.sharded(alone)


def test_models(tmp_path: Path) -> None:
    on_ranks(2, "cpu", tmp_path, prompt_and_steps)


@torch.no_grad()
def prompt_and_steps(device: torch.device) -> None:
    """A left-padded prompt in shards, then tokens of all ranks: the logits of each row alone."""
    mesh, lengths = dist.group.WORLD, (60, 45)
    model = nsa_flex.context_parallel(new_model(device, torch.float64).eval(), mesh)
    torch.manual_seed(6)
    ids, new = tokens(2, 60), [tokens(2, number) for number in (1, 3, 1, 1)]
    mask = (torch.arange(60) >= 60 - torch.tensor(lengths)[:, None]).long()
    batch = nsa_flex.shard_batch(ids, mesh, NSA, attention_mask=mask)
    cache = ShardedNSACache(model, lengths=lengths, max_length=80)
    with pytest.raises(ValueError, match="position_ids with a ShardedNSACache: leave them out"):
        model(**batch, past_key_values=cache, position_ids=batch["input_ids"])
    logits = model(**batch, past_key_values=cache).logits
    found = [last_tokens(logits, torch.tensor(lengths), mesh)[:, None]]
    found += [model(input_ids=step, past_key_values=cache).logits for step in new]
    assert cache.first.lengths.tolist() == [x + 6 for x in lengths]

    nsa_flex.context_parallel(model, None)
    for row, length in enumerate(lengths):
        whole = torch.cat((ids[row, 60 - length :], *(step[row] for step in new)))[None]
        expected = model(input_ids=whole, use_cache=False).logits[0, length - 1 :]
        got = torch.cat([x[row] for x in found])
        assert got.shape == expected.shape
        assert float((got - expected).abs().max() / expected.abs().max()) < LIMIT
    with pytest.raises(ValueError, match="the model is not in context parallelism, whose ranks"):
        ShardedNSACache(model, lengths=lengths, max_length=80)
    with pytest.raises(ValueError, match="Linear has no NSA layers: call"):
        ShardedNSACache(torch.nn.Linear(2, 2), lengths=lengths, max_length=80)


def test_modules(tmp_path: Path) -> None:
    on_ranks(2, "cpu", tmp_path, modules)


@torch.no_grad()
def modules(device: torch.device) -> None:
    """`NSAAttention`: a prompt of 64 tokens in shards, then some of all ranks."""
    mesh: Any = dist.group.WORLD
    for separate in (False, True):
        torch.manual_seed(4)
        layer = nsa_flex.NSAAttention(
            32, 4, 2, config=NSA, separate_branch_kv=separate, dtype=torch.float64
        )
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        x = torch.randn(2, 70, 32, dtype=torch.float64)
        expected = layer(x)
        phis = (layer.compress_key, layer.compress_value)
        cache = ShardedCache(*phis, mesh, max_length=80, num_sets=3 if separate else 1)
        with pytest.raises(ValueError, match="a ShardedCache needs nsa_flex"):
            layer(x, cache=cache)
        nsa_flex.context_parallel(layer, mesh)
        prompt = layer(shard_sequence(x[:, :64], mesh), cache=cache)
        torch.testing.assert_close(prompt, shard_sequence(expected[:, :64], mesh))
        for step in x[:, 64:].split((1, 4, 1), 1):
            place = cache.lengths[0].item()
            out = layer(step, cache=cache)
            torch.testing.assert_close(out, expected[:, place : place + step.shape[1]])


@pytest.mark.gpu
@TWO_GPUS
def test_a_step_in_a_cuda_graph(tmp_path: Path) -> None:
    on_ranks(2, "cuda", tmp_path, captured)


@torch.no_grad()
def captured(device: torch.device) -> None:
    """Replays find what steps find that Python launches, on both sides of the edge of a part."""
    config, tokens_before, steps = NSAConfig(compression="mlp"), 2040, 24
    torch.manual_seed(8)

    def tensor(heads: int, tokens: int, width: int = 64) -> Tensor:
        return torch.randn(2, heads, tokens, width, device=device).bfloat16()

    phis = [Compression(config, 2, 64, device=device) for _ in range(2)]
    prompt = tensor(2, tokens_before), tensor(2, tokens_before)
    new = [
        (tensor(8, 1), tensor(2, 1), tensor(2, 1), tensor(8, 1, 3).sigmoid()) for _ in range(steps)
    ]
    caches = [ShardedCache(*phis, dist.group.WORLD, max_length=4096) for _ in range(2)]
    for cache in caches:
        cache.fill(*prompt)
    expected = [caches[0].step(*inputs) for inputs in new]

    cache, inputs = caches[1], [x.clone() for x in new[0]]
    for _ in range(2):  # compiles and connects
        cache.step(*inputs)
    cache.fill(*prompt)
    lengths = cache.lengths.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = cache.step(*inputs)
    cache.lengths.copy_(lengths)
    for each, want in zip(new, expected, strict=True):
        for x, y in zip(inputs, each, strict=True):
            x.copy_(y)
        graph.replay()
        torch.testing.assert_close(out, want, rtol=1e-2, atol=1e-2)
