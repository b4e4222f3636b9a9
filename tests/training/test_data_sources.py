"""Data sets on disk, mixtures, patterns, conversations, the cache of tokens, and the report."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, pre_tokenizers
from training.begun_run import Rows, begin, quiet_config
from training.small_config import WORDS, write_texts
from transformers import PreTrainedTokenizerFast

from nsa_flex.training import TrainingError, token_cache
from nsa_flex.training.data_report import data_report
from nsa_flex.training.files import documents, find_files
from nsa_flex.training.packing import IGNORED
from nsa_flex.training.run import train
from nsa_flex.training.texts import Texts, find_texts, with_cache
from nsa_flex.training.tokenization import plain_ids

CHAT = (
    "{% for message in messages %}{{ message['role'] }} : "
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }} <end>"
    "{% endgeneration %}{% else %}{{ message['content'] }}{% endif %} {% endfor %}"
)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("sources") / "texts")


def write_tokenizer(folder: Path, template: str | None = CHAT) -> Path:
    names = ["<end>", "<unknown>", "user", "assistant", ":", *WORDS]
    backend = RustTokenizer(
        models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unknown>")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    found.chat_template = template
    found.save_pretrained(folder)
    return folder


def conversations(count: int = 30) -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": " ".join(WORDS[i % 5 : 6])},
                {"role": "assistant", "content": " ".join(WORDS[4 : 7 + i % 4])},
            ]
        }
        for i in range(count)
    ]


def write_chats(folder: Path) -> Path:
    folder.mkdir()
    lines = [json.dumps(each) for each in conversations()]
    (folder / "chats.jsonl").write_text("\n".join(lines))
    return folder


@pytest.mark.parametrize("split", [False, True])
def test_a_data_set_on_disk(tmp_path: Path, split: bool) -> None:
    """Shuffled, so that it is saved through indices; what describes it is no text."""
    rows = datasets.Dataset.from_dict({"n": [*range(9)], "text": [f"text {i}" for i in range(9)]})
    rows = rows.shuffle(seed=1)
    saved = datasets.DatasetDict(train=rows, other=rows.select([0])) if split else rows
    saved.save_to_disk(tmp_path / "saved", **({} if split else {"num_shards": 2}))
    files = find_files([str(tmp_path / "saved")], exclude=("*/other/*",))
    assert {path.suffix for path in files} == {".arrow"}
    assert [text for path in files for text in documents(path)] == rows["text"][:]
    with pytest.raises(TrainingError, match="no field 'body'"):
        list(documents(files[0], "body"))
    with pytest.raises(TrainingError, match="field n holds int, not a string"):
        list(documents(files[0], "n"))


def test_include_and_exclude(tmp_path: Path) -> None:
    for name in ("a.py", "a_test.py", "old/b.py", "c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")

    def names(**patterns: tuple[str, ...]) -> list[str]:
        found = find_files([str(tmp_path)], **patterns)
        return [str(path.relative_to(tmp_path)) for path in found]

    assert names(include=("*.py",)) == ["a.py", "a_test.py", "old/b.py"]
    assert names(include=("*.py",), exclude=("*_test.py", "*/old/*")) == ["a.py"]
    with pytest.raises(ValueError, match="names no file; check the path or the pattern"):
        names(include=("*.rs",))


def test_what_is_no_text_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a character lies across two pieces of a file, which is text."""
    monkeypatch.setattr("nsa_flex.training.files.LONGEST_DOCUMENT", 4)
    contents = {"a.txt": "xyzé".encode(), "b.png": b"\x89PNG\0", "c.txt": b"\xe9t\xe9",
                "d.bin": b"\0ab", "e.txt": b"xyz\xc3"}  # fmt: skip
    skipped: dict[Path, str] = {}
    found = {}
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
        found[name] = b"".join(documents(tmp_path / name, skipped=skipped))  # type: ignore[arg-type]
    assert found == {name: contents[name] if name == "a.txt" else b"" for name in contents}
    assert {path.name: why for path, why in skipped.items()} == {
        "b.png": "no UTF-8",
        "c.txt": "no UTF-8",
        "d.bin": "binary",
        "e.txt": "no UTF-8",
    }


def mixture(tmp_path: Path, **data: Any) -> Any:
    write_texts(tmp_path / "small", 3)
    for path in write_texts(tmp_path / "large", 20).iterdir():
        path.write_text(path.read_text().upper())
    entries = [str(tmp_path / name) for name in ("small", "large")]
    options = {"files": entries, "weights": [3, 1], "held_out_files": entries[:1], **data}
    return quiet_config(tmp_path / "run", tmp_path, data=options)


def test_a_mixture_has_the_shares_of_its_weights(tmp_path: Path) -> None:
    """Up to the longest document, at any time."""
    rows = find_texts(mixture(tmp_path)).training_rows()
    ids = np.concatenate([row.ids for row in itertools.islice(rows, 1000)])
    longest = max(each.longest for each in rows.counts)
    upper = [65 <= each <= 90 for each in ids if each > 64]
    assert sum(upper) / len(upper) == pytest.approx(0.25, abs=longest / len(ids))


