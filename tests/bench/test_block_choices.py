"""The study of block choices at a tiny size: rows, what exact blocks and dense layers change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nsa_flex.bench.quality import block_choices
from nsa_flex.bench.quality.block_choices import Bench, Choice, exact_blocks, run
from nsa_flex.bench.quality.variants import config_of
from nsa_flex.training.models import build_model
from nsa_flex.training.tokenization import BYTES

CORPUS = "0123456789ab"
TINY = {"compress_block_size": 8, "compress_stride": 8, "select_block_size": 16}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    config = config_of("dense", "tiny")
    torch.manual_seed(0)
    model = build_model(config.model, config.data, BYTES)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.3)  # attention that is not flat
    path = tmp_path_factory.mktemp("dense")
    model.save_pretrained(path)
    rows = torch.randint(256, (2, 128), generator=torch.Generator().manual_seed(1))
    return Bench(path, CORPUS, rows, (64, 128), torch.device("cpu"))


def loss_of(bench: Bench, choice: Choice | None, length: int = 128) -> float:
    row = bench.dense_row() if choice is None else bench.row(choice)
    return row["losses"][str(length)]["loss"]


def test_all_blocks_and_all_layers_dense_lose_nothing(bench: Bench) -> None:
    dense = loss_of(bench, None)
    whole = Choice("whole", {**TINY, "num_selected_blocks": 8})
    assert loss_of(bench, whole) == pytest.approx(dense, abs=1e-4)
    few = Choice("few", {**TINY, "num_selected_blocks": 4})
    assert abs(loss_of(bench, few) - dense) > 1e-3
    first = Choice("first", few.nsa, dense_layers=(1,))
    second = Choice("second", few.nsa, dense_layers=(0,))
    losses = {loss_of(bench, each) for each in (few, first, second)}
    assert len(losses) == 3
    assert dense not in losses


def test_exact_blocks_are_those_of_most_dense_mass(bench: Bench) -> None:
    """Selected by exact mass, as many blocks as there are lose nothing; fewer hold the most."""
    ids = bench.rows[:1]
    outputs = {}
    for name, count, exact in (("few", 4, False), ("exact", 4, True), ("whole", 8, True)):
        config = Choice("x", {**TINY, "num_selected_blocks": count}).config
        model = bench.model(nsa=config).eval()
        with torch.no_grad():
            if exact:
                with exact_blocks(model):
                    outputs[name] = model(input_ids=ids).logits
            else:
                outputs[name] = model(input_ids=ids).logits
    dense = bench.model(attention="dense").eval()
    with torch.no_grad():
        wanted = dense(input_ids=ids).logits
    distance = {name: (found - wanted).norm().item() for name, found in outputs.items()}
    assert distance["whole"] < 1e-2 * wanted.norm()
    assert distance["whole"] < distance["exact"] < distance["few"]


def test_rows_are_written_as_they_come_and_not_measured_again(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {**TINY, "num_selected_blocks": 4}
    monkeypatch.setattr(block_choices, "CHOICES", (Choice("few", few), Choice("e", few, True)))
    monkeypatch.setattr(block_choices, "LAYER_BLOCKS", few)
    rows = run(bench, tmp_path / "rows.json")
    assert [row["choice"] for row in rows][:5] == ["dense", "few", "e", "layer 0", "layer 1"]
    assert rows[-1]["choice"] in {"dense 0", "dense 1"}
    assert len(rows[1]["held_mass"]["128"]) == 2
    assert rows[1]["held_mass"]["64"] == [1.0, 1.0]
    assert all(0.4 < held < 1 for held in rows[1]["held_mass"]["128"])
    assert "held_mass" not in rows[2]
    monkeypatch.setattr(Bench, "row", lambda *given: pytest.fail("measured again"))
    monkeypatch.setattr(Bench, "dense_row", lambda *given: pytest.fail("measured again"))
    assert run(bench, tmp_path / "rows.json") == rows
    assert {row["corpus"] for row in rows} == {CORPUS}
    with pytest.raises(ValueError, match="holds rows of another checkpoint or corpus"):
        run(replace(bench, corpus="other"), tmp_path / "rows.json")
