"""The recipes of the training page: twenty steps each, with the artefacts of telemetry."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from training.tiny_run import rows_of

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "train.md"
PYTHON = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
STEPS, LAYERS = 20, 2
# Section of the page to the folder that its telemetry writes to.
TOLD = {"Trainer": "trained", "PEFT": "adapted", "TRL": "sft", "accelerate and DDP": "accelerated"}


def sections() -> dict[str, list[str]]:
    """Heading to the Python code under it; "" is what comes before the first."""
    parts = re.split(r"^## (.*)\n", PAGE.read_text(), flags=re.M)
    code = [PYTHON.findall(part) for part in parts[::2]]
    return dict(zip(["", *parts[1::2]], code, strict=True))


def run_section(heading: str) -> dict[str, Any]:
    """Run the page's preparation and one section; what it defined."""
    known: dict[str, Any] = {}
    for code in (*sections()[""], *sections()[heading]):
        exec(compile(code, f"{PAGE.name}, {heading}", "exec"), known)
    return known


@pytest.mark.parametrize("heading", TOLD)
def test_twenty_steps_with_telemetry(
    heading: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    known = run_section(heading)
    check_artefacts(tmp_path / TOLD[heading])
    if heading == "PEFT":
        merged_is_the_adapted_model(known)


def check_artefacts(folder: Path) -> None:
    """Twenty steps with all rows, a loss that fell and gates that moved."""
    found = rows_of(folder)
    rows = [row for row in found["training"] if row["loss"] is not None]
    assert [row["step"] for row in rows] == [5, 10, 15, 20]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert [row["step"] for row in found["gates"]] == [0] * LAYERS + [STEPS] * LAYERS
    moved = [row["gate_selected"] for row in found["gates"]]
    assert moved[:LAYERS] != moved[LAYERS:]
    calls = [row["calls"] for row in found["fallback_counters"] if row["step"] == STEPS]
    assert calls == [STEPS * LAYERS] * 3
    assert found["heartbeat"][-1]["phase"] == "done"


@torch.no_grad()
def merged_is_the_adapted_model(known: dict[str, Any]) -> None:
    """And the adapter changed it."""
    import nsa_flex

    ids = known["ids"]
    adapted = known["peft"].AutoPeftModelForCausalLM.from_pretrained("adapter")(ids).logits
    merged = nsa_flex.load("merged")(ids).logits
    base = nsa_flex.load("base")(ids).logits
    torch.testing.assert_close(merged, adapted)
    assert not torch.allclose(base, adapted)
