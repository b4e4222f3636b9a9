"""What `nsa-flex train` is told: a YAML file of five sections, typed and checked."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Collection
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from nsa_flex.config import NSAConfig
from nsa_flex.gates import GateInit
from nsa_flex.training.config_reading import from_mapping
from nsa_flex.training.errors import blamed_on

# The optional sections of a config and their fields; docs/guide/train-command.md has the table.


LONGEST_WAIT = threading.TIMEOUT_MAX


@dataclass(frozen=True)
class ModelSection:
    """What is trained: exactly one of `preset`, `config` and `checkpoint`.

    Args:
        preset: a name in `nsa_flex.training.models.PRESETS`.
        config: of transformers, with its model_type; fresh weights.
        checkpoint: directory of a dense or a patched checkpoint.
        attention: "nsa", or "dense" for the unpatched twin.
        init: where the gates start, "paper" or "dense".
        backend: as of `nsa_attention`; of a patched checkpoint "auto" is the one that it was saved
            with.
        nsa: sizes of NSA; a patched checkpoint keeps its own, and others are an error.
        dense_layers: numbers of decoder layers that keep the attention that they have; of a
            patched checkpoint, layers that it was not patched in.
    """

    preset: str | None = None
    config: dict[str, Any] | None = None
    checkpoint: str | None = None
    attention: Literal["nsa", "dense"] = "nsa"
    init: GateInit = "paper"
    backend: Literal["auto", "dense", "flex", "sdpa", "fa2", "triton"] = "auto"
    nsa: NSAConfig = field(default_factory=NSAConfig)
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        given = [name for name in ("preset", "config", "checkpoint") if getattr(self, name)]
        if len(given) != 1:
            what = " and ".join(given) or "none"
            raise ValueError(f"got {what}; expected one of preset, config and checkpoint")
        if self.dense_layers and self.attention != "nsa":
            raise ValueError("dense_layers are layers beside NSA's; expected attention nsa")


@dataclass(frozen=True)
class DataSection:
    """Text to train on.

    Args:
        files: files, folders and globs; "stdlib" is the sources of Python's standard library.
            .jsonl, .parquet and .arrow (what `Dataset.save_to_disk` of datasets writes) hold one
            document a row, every other file is one document if it is UTF-8, and is skipped if
            not; .gz, .xz and .zst are decompressed.
        weights: of each entry of `files`, the share of tokens that come from there; each begins
            anew when it ends. None: all files are read once, then again.
        include, exclude: patterns of files' names or paths, as of fnmatch; those that match one
            of `include` (any if there is none) and none of `exclude` are read.
        held_out_files: likewise, to measure the held-out loss on.
        held_out_share: of the documents of `files`, if there are no `held_out_files`.
        format: "chat" takes conversations, lists of mappings with role and content, by the
            tokenizer's chat template, and learns what the assistant says alone.
        text_field: column of the rows; "text", or "messages" of conversations, if not given.
        cache: folder for tokens, so that the next run over the same files does not make them
            again.
        tokenizer: "bytes", or the directory of one of transformers.
        seq_len: tokens of a row.
        seq_len_warmup: [steps, length] pairs: up to so many steps, rows are cut into ones of that
            length; tokens a step stay the same.
        documents: "separate" computes every document alone (cu_seq_lens); "joined" lets a row's
            tokens see all before them, the end-of-document token included.
        documents_per_row: of separate documents at most so many begin in a row, which fixes the
            shapes; a row with more ends in padding.
        leave_out: files, folders and globs of `files` and `held_out_files` that are not read. Of
            one that a resumed run leaves out, nothing comes after the rows trained on so far.
        shuffle: documents among which the next one is drawn; 1 keeps their order.
        workers: 1 reads and tokenises in a process of its own, 0 between steps.
    """

    files: tuple[str, ...]
    held_out_files: tuple[str, ...] = ()
    held_out_share: float = 0.01
    weights: tuple[float, ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    format: Literal["text", "chat"] = "text"
    text_field: str | None = None
    tokenizer: str = "bytes"
    cache: str | None = None
    seq_len: int = 2048
    seq_len_warmup: tuple[tuple[int, int], ...] = ()
    documents: Literal["separate", "joined"] = "separate"
    documents_per_row: int = 4
    leave_out: tuple[str, ...] = ()
    shuffle: int = 256
    workers: Literal[0, 1] = 0

    def __post_init__(self) -> None:
        _at_least(self, 1, "documents_per_row", "shuffle")
        _at_least(self, 2, "seq_len")
        if not 0 < self.held_out_share < 1:
            raise ValueError(f"held_out_share={self.held_out_share} must be between 0 and 1")
        if self.weights and len(self.weights) != len(self.files):
            raise ValueError(
                f"weights has {len(self.weights)} numbers; expected one for each of the "
                f"{len(self.files)} entries of files"
            )
        if not all(0 < weight < math.inf for weight in self.weights):
            raise ValueError(f"weights={list(self.weights)} must be more than 0, and finite")
        self._check_warmup()

    def _check_warmup(self) -> None:
        if not all(len(pair) == 2 for pair in self.seq_len_warmup):
            raise ValueError("seq_len_warmup must be pairs of steps and length")
        ends = [0, *(end for end, _ in self.seq_len_warmup)]
        for before, (end, length) in zip(ends, self.seq_len_warmup, strict=False):
            if end <= before:
                raise ValueError(f"seq_len_warmup: step {end} must come after {before}")
            if length < 2 or self.seq_len % length:
                raise ValueError(
                    f"seq_len_warmup: {length} must be a divisor of seq_len={self.seq_len}"
                )

    @property
    def column(self) -> str:
        """Of the rows of .jsonl, .parquet and .arrow."""
        return self.text_field or {"text": "text", "chat": "messages"}[self.format]


@dataclass(frozen=True)
class TrainingSection:
    """The optimization: optimizer, warm-up, decay, average of the weights.

    Args:
        steps: optimizer steps.
        batch_size: rows of a forward on each device.
        accumulate: forwards of one step.
        learning_rate: peak.
        warmup_steps: of linear warm-up.
        schedule: after it; cosine goes down to a tenth of the peak, linear to 0; or another of
            transformers' by its name, such as warmup_stable_decay, which decays in the last fifth.
        schedule_options: further arguments of the schedule.
        optimizer: "auto" is AdamW, fused on CUDA; "muon" torch's Muon for the matrices of decoder
            layers and AdamW for the rest; or another of transformers' by its name.
        optimizer_options: further arguments of the optimizer.
        weight_decay, betas: of AdamW.
        max_grad_norm: gradients are clipped to; 0 leaves them.
        ema: decay of an exponential moving average of the weights, saved beside the model; 0 keeps
            none.
    """

    steps: int
    batch_size: int = 16
    accumulate: int = 1
    learning_rate: float = 1e-3
    warmup_steps: int = 100
    schedule: str = "cosine"
    schedule_options: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "auto"
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float = 1.0
    ema: float = 0.0

    def __post_init__(self) -> None:
        _at_least(self, 1, "steps", "batch_size", "accumulate")
        _at_least(self, 0, "warmup_steps", "weight_decay", "max_grad_norm")
        _finite(self, "weight_decay", "max_grad_norm")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate={self.learning_rate} must be more than 0, and finite")
        if not 0 <= self.ema < 1:
            raise ValueError(f"ema={self.ema} must be from 0 up to 1")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas} must be two numbers from 0 up to 1")


@dataclass(frozen=True)
class EngineSection:
    """How it is computed.

    Args:
        device: "auto" takes CUDA if there is any.
        precision: "bf16" is autocast over float32 weights; "auto" that on CUDA, else float32.
        compile: every decoder layer and the loss, each by itself.
        checkpointing: "full" recomputes each layer in the backward pass, "selective" keeps matrix
            products and attention.
        parallel: of several processes (torchrun): "ddp", or "fsdp" for FSDP2.
        context_parallel: ranks that share the tokens of each row, a divisor of the processes.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    compile: bool = True
    checkpointing: Literal["none", "full", "selective"] = "none"
    parallel: Literal["ddp", "fsdp"] = "ddp"
    context_parallel: int = 1

    def __post_init__(self) -> None:
        _at_least(self, 1, "context_parallel")