def test_the_report_of_a_mixture(tmp_path: Path) -> None:
    config = mixture(tmp_path)
    (tmp_path / "small" / "x.bin").write_bytes(b"\0")
    told = data_report(find_texts(config))
    sizes = {
        name: [path.stat().st_size + 1 for path in (tmp_path / name).glob("*.txt")]
        for name in ("small", "large")
    }
    assert told["documents"] == 23
    assert told["tokens"] == sum(map(sum, sizes.values()))
    assert told["longest_document"] == max(map(max, sizes.values()))
    assert told["skipped"] == {"binary": 1}
    assert told["skipped_files"] == [str(tmp_path / "small" / "x.bin")]
    trained = 12 * 2 * 64 * (1 - told["padding_share"])
    assert told["tokens_of_training"] == int(trained)
    assert told["epochs"] == pytest.approx(trained / told["tokens"], rel=1e-3)
    for entry, share in zip(told["entries"], (0.75, 0.25), strict=True):
        own = sum(sizes[Path(entry["entry"]).name])
        assert entry["tokens"] == own
        assert entry["epochs"] == pytest.approx(trained * share / own, rel=1e-3)
    real = sum(row.real for row in find_texts(config).training_rows(epochs=1))
    assert real == told["tokens"]
    assert 0 <= told["padding_share"] < 0.5


def test_a_file_has_one_weight(tmp_path: Path) -> None:
    config = mixture(tmp_path)
    data = dataclasses.replace(config.data, files=(*config.data.files[:1], str(tmp_path)))
    with pytest.raises(ValueError, match=r"small/00\.txt is in two entries, and each has a wei"):
        find_texts(dataclasses.replace(config, data=data))


def first(texts: Texts, count: int = 60) -> list[tuple[bytes, bytes, int]]:
    rows = itertools.islice(texts.training_rows(), count)
    return [(row.ids.tobytes(), row.starts.tobytes(), row.real) for row in rows]


