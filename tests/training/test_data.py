"""Files to documents to rows: every format, what cannot be read, packing without a loss."""

from __future__ import annotations

import gzip
import itertools
import json
import lzma
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import zstandard
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nsa_flex.training import TrainingError
from nsa_flex.training.config import DataSection
from nsa_flex.training.files import documents, find_files
from nsa_flex.training.models import causal_loss
from nsa_flex.training.packing import IGNORED, Collator, PackedRows, Row
from nsa_flex.training.tokenization import BYTES, load_tokenizer

PARTS = ("input_ids", "labels", "position_ids")
TEXTS = ["first text", "second\ntext, with ünicode", "third"]


def write(folder: Path, name: str) -> Path:
    """The texts as a file of such a name."""
    path = folder / name
    inner = name.removesuffix(".gz").removesuffix(".xz").removesuffix(".zst")
    if inner.endswith(".parquet"):
        table = pyarrow.table({"id": [0, 1, 2], "text": TEXTS})
        pyarrow.parquet.write_table(table, path, row_group_size=2)
        return path
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    data = (lines if inner.endswith(".jsonl") else "\n".join(TEXTS)).encode()
    if name.endswith(".gz"):
        data = gzip.compress(data)
    elif name.endswith(".xz"):
        data = lzma.compress(data)
    elif name.endswith(".zst"):  # of two frames, as parallel compressors write
        half = len(data) // 2
        compress = zstandard.ZstdCompressor().compress
        data = compress(data[:half]) + compress(data[half:])
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("compression", ["", ".gz", ".xz", ".zst"])
@pytest.mark.parametrize("inner", ["a.txt", "a.py", "a.jsonl"])
def test_every_format_gives_its_documents(tmp_path: Path, inner: str, compression: str) -> None:
    found = list(documents(write(tmp_path, inner + compression)))
    expected = TEXTS if inner.endswith(".jsonl") else ["\n".join(TEXTS).encode()]
    assert found == expected


def test_parquet(tmp_path: Path) -> None:
    assert list(documents(write(tmp_path, "a.parquet"))) == TEXTS


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.txt.gz", "EOFError|BadGzipFile|end-of-stream"),
        ("a.txt.xz", "ended before the end-of-stream|LZMAError|EOFError"),
        ("a.jsonl.zst", "ends within a frame"),
        ("a.parquet", "ArrowInvalid"),
    ],
)
def test_a_torn_file_is_named(tmp_path: Path, name: str, message: str) -> None:
    path = write(tmp_path, name)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(TrainingError, match=rf"{re.escape(str(path))} cannot be read .*{message}"):
        list(documents(path))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"text": "x"}\n{"text"', "line 2: "),
        ("a.jsonl", '{"body": "x"}\n', "no field 'text'"),
        ("a.jsonl", '"x"\n', "line 1: string indices"),
        ("a.txt.zst", "no such thing", "ZstdError"),
    ],
)
def test_a_file_that_makes_no_sense(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(TrainingError, match=message):
        list(documents(tmp_path / name))


def test_a_file_that_goes_away_and_a_column_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"gone\.txt cannot be read \(FileNotFoundError"):
        list(documents(tmp_path / "gone.txt"))
    with pytest.raises(TrainingError, match="no field 'body'"):
        list(documents(write(tmp_path, "a.parquet"), "body"))


