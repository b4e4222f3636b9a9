"""The recipes of the training-stack page for twenty steps, with the telemetry callback on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from accelerate import Accelerator
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from training.tiny_run import LENGTH, patched, rows_of
from transformers import PreTrainedTokenizerFast, TrainingArguments
from trl import SFTConfig, SFTTrainer

import nsa_flex
from patching.tiny_models import NSA, VOCABULARY, tiny_model

STEPS = 20
ROWS = 8


def texts() -> list[list[int]]:
    """Rows that repeat a few words, so that there is something to learn."""
    words = torch.randint(2, 12, (ROWS, 6))
    return words.repeat(1, LENGTH // 6).tolist()


def labelled() -> list[dict[str, list[int]]]:
    return [{"input_ids": row, "labels": row} for row in texts()]


def options(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 5,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": not torch.cuda.is_available(),
    }


def check_artefacts(folder: Path, layers: int = 2) -> None:
    """Twenty steps with all rows, and a loss that fell."""
    found = rows_of(folder)
    rows = found["training"]
    assert [row["step"] for row in rows] == [5, 10, 15, 20]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert [row["step"] for row in found["gates"]] == [0] * layers + [20] * layers
    moved = [row["gate_selected"] for row in found["gates"]]
    assert moved[:layers] != moved[layers:]
    calls = [row["calls"] for row in found["fallback_counters"] if row["step"] == STEPS]
    assert calls == [STEPS * layers] * 3
    assert found["heartbeat"][-1]["phase"] == "done"


def callback() -> nsa_flex.TelemetryCallback:
    return nsa_flex.TelemetryCallback(gates_every=STEPS)


def test_trainer(tmp_path: Path) -> None:
    trainer = transformers.Trainer(
        patched(),
        TrainingArguments(**options(tmp_path)),
        train_dataset=labelled(),
        callbacks=[callback()],
    )
    trainer.train()
    check_artefacts(tmp_path)


def test_accelerate(tmp_path: Path) -> None:
    """A loop of one's own: the context manager in the callback's place."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model = patched()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    batches = torch.tensor(texts(), device=accelerator.device).split(2)
    with nsa_flex.telemetry(
        model, tmp_path, probe=batches[0][:1], every=5, gates_every=STEPS
    ) as run:
        for step in range(STEPS):
            batch = batches[step % len(batches)]
            loss = model(batch, labels=batch, use_cache=False).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss, tokens=batch.numel())
    check_artefacts(tmp_path)


def test_peft_with_lora_and_merge(tmp_path: Path) -> None:
    lora = peft.LoraConfig(
        target_modules=["q_proj", "v_proj"], modules_to_save=["nsa"], task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(patched(), lora)
    trainer = transformers.Trainer(
        model,
        TrainingArguments(**options(tmp_path)),
        train_dataset=labelled(),
        callbacks=[callback()],
    )
    trainer.train()
    check_artefacts(tmp_path)
    ids = torch.tensor(texts()[:2], device=model.device)
    model.eval()
    with torch.no_grad():
        adapted = model(ids, use_cache=False).logits
        merged = model.merge_and_unload()
        torch.testing.assert_close(
            merged(ids, use_cache=False).logits, adapted, rtol=1e-4, atol=1e-4
        )
    merged.save_pretrained(tmp_path / "merged")
    loaded = nsa_flex.load(tmp_path / "merged").to(ids.device)
    with torch.no_grad():
        assert torch.equal(
            loaded(ids, use_cache=False).logits, merged(ids, use_cache=False).logits
        )


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, VOCABULARY)}}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


def test_trl_sft_with_packing(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    written = [{"text": tokenizer.decode(row)} for row in texts() * 4]
    trainer = SFTTrainer(
        nsa_flex.patch(tiny_model().train(), NSA),
        args=SFTConfig(**options(tmp_path), packing=True, max_length=160, bf16=False),
        train_dataset=Dataset.from_list(written),
        processing_class=tokenizer,
        callbacks=[callback()],
    )
    trainer.train()
    check_artefacts(tmp_path)