@dataclass(frozen=True)
class RunSection:
    """What is written, and when, in steps.

    Args:
        log_every: rows of training.csv.
        gates_every: rows of gates.csv and fallback_counters.csv, a multiple of `log_every`; 0
            leaves them out.
        eval_every: held-out losses, of `eval_rows` rows; 0 measures none.
        save_every: checkpoints, a multiple of `log_every`; of these `keep` are kept. 0 writes none
            but on Ctrl-C.
        heartbeat_seconds: between lines of heartbeat.jsonl.
        strict: stop where a branch would not run on the table's first backend.
        report_to: tensorboard and wandb (offline), into the run's folder.
        sample_tokens: that the model writes at evaluations, for samples.jsonl; 0 writes none.
    """

    log_every: int = 20
    gates_every: int = 200
    eval_every: int = 500
    eval_rows: int = 64
    save_every: int = 500
    keep: int = 2
    heartbeat_seconds: float = 10.0
    strict: bool = False
    report_to: tuple[Literal["tensorboard", "wandb"], ...] = ()
    sample_tokens: int = 64

    def __post_init__(self) -> None:
        _at_least(self, 1, "log_every", "eval_rows", "keep")
        _at_least(self, 0, "gates_every", "eval_every", "save_every", "sample_tokens")
        if not 0 < self.heartbeat_seconds <= LONGEST_WAIT:
            raise ValueError(
                f"heartbeat_seconds={self.heartbeat_seconds} must be more than 0, and at most "
                f"{LONGEST_WAIT:g}"
            )
        if self.gates_every % self.log_every:
            raise ValueError(
                f"gates_every={self.gates_every} must be a multiple of "
                f"log_every={self.log_every}: gates are measured where rows are logged"
            )
        if self.save_every % self.log_every:
            raise ValueError(
                f"save_every={self.save_every} must be a multiple of log_every={self.log_every}: "
                "a resumed run then writes the same rows as one that was never stopped"
            )
        if self.strict and not self.gates_every:
            raise ValueError("strict needs gates_every of at least 1: the probe asks the layers")


