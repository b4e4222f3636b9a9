"""Bench cases of public checkpoints: their references, what the gate finds, the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nsa_flex import NSAConfig
from nsa_flex.bench.cases import checkpoints, full_size
from nsa_flex.bench.cases.case import Case
from nsa_flex.bench.cases.registry import TARGETS, preset
from nsa_flex.bench.measure import gate, reference
from nsa_flex.bench.measure.gate import GateError
from nsa_flex.bench.report import table
from nsa_flex.infllm import InfLLMV2Config
from reference import infllm_v2, minimax_m3, oracle

CPU = torch.device("cpu")
POOLED = InfLLMV2Config(8, 4, 16, window_size=32, topk=3).selection
INDEXED = NSAConfig(16, 16, 16, 3, num_initial_blocks=0, num_local_blocks=1)
TILED = NSAConfig(4, 4, 4, 8, 0, 1, selection="tiled_top_k")


def test_tiles_are_those_of_the_oracle():
    scored = torch.rand(90, 23, dtype=torch.float64)
    blocks, margin = reference.choice(scored, torch.arange(90), TILED)
    for t in range(90):
        expected = oracle.choose(scored[t].numpy(), t, TILED)
        assert [block for block in blocks[t].tolist() if block >= 0] == expected
    assert torch.isinf(margin[: 8 * 4]).all()
    assert (margin[8 * 4 + 4 * 5 :] < 1).any()


def test_max_pooled_scores_are_those_of_the_definition():
    query, key = torch.randn(2, 150, 16).double(), torch.randn(1, 150, 16).double()
    sizes = infllm_v2.Sizes()
    fine, coarse = (
        torch.from_numpy(infllm_v2.window_means(key.numpy(), factor * 8, factor * 4)[0])
        for factor in (1, 4)
    )
    found = reference.max_pooled_scores(
        query, fine, coarse, torch.arange(150), 0.25, POOLED, 4
    ).numpy()
    scores = infllm_v2.group_scores(query.numpy(), key.numpy(), sizes)
    expected = np.maximum(infllm_v2.max_pooled(scores, 10, sizes)[0], 0)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_largest_products_select_as_the_definition():
    query, key = torch.randn(100, 16).double(), torch.randn(100, 16).double()
    positions = torch.arange(100)
    scored = reference.largest_products(query, key, positions, 16)
    blocks, _ = reference.choice(scored, positions, INDEXED)
    expected = minimax_m3.selected_blocks(query[None].numpy(), key.numpy(), 16, 3, 1)[0]
    assert [set(row) - {-1} for row in blocks.tolist()] == expected


@pytest.mark.parametrize(("target", "config"), [("infllm-v2", POOLED), ("minimax-m3", INDEXED)])
def test_the_gate_finds_another_choice(target, config, monkeypatch):
    sides: dict[str, Any] = {"query_heads": 4, "kv_heads": 2, "head_dim": 16, "value_dim": 16}
    case = Case(target, "nsa-eager", True, 160, **sides, dtype="float32", config=config)
    task = TARGETS[target].prepare(case, CPU)
    function = TARGETS[target].function(case, task, "eager")
    assert max(gate.check(TARGETS[target], case, task, function).errors.values()) <= 1
    choice = type(TARGETS[target]).choice

    def of_others(self: Any, *arguments: Any) -> Any:
        blocks, margin = choice(self, *arguments)
        return torch.where(blocks == 1, -1, blocks), margin

    monkeypatch.setattr(type(TARGETS[target]), "choice", of_others)
    with pytest.raises(GateError, match="errors over what is allowed"):
        gate.check(TARGETS[target], case, task, function)


def test_the_preset_has_the_layers_of_the_checkpoints():
    shapes = {(c.target, c.heads, c.head_dim, c.seq_len // 1024) for c in preset("checkpoints")}
    assert shapes == {
        ("core", "32/2", 64, 64), ("minimax-m3", "64/4", 128, 128),
        *(("infllm-v2", heads, 128, n) for heads in ("32/2", "32/8") for n in (64, 128)),
    }  # fmt: skip
    (sizes,) = {c.config for c in preset("checkpoints") if c.target == "infllm-v2"}
    assert checkpoints.infllm_config(sizes).num_blocks == sizes.num_selected_blocks == 96


def test_the_table():
    shape = {"target": "minimax-m3", "heads": "64/4", "head_dim": 128, "value_dim": 128}
    shape |= {"seq_len": 131072, "status": "ok", "commit": "c", "peak_bytes": 2**30}
    rows = [
        {**shape, "implementation": who, "pass": which, "case": f"{who} {which}",
         "median_ms": ms, "p20_ms": ms, "p80_ms": ms}
        for who, times in (("nsa", (100.0, 200.0)), ("sdpa-cudnn", (500.0, 1900.0)))
        for which, ms in zip(("forward", "forward_backward"), times, strict=True)
    ]  # fmt: skip
    (line,) = table.checkpoints(rows).to_numpy().tolist()
    assert line == [
        *("MiniMax-M3", "64/4", "128", "128k", "100 / 500", "5.00", "200 / 1900", "9.50"),
        *("1.0 / 1.0", "c"),
    ]


TINY = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 128,
}  # fmt: skip
TINY_M3 = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "rotary_dim": 8, "index_n_heads": 2, "index_head_dim": 16,
}  # fmt: skip


@pytest.mark.parametrize("name", full_size.RUNS)
def test_a_full_size_run_with_tiny_modules(name):
    pytest.importorskip("transformers")
    changes = TINY_M3 if name.startswith("minimax") else TINY
    row = full_size.row_of(name, full_size.Sizes(CPU, 400, changes))
    assert "failed" not in row, row["failed"]
    assert row["seconds"] > 0


def test_rows_are_of_this_file():
    """What the page shows."""
    path = Path(checkpoints.__file__).parents[1] / "results" / "checkpoints_h100.json"
    assert {row["status"] for row in table.read_rows(path)} == {"ok"}