@pytest.mark.parametrize("kind", ["bytes", "words", "chat"])
def test_the_cache_gives_what_the_files_give(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Without reading them again; another size or time is another cache."""
    data: dict[str, Any] = {"cache": str(tmp_path / "cache")}
    folder = texts
    if kind != "bytes":
        data["tokenizer"] = str(write_tokenizer(tmp_path / "words"))
    if kind == "chat":
        folder = write_chats(tmp_path / "chats")
        data |= {"format": "chat", "files": [str(folder)], "held_out_share": 0.2}
    else:
        folder = write_texts(tmp_path / "copy")
        (folder / "empty.txt").write_text("")
        data["files"] = [str(folder)]
    found = find_texts(quiet_config(tmp_path / "run", folder, data=data))
    cached = with_cache(found)
    assert first(cached) == first(found)
    held_out = [x.held_out_rows(3) for x in (cached, found)]
    assert all(np.array_equal(a.ids, b.ids) for a, b in zip(*held_out, strict=True))
    monkeypatch.setattr(token_cache, "documents", None)  # would be called
    assert first(with_cache(found)) == first(found)
    with next(folder.iterdir()).open("a") as file:
        file.write("\n")
    with pytest.raises(TypeError, match="not callable"):
        with_cache(found)


def test_what_a_killed_process_left_of_a_cache(tmp_path: Path, texts: Path) -> None:
    config = quiet_config(tmp_path / "run", texts, data={"cache": str(tmp_path / "cache")})
    found = with_cache(find_texts(config))
    assert found.cache is not None
    folder = found.cache.folder
    folder.rename(folder.with_name(f".{folder.name}"))
    assert first(with_cache(find_texts(config))) == first(find_texts(config))
    assert folder.exists()


def test_conversations_are_learned_from_what_the_assistant_says(tmp_path: Path) -> None:
    data = {"format": "chat", "tokenizer": str(write_tokenizer(tmp_path / "words"))}
    config = quiet_config(tmp_path / "run", write_chats(tmp_path / "chats"), data=data)
    found = find_texts(config)
    seen = set()
    for row in found.training_rows(epochs=1):
        batch = found.collator([row])
        labels, ids = batch["labels"][0], batch["input_ids"][0]
        assert ids.min() >= 0
        assert bool(((labels == ids) | (labels == IGNORED)).all())
        seen |= set(found.tokenizer.decode(labels[labels != IGNORED].tolist()).split())
    answers = [each["messages"][1]["content"].split() for each in conversations()]
    assert seen == set(itertools.chain(*answers))
    one = found.tokenizer.encode(conversations()[0]["messages"])
    words = found.tokenizer.processing_class.convert_ids_to_tokens(plain_ids(one).tolist())
    learned = [word for word, token in zip(words, one, strict=True) if token >= 0]
    assert words == ["user", ":", *WORDS[:6], "assistant", ":", *WORDS[4:7], "<end>"]
    assert learned == [*WORDS[4:7], "<end>"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "data.format chat needs a tokenizer with a chat template, and this has none"),
        ("{{ messages[0]['content'] }}", "does not mark what the assistant says: put"),
    ],
)
def test_a_tokenizer_that_knows_no_assistant(
    tmp_path: Path, template: str | None, message: str
) -> None:
    data = {"format": "chat", "tokenizer": str(write_tokenizer(tmp_path / "words", template))}
    config = quiet_config(tmp_path / "run", write_chats(tmp_path / "chats"), data=data)
    with pytest.raises(ValueError, match=message):
        train(config)


def test_a_template_that_trl_knows(tmp_path: Path) -> None:
    """Qwen3's, which has no marks; TRL has one with them."""
    from trl.chat_template_utils import qwen3_chat_template

    folder = write_tokenizer(tmp_path / "words", qwen3_chat_template)
    data = {"format": "chat", "tokenizer": str(folder)}
    found = find_texts(quiet_config(tmp_path / "run", write_chats(tmp_path / "chats"), data=data))
    tokens = found.tokenizer.encode(conversations()[0]["messages"])
    assert 0 < (tokens >= 0).sum() < len(tokens)


def test_texts_are_no_conversations(tmp_path: Path, texts: Path) -> None:
    data = {"format": "chat", "tokenizer": str(write_tokenizer(tmp_path / "words"))}
    with pytest.raises(TrainingError, match=r"conversations are read from \.jsonl, \.parquet and"):
        train(quiet_config(tmp_path / "run", texts, data=data))


WARMUP = {"seq_len_warmup": [[3, 16], [7, 32]]}


@pytest.mark.parametrize("joined", [False, True])
def test_rows_grow(texts: Path, tmp_path: Path, joined: bool) -> None:
    """16 tokens up to step 3, 32 up to step 7, then 64: of 128 tokens a step, and none is lost."""
    data = {**WARMUP, "documents": "joined" if joined else "separate", "shuffle": 1}
    found = find_texts(quiet_config(tmp_path / "run", texts, data=data))
    rows = list(itertools.islice(found.training_rows(), 24))
    lengths = [16] * 6 + [32] * 8 + [64] * 10
    flat = []
    for row, length in zip(rows, lengths, strict=True):
        parts = row if isinstance(row, list) else [row]
        assert [len(part.ids) for part in parts] == [length] * (64 // length)
        flat += parts
        batch = found.collator([row])
        shape = (64 // length, length) if joined else (1, 64)
        assert batch["input_ids"].shape == shape
        if not joined:
            assert batch["cu_seq_lens_q"].diff().max() <= length
    stream = np.concatenate([part.ids[: part.real] for part in flat])
    whole = find_texts(quiet_config(tmp_path / "run", texts, data={"shuffle": 1}))
    plain = np.concatenate(
        [row.ids[: row.real] for row in itertools.islice(whole.training_rows(), 40)]
    )
    assert np.array_equal(stream, plain[: len(stream)])


def test_a_warm_up_goes_on_with_batches_of_another_size(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lengths that were reached stay at their rows, and no row comes again."""
    data = {"seq_len_warmup": [[3, 16], [10, 32]]}
    seen = Rows(monkeypatch)
    begin(tmp_path / "run", texts, data=data)  # 8 steps of 2 rows
    training = {"batch_size": 3, "steps": 12}
    config = quiet_config(tmp_path / "run", texts, data=data, training=training)
    train(config, resume=True, changes={"training.batch_size"})
    record = json.loads((tmp_path / "run" / "checkpoint-12" / "run.json").read_text())
    assert record["stages"] == [0, 6, 16 + 2 * 3]
    found = dataclasses.replace(find_texts(config), stages=tuple(record["stages"]))
    rows = list(itertools.islice(found.training_rows(), 28))
    ids = [part for row in rows for part in (row if isinstance(row, list) else [row])]
    stream = np.concatenate([plain_ids(part.ids) for part in ids])
    assert list(itertools.chain(*seen.rows)) == stream.tolist()


SOURCES: dict[str, dict[str, Any]] = {
    "warm-up": {"data": {**WARMUP, "documents": "joined"}},
    "separate warm-up": {"data": WARMUP},
    "mixture": {"data": {"weights": [2, 1]}},
    "cache": {"data": {"cache": "cache", "workers": 1}},
    "chat": {"data": {"format": "chat", "held_out_share": 0.2}},
}


@pytest.mark.kept(lambda source: source in ("mixture", "cache"))
@pytest.mark.parametrize("source", SOURCES)
def test_a_stopped_run_ends_as_one_that_was_not(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.chdir(tmp_path)
    sections = {"data": dict(SOURCES[source]["data"])}
    if source == "mixture":
        sections["data"]["files"] = [str(write_texts(tmp_path / "more", 4)), str(texts)]
    if source == "chat":
        sections["data"]["tokenizer"] = str(write_tokenizer(tmp_path / "words"))
        sections["data"]["files"] = [str(write_chats(tmp_path / "chats"))]
    train(quiet_config(tmp_path / "whole", texts, **sections))
    begin(tmp_path / "run", texts, **sections)
    train(quiet_config(tmp_path / "run", texts, **sections), resume=True)
    whole, resumed = (
        load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "run")
    )
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []
    if source == "cache":
        report = json.loads((tmp_path / "run" / "data.json").read_text())
        assert report["documents"] < 30
