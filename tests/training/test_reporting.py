"""What a run tells beyond its losses: perplexity, bits a byte, samples, TensorBoard and W&B."""

from __future__ import annotations

import json
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
    """Those of the last step from the saved model, as far as its 64 positions go; the prompt is
    held-out text.
    """
    run, _ = told
    rows = rows_of(run)["samples"]
    assert [row["step"] for row in rows] == [6, 12]
    assert len({row["prompt"] for row in rows}) == 1
    prompt = rows[-1]["prompt"]
    assert any(prompt in path.read_text() for path in (run.parent / "texts").iterdir())
    model = nsa_flex.load(run / "model").eval()
    ids = torch.tensor([list(prompt.encode())])
    longest = 65 - ids.shape[1]  # nothing reads the last one
    out = model.generate(ids, max_new_tokens=longest, do_sample=False, pad_token_id=0)
    new = out[0, ids.shape[1] :].tolist()
    assert rows[-1]["text"] == BYTES.decode(new)
    assert rows[-1]["text"] == bytes_tokenizer().decode(new, skip_special_tokens=True)


def test_ids_past_the_bytes_are_no_text() -> None:
    """A checkpoint may have more ids than its tokenizer, and write them in a sample."""
    assert BYTES.decode([65, 300, 66, 256, 0]) == "AB"


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
    """Losses, and by name all that gates.csv has of each layer, and the means over layers.

    The files are whole once the run has ended.
    """
    pytest.importorskip("wandb")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = {"report_to": ["tensorboard", "wandb"]}
    out = tmp_path / "run"
    data = {"documents": "joined"}  # rows in which blocks are chosen
    train(small_config(out, write_texts(tmp_path / "texts"), run=run, data=data))
    events = accumulator.EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    board = {tag: [each.value for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    [offline] = (out / "wandb").glob("offline-run-*/*.wandb")
    history = histories(offline)
    rows = rows_of(out)
    losses = [row["loss"] for row in rows["training"] if row["loss"] is not None]
    names = [name for name in rows["gates"][0] if name not in ("session", "step", "layer")]
    assert {"gate_selected", "share_sliding", "block_recall", "score_recall"} <= set(names)
    for told in (board, history):
        assert told["train/loss"] == pytest.approx(losses, abs=1e-4)
        assert len(told["eval/perplexity"]) == len(told["eval/bits_per_byte"]) == 2
        for name in names:  # what step 0 gives is measured before anything is logged
            layers = [
                [row[name] for row in rows["gates"] if row["layer"] == layer and row["step"]]
                for layer in dict.fromkeys(row["layer"] for row in rows["gates"])
            ]
            for number, numbers in enumerate(layers):
                assert told[f"train/nsa/layer_{number}/{name}"] == pytest.approx(numbers, rel=1e-5)
            means = [sum(each) / len(each) for each in zip(*layers, strict=True)]
            assert told[f"train/nsa/{name}"] == pytest.approx(means, rel=1e-5)
    assert [each.step for each in events.Scalars("eval/perplexity")] == [6, 12]


def histories(file: Path) -> dict[str, list[float]]:
    """The numbers in a file of W&B: records of protobuf in blocks, as LevelDB writes its log."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, block, head = file.read_bytes(), 32768, 7
    at, record = head, b""
    found: dict[str, list[float]] = {}
    while at + head <= len(data):
        if (left := block - at % block) < head:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        at += head + length
        record += data[at - length : at]
        if kind in (1, 4):  # whole, or its last part
            for item in Record.FromString(record).history.item:
                name = item.key or "/".join(item.nested_key)
                found.setdefault(name, []).append(json.loads(item.value_json))
            record = b""
    return found
