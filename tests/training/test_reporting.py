"""What a run tells beyond its losses: perplexity, bits a byte, samples, TensorBoard and W&B."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from training.small_config import small_config, write_texts
from training.tiny_run import rows_of

import nsa_flex
from nsa_flex.training import reporting
from nsa_flex.training.dry_run import dry_run
from nsa_flex.training.run import train
from nsa_flex.training.tokenization import BYTES, bytes_tokenizer


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run, and what `train` returned."""
    folder = tmp_path_factory.mktemp("told")
    config = small_config(folder / "run", write_texts(folder / "texts"))
    return folder / "run", train(config)


def test_perplexity_and_bits_a_byte(told: tuple[Path, dict[str, Any]]) -> None:
    """Of the held-out rows, which hold a few ends of documents besides their bytes."""
    run, result = told
    rows = [row for row in rows_of(run)["training"] if row["held_out_loss"] is not None]
    assert [row["step"] for row in rows] == [6, 12]
    for row in rows:
        bits = row["held_out_loss"] / math.log(2)
        assert row["perplexity"] == pytest.approx(math.exp(row["held_out_loss"]))
        assert bits <= row["bits_per_byte"] < 1.05 * bits
    assert result["perplexity"] == rows[-1]["perplexity"]
    assert result["bits_per_byte"] == rows[-1]["bits_per_byte"]


def test_samples_are_what_the_model_writes(told: tuple[Path, dict[str, Any]]) -> None:
    """Those of the last step from the saved model; the prompt is held-out text."""
    run, _ = told
    rows = rows_of(run)["samples"]
    assert [row["step"] for row in rows] == [6, 12]
    assert len({row["prompt"] for row in rows}) == 1
    prompt = rows[-1]["prompt"]
    assert any(prompt in path.read_text() for path in (run.parent / "texts").iterdir())
    model = nsa_flex.load(run / "model").eval()
    ids = torch.tensor([list(prompt.encode())])
    out = model.generate(ids, max_new_tokens=64, do_sample=False, pad_token_id=0)
    new = out[0, ids.shape[1] :].tolist()
    assert rows[-1]["text"] == BYTES.decode(new)
    assert rows[-1]["text"] == bytes_tokenizer().decode(new, skip_special_tokens=True)


def test_a_run_without_samples(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts")
    train(small_config(tmp_path / "run", texts, run={"sample_tokens": 0}, training={"steps": 6}))
    assert not (tmp_path / "run" / "samples.jsonl").exists()


def test_a_package_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "find_spec", lambda name: None)
    config = small_config(
        tmp_path / "run", write_texts(tmp_path / "texts"), run={"report_to": ["wandb"]}
    )
    message = r"names wandb, which is not installed; .* pip install 'nsa-flex\[report\]'"
    for call in (train, dry_run):
        with pytest.raises(ModuleNotFoundError, match=message):
            call(config)
    assert not (tmp_path / "run").exists()


def test_tensorboard_and_wandb(tmp_path: Path) -> None:
    """Losses, gates and blocks of each layer; the files are whole once the run has ended."""
    pytest.importorskip("wandb")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = {"report_to": ["tensorboard", "wandb"]}
    out = tmp_path / "run"
    train(small_config(out, write_texts(tmp_path / "texts"), run=run))
    events = accumulator.EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    rows = rows_of(out)
    losses = [row["loss"] for row in rows["training"] if row["loss"] is not None]
    assert [each.value for each in events.Scalars("train/loss")] == pytest.approx(losses, abs=1e-4)
    assert [each.step for each in events.Scalars("eval/bits_per_byte")] == [6, 12]
    assert len(events.Scalars("eval/perplexity")) == 2
    first = [row["entropy"] for row in rows["gates"] if row["layer"].startswith("model.layers.0")]
    seen = [each.value for each in events.Scalars("train/nsa/layer_0/entropy")]
    assert seen == pytest.approx(first[1:])  # that of step 0 is measured before anything is logged
    assert len(events.Scalars("train/nsa/never_chosen")) == len(seen)
    [offline] = (out / "wandb").glob("offline-run-*/*.wandb")
    assert offline.stat().st_size > 10_000
