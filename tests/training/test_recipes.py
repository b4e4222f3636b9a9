"""The recipes of the training page: all its code, twenty steps each, telemetry's artefacts.

Each section runs once, behind the page's preparation and the sections whose files it reads; that
is why `test_docs` leaves the page out.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from training.tiny_run import rows_of

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "train.md"
# Code, and what stands behind it of its output.
PYTHON = re.compile(r"^```python\n(.*?)^```(?:\n\n```text\n(.*?)^```)?", re.M | re.S)
STEPS, LAYERS = 20, 2
# Sections that run one after another, and the folder that their telemetry writes to.
RECIPES = {
    ("Trainer", "Quantisation"): "trained",
    ("PEFT",): "adapted",
    ("TRL",): "sft",
    ("accelerate and DDP",): "accelerated",
    ("FSDP2",): None,  # its functions are called in patching/test_wrapped.py and distributed/
}


def sections() -> dict[str, list[tuple[str, str]]]:
    """Heading to the Python code under it, and its output; "" is what comes before the first."""
    parts = re.split(r"^## (.*)\n", PAGE.read_text(), flags=re.M)
    code = [PYTHON.findall(part) for part in parts[::2]]
    return dict(zip(["", *parts[1::2]], code, strict=True))


def run_sections(headings: tuple[str, ...]) -> dict[str, Any]:
    """Run the page's preparation and some sections; what they defined."""
    known: dict[str, Any] = {}
    for heading in ("", *headings):
        for code, shown in sections()[heading]:
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(code, f"{PAGE.name}, {heading}", "exec"), known)
            if shown:
                assert printed.getvalue() == shown
    return known


def test_every_section_is_run() -> None:
    with_code = {heading for heading, code in sections().items() if code and heading}
    assert with_code == {heading for headings in RECIPES for heading in headings}


@pytest.mark.kept(lambda headings: headings != ("TRL",))
@pytest.mark.parametrize("headings", RECIPES, ids=" and ".join)
def test_twenty_steps_with_telemetry(
    headings: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    known = run_sections(headings)
    folder = RECIPES[headings]
    if folder is not None:
        check_artefacts(tmp_path / folder)
    if "PEFT" in headings:
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