def test_files_folders_globs_and_the_standard_library(tmp_path: Path) -> None:
    for name in ("b/two.txt", "a.txt", "b/.hidden", ".git/config", "c.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    two, one, three = (tmp_path / name for name in ("b/two.txt", "a.txt", "c.md"))
    assert find_files([str(tmp_path)]) == [one, two, three]
    assert find_files([str(tmp_path / "**" / "*.txt"), str(one)]) == [one, two]
    assert any(path.name == "argparse.py" for path in find_files(["stdlib"]))
    with pytest.raises(ValueError, match=r"data: .*nothing\*\.txt names no file"):
        find_files([str(tmp_path / "nothing*.txt")])


def rows_of(paths: list[Path], count: int | None = None, **options: Any) -> list[Any]:
    data = DataSection(files=("x",), **{"seq_len": 16, **options})
    rows = PackedRows(paths, BYTES, data, seed=3, held_out=None, epochs=1)
    return list(itertools.islice(rows, count))


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    found = []
    for number in range(9):
        found.append(tmp_path / f"{number}.txt")
        found[-1].write_bytes(bytes([65 + number]) * (1 + 5 * number))
    return found


@pytest.mark.parametrize("documents_per_row", [1, 2, 8])
def test_packing_loses_nothing(paths: list[Path], documents_per_row: int) -> None:
    """Every byte of every file is in one row, in order, whatever ends in padding."""
    rows = rows_of(paths, documents_per_row=documents_per_row, shuffle=1)
    real = np.concatenate([row.ids[: row.real] for row in rows])
    expected = b"".join(path.read_bytes() + b"\0" for path in paths)
    assert bytes(real.astype(np.uint8)) == expected
    assert all(len(row.starts) <= documents_per_row for row in rows)
    for row in rows:  # a document begins at each start, and nowhere else
        ends = np.flatnonzero(row.ids[: row.real - 1] == 0) + 1
        assert row.starts.tolist() == [0, *ends]


def test_the_order_follows_from_the_seed(paths: list[Path]) -> None:
    first, again = rows_of(paths, shuffle=4), rows_of(paths, shuffle=4)
    plain = rows_of(paths, shuffle=1)
    same = [np.array_equal(a.ids, b.ids) for a, b in zip(first, again, strict=True)]
    assert all(same)
    assert not all(np.array_equal(a.ids, b.ids) for a, b in zip(first, plain, strict=False))


def test_held_out_documents_are_no_others(paths: list[Path]) -> None:
    data = DataSection(files=("x",), held_out_share=0.4, seq_len=64, shuffle=1)
    seen = {}
    for held_out in (True, False):
        rows = PackedRows(paths, BYTES, data, seed=0, held_out=held_out, epochs=1)
        seen[held_out] = set(np.concatenate([row.ids for row in rows]).tolist()) - {0}
    assert seen[True]
    assert seen[False]
    assert not seen[True] & seen[False]
    assert len(seen[True] | seen[False]) == len(paths)


def test_nothing_to_train_on(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match=r"data\.files hold no document"):
        rows_of([tmp_path / "empty.txt"])


def test_batches_of_separate_documents(paths: list[Path]) -> None:
    rows = rows_of(paths, documents_per_row=3, shuffle=1)
    data = DataSection(files=("x",), seq_len=16, documents_per_row=3)
    shapes = set()
    for pair in zip(rows[::2], rows[1::2], strict=False):
        batch = Collator(data)(list(pair))
        shapes.add(tuple((name, tuple(x.shape)) for name, x in batch.items()))
        bounds = batch["cu_seq_lens_q"]
        assert bounds[0] == 0
        assert bounds[-1] == 32
        assert (bounds.diff() >= 0).all()
        ids, labels, positions = (
            batch[name][0] for name in ("input_ids", "labels", "position_ids")
        )
        for start, end in itertools.pairwise(bounds.tolist()):
            assert positions[start:end].tolist() == list(range(end - start))
            if end > start:
                assert labels[start] == IGNORED
        counted = labels != IGNORED
        assert torch.equal(labels[counted], ids[counted])
        real = torch.cat([torch.arange(16) < row.real for row in pair])
        assert not counted[~real].any()
        assert (counted | (positions == 0) | ~real).all()
    assert len(shapes) == 1


def test_batches_of_joined_documents(paths: list[Path]) -> None:
    data = DataSection(files=("x",), seq_len=16, documents="joined")
    rows = rows_of(paths, documents="joined", shuffle=1)
    batch = Collator(data)(rows[:3])
    assert {name: tuple(x.shape) for name, x in batch.items()} == {
        "input_ids": (3, 16),
        "labels": (3, 16),
    }
    last = Collator(data)(rows[-1:])["labels"][0]
    assert (last[rows[-1].real :] == IGNORED).all()


def test_rows_without_anything_to_learn() -> None:
    """What the user says, padding, and the first token of a document teach nothing."""

    def row(*ids: int, starts: tuple[int, ...] = (0,), real: int | None = None) -> Row:
        return Row(np.array(ids), np.array(starts), len(ids) if real is None else real)

    assert row(5, ~6, 7).is_learned
    assert not row(5, ~6, ~7).is_learned
    assert not row(5, ~6, 0, 0, real=2).is_learned
    assert not row(5, ~6, 7, ~8, starts=(0, 2)).is_learned


@pytest.mark.parametrize("items", [None, 0, torch.tensor(0)])
def test_a_batch_without_labels_has_a_loss_and_gradients_of_0(items: Any) -> None:
    logits = torch.randn(1, 4, 7, requires_grad=True)
    loss = causal_loss(logits, torch.full((1, 4), IGNORED), 7, items)
    loss.backward()
    assert loss == 0
    assert torch.equal(logits.grad, torch.zeros(1, 4, 7))
    labels = torch.tensor([[1, 2, IGNORED, 3]])
    whole = torch.nn.functional.cross_entropy(logits[0, [0, 2]], labels[0, [1, 3]])
    torch.testing.assert_close(causal_loss(logits, labels, 7), whole)


def test_a_tokenizer_of_transformers(tmp_path: Path) -> None:
    words = {"<end>": 0, "<unknown>": 1, "first": 2, "text": 3}
    backend = RustTokenizer(models.WordLevel(words, unk_token="<unknown>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(
        tmp_path / "good"
    )
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path / "endless")
    found = load_tokenizer(str(tmp_path / "good"))
    assert found.encode("first text here").tolist() == [2, 3, 1, 0]
    assert found.encode(b"text").tolist() == [3, 0]
    assert (found.vocab_size, found.end) == (4, 0)
    with pytest.raises(ValueError, match="has no eos_token"):
        load_tokenizer(str(tmp_path / "endless"))
    with pytest.raises(ValueError, match="expected bytes or the directory of a tokenizer"):
        load_tokenizer("nowhere")


def test_bytes() -> None:
    assert BYTES.encode("ü").tolist() == [195, 188, 0]
    assert BYTES.encode(b"ab").tolist() == [97, 98, 0]
