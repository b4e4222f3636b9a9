"""`train`: a config from its text to a trained, resumable model, on transformers' Trainer."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import PrinterCallback, TrainerCallback

from nsa_flex.training.arguments import (
    check_device,
    check_launcher,
    check_optimization,
    data_ranks,
    is_bf16,
    is_sharded,
    optimizer_name,
    rank,
    rows_per_step,
    tokens_per_step,
    training_arguments,
)
from nsa_flex.training.averages import AVERAGES, AverageCallback, set_averages
from nsa_flex.training.config import TrainConfig
from nsa_flex.training.data_report import report_at_start, write_report
from nsa_flex.training.errors import TrainingError, in_one_line
from nsa_flex.training.mesh import (
    check_mesh,
    collator_of,
    sent_per_step,
    share_sequences,
)
from nsa_flex.training.models import Values, build_model, decoder_layers, prepare
from nsa_flex.training.record import Record
from nsa_flex.training.reporting import check_reporters, reporting
from nsa_flex.training.resuming import Resume, Start, check_sharding, find_start, open_run
from nsa_flex.training.samples import SampleCallback
from nsa_flex.training.saving import (
    AVERAGE_FOLDER,
    MODEL_FOLDER,
    folder_aside,
    last_checkpoint,
    load_state,
    locked,
)
from nsa_flex.training.shards import from_rank_0
from nsa_flex.training.telemetry import last_of_each_step, read_rows
from nsa_flex.training.telemetry.callback import TelemetryCallback
from nsa_flex.training.telemetry.observe import without_logits
from nsa_flex.training.texts import Texts, find_texts, texts_as_before, with_cache
from nsa_flex.training.tokenization import Tokenizer, bytes_tokenizer
from nsa_flex.training.trainer import SHARDED_WEIGHTS, StopCallback, Trainer


def train(
    config: TrainConfig,
    *,
    resume: bool = False,
    resume_from: str | None = None,
    changes: Collection[str] = (),
    callbacks: Sequence[TrainerCallback] = (),
) -> dict[str, Any]:
    """Run a config, or go on with it from its last checkpoint; call it on every rank of a job.

    Args:
        resume: continue what is in `config.out`; without a checkpoint there, from the start.
        resume_from: continue from this checkpoint, by its steps or its path. Those of more steps
            are renamed: the run has left them behind.
        changes: keys ("training.learning_rate") of what `config` means to do otherwise than the
            run so far; changes.csv keeps them.
        callbacks: further ones for the Trainer.

    Returns:
        what `summary` says of the run.

    Raises:
        ValueError: the config does not fit its files, model or machine; `config.out` holds a run
            already, or another process runs there; or on resuming, a change was not told or would
            falsify the run, or the data are other ones. Nothing was changed.
        TrainingError: the run could not go on, or its last checkpoint is damaged; earlier ones are
            whole.
    """
    check_launcher()
    check_optimization(config)
    check_reporters(config)
    run, asked = Path(config.out), Resume(resume, resume_from, changes)
    with _memory_told(run), contextlib.ExitStack() as stack:
        start = find_start(config, asked)
        done = start.checkpoint is not None and start.step >= config.training.steps
        texts = find_texts(config) if done else _texts(config, start)
        check_device(config)
        if not done:
            check_mesh(config)
        torch.manual_seed(config.seed)
        # Under FSDP rank 0's weights are shared out; the others' are not read.
        values: Values = "all" if rank() == 0 or not is_sharded(config) else "buffers"
        model = build_model(config.model, config.data, texts.tokenizer, values=values)
        if start.checkpoint is not None and done:
            if rank() == 0 and _unsaved(run, start.checkpoint):  # killed at the very end
                stack.enter_context(locked(run))
                _save_finished(model, texts.tokenizer, start.checkpoint, run)
            return summary(run, stopped=False, seconds=0.0)
        texts = with_cache(texts)
        held_out = texts.held_out_rows(config.run.eval_rows) if _needs_held_out(config) else []
        if rank() == 0:
            run.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(run))
            open_run(config, asked, start)
            write_report(run, report_at_start(texts))
            texts = texts.with_record(data_ranks(config))
        told = stack.enter_context(reporting(config))
        return _train(config, texts, model, held_out, start, [*callbacks, *told])


def _train(
    config: TrainConfig,
    texts: Texts,
    model: Any,
    held_out: list[Any],
    start: Start,
    callbacks: Sequence[TrainerCallback],
) -> dict[str, Any]:
    run = Path(config.out)
    trainer, stop, telemetry = _trainer(config, texts, model, held_out, start, callbacks)
    begun = time.perf_counter()
    shared = from_rank_0(trainer.accelerator) if is_sharded(config) else contextlib.nullcontext()
    with _told(run, telemetry), stop.listening(), shared:
        trainer.train(resume_from_checkpoint=start.checkpoint and str(start.checkpoint))
        if not stop.stopped:
            save_model(trainer, run / MODEL_FOLDER)
            if trainer.average is not None:
                set_averages(model, trainer.average.averages)
                save_model(trainer, run / AVERAGE_FOLDER)
    return summary(run, stopped=stop.stopped, seconds=time.perf_counter() - begun)


def _texts(config: TrainConfig, start: Start) -> Texts:
    if start.checkpoint is None or start.record is None:
        return find_texts(config)
    check_sharding(config, start.checkpoint)
    where = str(start.checkpoint)
    return texts_as_before(config, start.record, where, reads=rank() == 0, step=start.step)


def leave_process_group() -> None:
    """Ends the group of ranks, if this process is in one, before the process ends.

    What wraps the model for it may wait to be collected, and would hold the group's threads.
    """
    if dist.is_available() and dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()


def save_model(trainer: Trainer, folder: Path) -> None:
    """The weights of all ranks as one safetensors checkpoint, for `nsa_flex.load`."""
    state = None
    if trainer.is_fsdp_enabled:
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(trainer.model, options=whole)
    if trainer.args.should_save:
        with folder_aside(folder) as aside:
            trainer._save(str(aside), state_dict=state)
            if trainer.processing_class is None:
                bytes_tokenizer().save_pretrained(aside)


def _unsaved(run: Path, checkpoint: Path) -> list[str]:
    """Folders of models that a run whose last checkpoint this is has yet to write."""
    averaged = [AVERAGE_FOLDER] if (checkpoint / AVERAGES).exists() else []
    return [name for name in (MODEL_FOLDER, *averaged) if not (run / name).exists()]


def _save_finished(model: Any, tokenizer: Tokenizer, checkpoint: Path, run: Path) -> None:
    """Write what is unsaved, from the last checkpoint of a run on one process or several."""
    sharded = checkpoint / SHARDED_WEIGHTS
    weights = {"model": model.state_dict()}
    if sharded.is_dir():
        dcp.load(weights, checkpoint_id=str(sharded))
        model.load_state_dict(weights["model"])
    else:
        load_model(model, checkpoint / "model.safetensors", strict=False)
    for name in _unsaved(run, checkpoint):
        if name == AVERAGE_FOLDER:  # the last
            set_averages(model, load_state(checkpoint / AVERAGES))
        _save_whole(model, tokenizer, run / name)


def _save_whole(model: Any, tokenizer: Tokenizer, folder: Path) -> None:
    with folder_aside(folder) as aside:
        model.save_pretrained(aside)
        (tokenizer.processing_class or bytes_tokenizer()).save_pretrained(aside)


_HELD_OUT = ("held_out_loss", "perplexity", "bits_per_byte")


def summary(
    run: Path, *, stopped: bool, seconds: float, until: float = math.inf
) -> dict[str, Any]:
    """How a run stands, or stood at step `until`, by its artefacts; plain JSON types."""
    rows = last_of_each_step(read_rows(run, "training"))
    rows = [row for row in rows if row["step"] <= until]
    trained = [row for row in rows if row["loss"] is not None]
    evaluated = [row for row in rows if row["held_out_loss"] is not None]
    checkpoint = last_checkpoint(run)
    return {
        "out": str(run),
        "stopped": stopped,
        "steps": trained[-1]["step"] if trained else 0,
        "tokens": trained[-1]["tokens"] if trained else 0,
        "loss": trained[-1]["loss"] if trained else None,
        "first_loss": trained[0]["loss"] if trained else None,
        **{name: evaluated[-1][name] if evaluated else None for name in _HELD_OUT},
        "held_out_step": evaluated[-1]["step"] if evaluated else None,
        "seconds": round(seconds, 2),
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "model": None if stopped else str(run / MODEL_FOLDER),
    }


def _needs_held_out(config: TrainConfig) -> bool:
    return bool(config.run.eval_every or config.run.gates_every)


def _trainer(
    config: TrainConfig,
    texts: Texts,
    model: Any,
    held_out: list[Any],
    start: Start,
    callbacks: Sequence[TrainerCallback],
) -> tuple[Trainer, StopCallback, TelemetryCallback]:
    arguments = training_arguments(config, type(decoder_layers(model)[0]).__name__)
    mesh = share_sequences(model, config, arguments.device)
    collator: Any = texts.collator if mesh is None else collator_of(model, texts.collator)
    prepare(model, config.engine)
    stop = StopCallback()
    trainer = Trainer(
        model,
        arguments,
        train_dataset=texts.training_rows(),
        eval_dataset=held_out if config.run.eval_every else None,
        data_collator=collator,
        processing_class=texts.tokenizer.processing_class,
        callbacks=[stop],
    )
    trainer.mesh = mesh
    if is_bf16(config) and not is_sharded(config):
        trainer.autocast_dtype = torch.bfloat16
    if optimizer_name(config) == "muon":
        trainer.use_muon(config.training.optimizer_options)
    if config.training.ema and rank() == 0:
        trainer.average = AverageCallback(model, config.training.ema, start.checkpoint)
        trainer.add_callback(trainer.average)
    if texts.record is not None:  # on rank 0, which writes it
        trainer.record_at = functools.partial(_record_at, texts.record, config, start)
    telemetry = TelemetryCallback(
        probe=_probe(trainer, collator, held_out) if config.run.gates_every else None,
        measures=bool(config.run.gates_every),
        tokens_per_step=tokens_per_step(config),
        first_tokens=_rows_at(config, start, start.step) * config.data.seq_len,
        gates_every=config.run.gates_every or 1,
        heartbeat_seconds=config.run.heartbeat_seconds,
        strict=config.run.strict,
        mesh={"data": data_ranks(config), "context": config.engine.context_parallel},
        sent_bytes=0 if mesh is None else sent_per_step(model, config, collator),
        tokens_per_byte=texts.tokens_per_byte(held_out),
    )
    trainer.remove_callback(PrinterCallback)
    for each in (telemetry, *callbacks):  # telemetry adds to the logs that others show
        trainer.add_callback(each)
    # Ranks that share the tokens of rows would have to write together.
    alone = config.engine.context_parallel == 1
    if config.run.eval_every and config.run.sample_tokens and alone:
        trainer.add_callback(
            SampleCallback(
                trainer, telemetry, texts.tokenizer, held_out[0], config.run.sample_tokens
            )
        )
    return trainer, stop, telemetry


def _record_at(record: Record, config: TrainConfig, start: Start, step: int) -> Record:
    return dataclasses.replace(record, rows=_rows_at(config, start, step))


def _rows_at(config: TrainConfig, start: Start, step: int) -> int:
    """Rows trained on at a step of this session, those of earlier ones included."""
    before = 0 if start.record is None else start.record.rows
    return before + (step - start.step) * rows_per_step(config)


def _probe(
    trainer: Trainer, collate: Callable[[list[Any]], dict[str, Any]], held_out: list[Any]
) -> Callable[[], Any]:
    """Runs the model as the training does, on the held-out row with least padding."""
    fullest = max(held_out, key=lambda row: row.real)
    batch = {name: x for name, x in collate([fullest]).items() if "labels" not in name}
    options = {"use_cache": False, **without_logits(trainer.model)}

    @functools.cache  # a copy from pageable memory waits for the device
    def inputs() -> dict[str, Any]:
        return {name: x.to(trainer.args.device) for name, x in batch.items()}

    def call() -> Any:
        with trainer.compute_loss_context_manager():
            return trainer.model(**inputs(), **options)

    return call


@contextlib.contextmanager
def _told(run: Path, telemetry: TelemetryCallback) -> Iterator[None]:
    """Within, errors close the artefacts; those of the disk and of workers say what to do."""
    try:
        yield
    except BaseException as error:
        telemetry.close(error)
        if isinstance(error, (OSError, SafetensorError)):
            raise TrainingError(f"{error}: mend that, then {_after(run)}") from error
        if "DataLoader worker" in str(error):
            if isinstance(error, (TrainingError, ValueError)):
                raise type(error)(in_one_line(error)) from error
            raise TrainingError(f"{in_one_line(error)}: {_after(run)}") from error
        raise


@contextlib.contextmanager
def _memory_told(run: Path) -> Iterator[None]:
    """Within, too little memory is an error that says what to do about it."""
    try:
        yield
    except Exception as error:
        known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if not (known or "allocate memory" in str(error)):
            raise
        raise TrainingError(
            f"out of memory ({error}): lower training.batch_size and raise training.accumulate, "
            f"or set engine.checkpointing to selective or full, by --change; then {_after(run)}"
        ) from error


def _after(run: Path) -> str:
    last = last_checkpoint(run)
    return "start again" if last is None else f"resume from {last.name}, which is whole"
