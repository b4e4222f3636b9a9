"""A trained model as a folder that others can load and read about, in the layout of the hub."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

from nsa_flex.patching.formats import FORMATS
from nsa_flex.patching.hf_edited import number_of_layer
from nsa_flex.patching.hf_saved_config import MODEL_TYPE, from_saved
from nsa_flex.training.config import TrainConfig, read_config
from nsa_flex.training.data_report import DATA_REPORT
from nsa_flex.training.record import read_record
from nsa_flex.training.resuming import CONFIG_FILE
from nsa_flex.training.run import summary
from nsa_flex.training.saving import (
    AVERAGE_FOLDER,
    MODEL_FOLDER,
    PREFIX,
    last_checkpoint,
    step_of,
)
from nsa_flex.training.telemetry import read_rows
from nsa_flex.training.tokenization import bytes_tokenizer, tokenizer_files
from nsa_flex.version import __version__

TRAINING_FILE = "training.yaml"
SHIM = "nsa_flex_remote"
_OF_MODELS = (
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
    "*.safetensors.index.json",
    "model*.safetensors",
)
_SHIM = '''"""Lets transformers' Auto classes load this model with trust_remote_code=True.

The attention is that of nsa_flex, which must be installed.
"""

from nsa_flex.patching.hf_saved_config import NSACheckpointConfig

__all__ = ["NSACheckpointConfig"]
'''


def export(source: Path, out: Path, *, average: bool = False) -> dict[str, Any]:
    """Copy a model to `out`, with its tokenizer, a card, and the config that trained it.

    Args:
        source: the folder of a run, of which the finished model is taken or else the last
            checkpoint; or a checkpoint.
        average: takes the average of the weights instead (`training.ema`).

    Returns:
        plain JSON types: the folder, its files, and what the card says in numbers.

    Raises:
        ValueError: there is no such model, or `out` holds something. Nothing was written.
    """
    model, run = _found(source, average)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} holds something already: choose another folder")
    config = read_config(str(run / CONFIG_FILE)) if run is not None else None
    settings = json.loads((model / "config.json").read_text())
    facts = _facts(settings, config, run, model)
    out.mkdir(parents=True, exist_ok=True)
    _copy(model, out, config)
    if settings["model_type"] in (MODEL_TYPE, *FORMATS):
        (out / f"{SHIM}.py").write_text(_SHIM)
        settings["auto_map"] = {"AutoConfig": f"{SHIM}.NSACheckpointConfig"}
        (out / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    if run is not None:
        shutil.copyfile(run / CONFIG_FILE, out / TRAINING_FILE)
    (out / "README.md").write_text(_card(out.resolve().name, facts, average), encoding="utf-8")
    files = sorted(str(path.relative_to(out)) for path in out.rglob("*"))
    return {"out": str(out), "model": str(model), "files": files, **facts}


def _found(source: Path, average: bool) -> tuple[Path, Path | None]:
    """The folder of the model, and that of its run if there is one."""
    run = next((x for x in (source, source.parent) if (x / CONFIG_FILE).is_file()), None)
    if run != source and not average:
        model: Path | None = source
    else:
        model = (run or source) / (AVERAGE_FOLDER if average else MODEL_FOLDER)
        if run is not None and not average and not model.is_dir():
            model = last_checkpoint(run)
    if model is None or not (model / "config.json").is_file():
        what = "average of weights (training.ema)" if average else "model"
        raise ValueError(
            f"{source} holds no {what}: name the folder of a run (of a conversion, that of a "
            "stage), or a checkpoint"
        )
    if not any(model.glob("model*.safetensors")):
        raise ValueError(f"{model} holds no weights in one piece: end the run, and export that")
    return model, run


def _copy(model: Path, out: Path, config: TrainConfig | None) -> None:
    """Weights, configs and tokenizer; nothing that only a resumed run reads."""
    found = {path for name in _OF_MODELS for path in model.glob(name)}
    tokenizer = {path for path in tokenizer_files(str(model)) if path.name != "run.json"}
    for path in found | tokenizer:
        shutil.copyfile(path, out / path.name)
    if not any("token" in path.name for path in tokenizer) and config is not None:
        bytes_tokenizer().save_pretrained(out)  # checkpoints of bytes have none


def _facts(
    settings: dict[str, Any], config: TrainConfig | None, run: Path | None, model: Path
) -> dict[str, Any]:
    record = from_saved(settings).get("nsa_flex", {})
    facts: dict[str, Any] = {
        "nsa": record.get("config"),
        "layers": [number_of_layer(name) for name in record.get("layers", [])],
        "versions": {
            "nsa_flex": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    if run is None or config is None:
        return facts
    until = step_of(model) if model.name.startswith(PREFIX) else math.inf
    told = summary(run, stopped=False, seconds=0.0, until=until)
    names = ("steps", "tokens", "loss", "held_out_loss", "perplexity", "bits_per_byte")
    facts["run"] = {name: told[name] for name in (*names, "held_out_step")}
    facts["command"] = f"nsa-flex train {TRAINING_FILE}"
    checkpoint = model if (model / "run.json").is_file() else last_checkpoint(run)
    if checkpoint is not None:
        marks = read_record(checkpoint).files
        hashes = "".join(sorted(mark["hash"] for mark in marks))
        facts["data"] = {
            "files": len(marks),
            "bytes": sum(mark["size"] for mark in marks),
            "fingerprint": hashlib.sha256(hashes.encode()).hexdigest(),
        }
        if (run / DATA_REPORT).is_file():
            report = json.loads((run / DATA_REPORT).read_text())
            if report["documents"] is not None:
                facts["data"]["documents"] = report["documents"]
            if report["epochs"] is not None:  # of all steps that were planned
                done = told["steps"] / config.training.steps
                facts["data"]["epochs"] = report["epochs"] * done
    samples = [row for row in read_rows(run, "samples") if row["step"] <= until]
    if samples:
        facts["sample"] = {name: samples[-1][name] for name in ("step", "prompt", "text")}
    return facts


def _card(name: str, facts: dict[str, Any], average: bool) -> str:
    from huggingface_hub import ModelCardData

    is_nsa = facts["nsa"] is not None
    about = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["nsa_flex", "native-sparse-attention"] if is_nsa else ["nsa_flex", "dense"],
    )
    parts = [f"---\n{about.to_yaml()}\n---\n\n# {name}\n", _NSA if is_nsa else _DENSE]
    if is_nsa:
        parts.append(_LIMITS)
        parts.append(_table("Attention", {"layers": facts["layers"], **facts["nsa"]}))
    if average:
        parts.append("Averages over the training; losses and sample are of the last weights.\n")
    for part in ("run", "data", "versions"):
        parts.append(_table({"run": "Training"}.get(part, part.capitalize()), facts.get(part)))
    if "command" in facts:
        parts.append(_COMMAND.format(command=facts["command"], file=TRAINING_FILE))
    if "sample" in facts:
        sample = facts["sample"]
        text = f"{sample['prompt']}|{sample['text']}".replace("\n", "\n    ")
        where = f"Of step {sample['step']}; the prompt ends at the bar."
        parts.append(f"## Sample\n\n{where}\n\n    {text}\n")
    return "\n".join(part for part in parts if part)


def _table(title: str, values: dict[str, Any] | None) -> str:
    if not values:
        return ""
    rows = "".join(f"| {k.replace('_', ' ')} | {_shown(v)} |\n" for k, v in values.items())
    return f"## {title}\n\n| | |\n|---|---|\n{rows}"


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


_NSA = """A language model with Native Sparse Attention. It needs nsa_flex, in a checkout of it
`pip install -e ".[hf]"`, and is read like any other model of transformers:

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)

`trust_remote_code` runs three lines that import nsa_flex; with `import nsa_flex` before, or with
`nsa_flex.load(folder)`, it is not needed. `nsa-flex generate` writes text, `nsa-flex serve` is an
OpenAI-compatible server.
"""
_LIMITS = """## Elsewhere

- Without nsa_flex it does not load: compression, selection and the cache are nsa_flex's, and code
  that came along would be a second copy of them.
- vLLM, llama.cpp (GGUF) and ONNX Runtime have no such attention, and there is no conversion: as a
  dense model these weights would be another one.
"""
_DENSE = (
    "A language model with dense attention, trained by nsa_flex as the twin of a sparse one.\n"
)
_COMMAND = """## Made by

    {command}

`{file}` is the whole config; name your copy of the data in it.
"""
