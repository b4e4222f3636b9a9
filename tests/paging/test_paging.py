"""NSA over pages against the oracle: any pages, any chunks, requests side by side."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa_flex.compression import Compression
from nsa_flex.config import BRANCHES
from nsa_flex.paging import (
    LayerPages,
    Length,
    NewTokens,
    PagedBatch,
    PagedLayer,
    Slots,
    attend,
    rows_per_page,
)
from patching.tiny_models import NSA
from reference import oracle
from reference.launches import SUBSETS

HEADS, KV_HEADS, DIM = 4, 2, 8
NUM_PAGES, UNUSED = 160, 3
SCALE = DIM**-0.5
# Float64 sums of some hundred terms: last places.
FLOAT64_LIMIT = 256 * torch.finfo(torch.float64).eps


class Request:
    """One request: all its tokens, the pages it holds, how many tokens are stored."""

    def __init__(self, length: int, compress: tuple[Compression, Compression]) -> None:
        self.query = torch.randn(1, HEADS, length, DIM, dtype=torch.float64)
        self.key, self.value = torch.randn(2, 1, KV_HEADS, length, DIM, dtype=torch.float64)
        config = compress[0].config
        self.gates = torch.rand(1, HEADS, length, len(config.branches), dtype=torch.float64)
        self.pages: list[int] = []
        self.past, self.length = 0, length
        count = config.num_compressed_blocks(length)
        ck, cv = (
            phi(x)[:, :, :count] for phi, x in zip(compress, (self.key, self.value), strict=True)
        )
        self.expected = torch.from_numpy(
            oracle.forward(
                *(self.query, self.key, self.value, ck, cv),
                oracle.every_gate(self.gates, config.branches),
                config,
                scale=SCALE,
            ).out
        )
        self.outputs: list[Tensor] = []

    def tokens(self, count: int) -> NewTokens:
        new = slice(self.past, self.past + count)
        return NewTokens(*(x[:, :, new] for x in (self.query, self.key, self.value, self.gates)))


class Engine:
    """Hands out pages in disorder, as an engine does that has run for a while."""

    def __init__(self, page_size: int, kind: Any = "mlp", branches: Any = BRANCHES) -> None:
        config = replace(NSA, compression=kind, branches=branches)
        self.compress = tuple(
            Compression(config, KV_HEADS, DIM, dtype=torch.float64).requires_grad_(False)
            for _ in range(2)
        )
        for phi in self.compress:
            for parameter in phi.parameters():
                parameter.data += 0.3 * torch.randn_like(parameter)
        self.page_size = page_size
        rows = rows_per_page(page_size, config)
        # What other requests left behind: finite, and not small.
        memory = 100 * torch.randn(NUM_PAGES * 2 * rows, KV_HEADS, DIM, dtype=torch.float64)
        pages = LayerPages.carve(memory, rows, 2 * rows, page_size, config)  # of the second layer
        self.layer = PagedLayer(pages, *self.compress)
        self.free = [page for page in range(NUM_PAGES) if page != UNUSED]
        random.shuffle(self.free)

    def run(self, chunks: list[tuple[Request, int]]) -> None:
        """One pass: some new tokens of each request."""
        lengths = [Length(request.past, count) for request, count in chunks]
        for request, count in chunks:
            while len(request.pages) * self.page_size < request.past + count:
                request.pages.append(self.free.pop())
        width = max(len(request.pages) for request, _ in chunks)
        table = [request.pages + [0] * (width - len(request.pages)) for request, _ in chunks]
        places = [
            (request.pages[token // self.page_size], token % self.page_size)
            for request, count in chunks
            for token in range(request.past, request.past + count)
        ]
        fresh = all(length.past == 0 for length in lengths)
        batch = PagedBatch.of(
            lengths,
            torch.tensor([0, *(length.new for length in lengths)]).cumsum(0),
            torch.tensor([length.past for length in lengths]),
            Slots(*torch.tensor(places).unbind(1)),
            None if fresh else torch.tensor(table),
            UNUSED,
            self.layer.config,
        )
        parts = [request.tokens(count) for request, count in chunks]
        new = NewTokens(*(torch.cat(x, 2) for x in zip(*parts, strict=True)))
        out = attend(self.layer, new, batch, SCALE)
        split = out.split([count for _, count in chunks], 2)
        for (request, count), part in zip(chunks, split, strict=True):
            request.outputs.append(part)
            request.past += count


def assert_as_alone(requests: list[Request]) -> None:
    for request in requests:
        found = torch.cat(request.outputs, 2)
        expected = request.expected[:, :, : request.past]
        assert oracle.relative_error(found, expected) < FLOAT64_LIMIT


@pytest.mark.parametrize("page_size", [4, 12, 16, 64])
@pytest.mark.parametrize("kind", ["mean", "mlp"])
def test_whole_prompts_then_tokens_are_each_request_alone(page_size: int, kind: str) -> None:
    engine = Engine(page_size, kind)
    requests = [Request(length, engine.compress) for length in (9, 40, 61, 8)]
    engine.run([(request, request.length - 7) for request in requests])
    for _ in range(7):
        engine.run([(request, 1) for request in requests])
    assert_as_alone(requests)


@pytest.mark.parametrize("branches", SUBSETS, ids="+".join)
def test_absent_branches_have_no_memory(branches: Any) -> None:
    """Prompts side by side, a chunk behind a past, single tokens."""
    engine = Engine(12, "mean", branches)
    reads = ("compressed" in branches) + engine.layer.config.compresses
    assert rows_per_page(12, engine.layer.config) == 2 * 12 + reads * 3
    compressed = []
    for name, phi in zip(("key", "value"), engine.compress, strict=True):
        phi.register_forward_hook(lambda *_, name=name: compressed.append(name))
    requests = [Request(length, engine.compress) for length in (40, 70, 9)]
    compressed.clear()
    engine.run([(requests[0], 20), (requests[1], 30)])
    engine.run([(requests[0], 13), (requests[1], 1), (requests[2], 2)])
    for _ in range(7):
        engine.run([(request, 1) for request in requests])
    assert_as_alone(requests)
    assert set(compressed) == set(("key", "value")[:reads])


@pytest.mark.parametrize("seed", range(4))
def test_any_chunks_side_by_side_are_each_request_alone(seed: int) -> None:
    random.seed(seed)
    engine = Engine(random.choice([4, 8, 12, 32]))
    requests = [Request(random.randrange(1, 100), engine.compress) for _ in range(5)]
    while waiting := [request for request in requests if request.past < request.length]:
        chosen = random.sample(waiting, random.randint(1, len(waiting)))
        longest = random.choice([1, 3, 40])
        engine.run(
            [
                (request, min(random.randint(1, longest), request.length - request.past))
                for request in chosen
            ]
        )
    assert_as_alone(requests)


def test_a_shared_prefix_serves_whoever_goes_on_from_it() -> None:
    engine = Engine(page_size=8)
    first, second = (Request(70, engine.compress) for _ in range(2))
    for name in ("query", "key", "value", "gates"):
        getattr(second, name)[:, :, :32] = getattr(first, name)[:, :, :32]
    count = NSA.num_compressed_blocks(70)
    compressed = [
        phi(x)[:, :, :count]
        for phi, x in zip(engine.compress, (second.key, second.value), strict=True)
    ]
    expected = oracle.forward(
        *(second.query, second.key, second.value, *compressed, second.gates), NSA, scale=SCALE
    ).out
    engine.run([(first, 70)])
    second.pages, second.past = first.pages[:4], 32
    engine.run([(second, 20)])
    for _ in range(18):
        engine.run([(second, 1)])
    found = torch.cat(second.outputs, 2)
    assert oracle.relative_error(found, expected[:, :, 32:]) < FLOAT64_LIMIT


def test_a_page_holds_the_compressed_rows_that_end_in_it() -> None:
    engine = Engine(page_size=8, kind="mean")
    request = Request(24, engine.compress)
    engine.run([(request, 24)])
    # Tokens 7, 11, 15, 19 and 23 are the last of blocks 0 to 4; pages end with 7, 15 and 23.
    rows = engine.layer.pages.compressed_key[torch.tensor(request.pages)].flatten(0, 1)
    expected = request.key[0].unfold(1, 8, 4).mean(-1).transpose(0, 1)
    torch.testing.assert_close(rows[1:], expected)


def test_pages_must_end_where_blocks_may() -> None:
    with pytest.raises(ValueError, match=r"page_size=10 must be a multiple of compress_stride=4"):
        rows_per_page(10, NSA)