@dataclass(frozen=True)
class TrainConfig:
    """A whole run; `out` is its folder, `seed` that of weights, data order and all else."""

    out: str
    model: ModelSection
    data: DataSection
    training: TrainingSection
    engine: EngineSection = field(default_factory=EngineSection)
    run: RunSection = field(default_factory=RunSection)
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**32:  # NumPy's generator takes no other
            raise ValueError(f"seed={self.seed} must be from 0 up to {2**32 - 1}")

    def to_dict(self) -> dict[str, Any]:
        """Plain types of YAML; `read_config` takes them."""
        return dataclasses.asdict(
            self, dict_factory=lambda pairs: {k: _plain(v) for k, v in pairs}
        )


def shipped_configs() -> dict[str, Path]:
    """Name to file of the configs that come with the package."""
    folder = Path(str(resources.files("nsa_flex.training") / "configs"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def read_config(name: str, overrides: tuple[str, ...] = ()) -> TrainConfig:
    """A config from a YAML file, or one of `shipped_configs` by name.

    Args:
        overrides: "section.key=value", values as in YAML.

    Raises:
        ValueError: there is no such file, it is no YAML, or something in it is wrong.
    """
    path = Path(name)
    if not path.is_file():
        if name not in shipped_configs():
            shipped = ", ".join(shipped_configs())
            raise ValueError(f"{name} is neither a file nor one of the configs {shipped}")
        path = shipped_configs()[name]
    with blamed_on(str(path)):
        values = load_yaml(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no mapping of sections; nsa-flex train needs one")
    return config_of(values, overrides)


def config_of(values: dict[str, Any], overrides: Collection[str] = ()) -> TrainConfig:
    """A config from what a YAML file would hold; `overrides`, as of `read_config`, change it."""
    for each in overrides:
        _override(values, each)
    return from_mapping(TrainConfig, values)


def _override(values: dict[str, Any], text: str) -> None:
    name, equals, value = text.partition("=")
    *sections, key = name.split(".")
    if not equals or not key:
        raise ValueError(f"{text!r} is no override; expected section.key=value")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ValueError(f"{name}: {section} is not a section")
    with blamed_on(name):
        values[key] = load_yaml(value)


def load_yaml(text: str) -> Any:
    """What YAML says, as plain types.

    Raises:
        ValueError: it is no YAML, or has a key twice, of which YAML would take the last.
        ModuleNotFoundError: pyyaml is missing.
    """
    yaml = _yaml()

    class Loader(yaml.SafeLoader):  # type: ignore[name-defined]
        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            seen = set()
            for key, _ in node.value:
                name = key.tag, str(key.value)
                if name in seen and key.tag != "tag:yaml.org,2002:merge":
                    line = key.start_mark.line + 1
                    raise ValueError(f"{key.value} is given twice (line {line})")
                seen.add(name)
            return node

    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _yaml() -> Any:
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "training configs need pyyaml, which is not installed; install it with: "
            "pip install 'nsa-flex[hf,train]'",
            name="yaml",
        ) from error
    return yaml


def _at_least(section: Any, least: int, *names: str) -> None:
    for name in names:
        if getattr(section, name) < least:
            raise ValueError(f"{name}={getattr(section, name)} must be at least {least}")


def _finite(section: Any, *names: str) -> None:
    for name in names:
        if not math.isfinite(getattr(section, name)):
            raise ValueError(f"{name}={getattr(section, name)} must be finite")


def _plain(value: Any) -> Any:
    return [_plain(each) for each in value] if isinstance(value, tuple) else value
