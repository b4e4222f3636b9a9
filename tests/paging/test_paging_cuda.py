"""NSA over pages on CUDA: kernels, no waiting for the device, one captured step for all."""

from __future__ import annotations

import pytest
import torch

from nsa_flex.config import NSAConfig
from nsa_flex.module import NSAAttention
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
from nsa_flex.paging.step import attend_step, unsupported_reason
from reference.modes import no_synchronization

pytestmark = pytest.mark.gpu

PAGE, NUM_PAGES, KV_HEADS, GROUP, DIM = 256, 64, 8, 4, 128
LENGTHS = (5000, 300, 31, 4096)


def random_layer() -> PagedLayer:
    config = NSAConfig(compression="mlp")
    rows = rows_per_page(PAGE, config)
    memory = torch.randn(NUM_PAGES * rows, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    pages = LayerPages.carve(memory, 0, rows, PAGE, config)
    sizes = {"num_query_heads": KV_HEADS * GROUP, "num_kv_heads": KV_HEADS, "head_dim": DIM}
    module = NSAAttention(KV_HEADS * GROUP * DIM, config=config, **sizes).to(
        "cuda", torch.bfloat16
    )
    module.requires_grad_(False)
    return PagedLayer(pages, module.compress_key, module.compress_value)


def table_of(lengths: tuple[int, ...]) -> torch.Tensor:
    counts = [length // PAGE + 1 for length in lengths]
    order = iter(torch.randperm(NUM_PAGES - 1)[: sum(counts)].tolist())
    table = torch.full((len(lengths), max(counts)), NUM_PAGES - 1)
    for row, count in enumerate(counts):
        table[row, :count] = torch.tensor([next(order) for _ in range(count)])
    return table.cuda()


def steps_of(layer: PagedLayer, table: torch.Tensor, past: torch.Tensor) -> PagedBatch:
    lengths = [Length(length, 1) for length in LENGTHS]
    written = layer.pages.slots(table, past[:, None])
    flat = Slots(written.page[:, 0], written.offset[:, 0])
    return PagedBatch.of_steps(lengths, past, flat, table, NUM_PAGES - 1, is_captured=True)


def new_tokens(count: int) -> NewTokens:
    def normal(heads: int, dim: int) -> torch.Tensor:
        return torch.randn(1, heads, count, dim, device="cuda", dtype=torch.bfloat16)

    return NewTokens(
        normal(KV_HEADS * GROUP, DIM),
        normal(KV_HEADS, DIM),
        normal(KV_HEADS, DIM),
        normal(KV_HEADS * GROUP, 3),
    )


def test_kernels_and_operations_agree() -> None:
    layer, table = random_layer(), table_of(LENGTHS)
    positions = torch.tensor(LENGTHS, device="cuda", dtype=torch.int32)
    new = new_tokens(len(LENGTHS))
    query, gates = (x[0].transpose(0, 1)[:, :, None] for x in (new.query, new.gates))
    inputs = (layer.pages, query, gates, table, positions, layer.config, DIM**-0.5)
    assert unsupported_reason(layer.pages, query, table, layer.config) is None
    found, expected = attend_step(*inputs), attend_step(*inputs, backend="dense")
    error = (found - expected).float().norm() / expected.float().norm()
    assert error < 4 * torch.finfo(torch.bfloat16).eps


def test_a_pass_waits_for_nothing() -> None:
    layer, table = random_layer(), table_of(LENGTHS)
    past = torch.tensor(LENGTHS, device="cuda", dtype=torch.int32)
    for _ in range(3):  # kernels compile, plans are recorded
        attend(layer, new_tokens(len(LENGTHS)), steps_of(layer, table, past), DIM**-0.5)
    new, batch = new_tokens(len(LENGTHS)), steps_of(layer, table, past)
    torch.cuda.synchronize()
    with no_synchronization():
        attend(layer, new, batch, DIM**-0.5)


def test_a_captured_step_serves_other_lengths() -> None:
    layer, table = random_layer(), table_of(LENGTHS)
    past = torch.tensor(LENGTHS, device="cuda", dtype=torch.int32)
    new = new_tokens(len(LENGTHS))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            attend(layer, new, steps_of(layer, table, past), DIM**-0.5)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = attend(layer, new, steps_of(layer, table, past), DIM**-0.5)
    for shift in (0, -17, -3):
        past.copy_(torch.tensor(LENGTHS, device="cuda") + shift)
        graph.replay()
        found = out.clone()
        expected = attend(layer, new, steps_of(layer, table, past), DIM**-0.5)
        torch.testing.assert_close(found, expected, atol=0, rtol=0)
