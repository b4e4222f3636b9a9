"""A config as the arguments of transformers' Trainer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
from transformers import SchedulerType, Trainer, TrainingArguments

from nsa_flex.training.config import TrainConfig, TrainingSection

_SCHEDULES: dict[str, tuple[str, dict[str, Any]]] = {
    "cosine": ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
    "linear": ("linear", {}),
    "constant": ("constant_with_warmup", {}),
}
# These follow the loss, not the step alone.
_OF_THE_LOSS = ("reduce_lr_on_plateau", "greedy")
# Those of transformers whose state a checkpoint holds, and the package that each needs.
OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adafactor", "adagrad"), "torch"),
    **dict.fromkeys(("rmsprop", "sgd", "muon"), "torch"),
    **dict.fromkeys(("adamw_torch_8bit", "adamw_torch_4bit"), "torchao"),
    **dict.fromkeys(("adamw_8bit", "paged_adamw_8bit", "lion_8bit"), "bitsandbytes"),
    **dict.fromkeys(("ademamix", "ademamix_8bit", "lion_32bit"), "bitsandbytes"),
}


def world_size() -> int:
    """Processes of this job, as torchrun tells."""
    return _of_environment("WORLD_SIZE", 1)


def rank() -> int:
    """Number of this process in its job."""
    return _of_environment("RANK", 0)


def local_rank() -> int:
    """Number of this process on its machine."""
    return _of_environment("LOCAL_RANK", 0)


def check_launcher() -> None:
    """Raise ValueError if several processes are promised, and this one does not know its place.

    accelerate would train alone then, as if it were all of them.
    """
    missing = [name for name in ("RANK", "LOCAL_RANK") if name not in os.environ]
    if world_size() > 1 and missing:
        raise ValueError(
            f"the environment has WORLD_SIZE={world_size()} without {' and '.join(missing)}: "
            "start the processes with torchrun"
        )


def _of_environment(name: str, otherwise: int) -> int:
    text = os.environ.get(name, str(otherwise))
    if not text.isdigit():
        raise ValueError(f"the environment has {name}={text!r}; expected a number, as of torchrun")
    return int(text)


def uses_cuda(config: TrainConfig) -> bool:
    """Whether the run is on CUDA.

    Raises:
        ValueError: it is asked for, and there is none.
    """
    available = torch.cuda.is_available()
    if config.engine.device == "cuda" and not available:
        raise ValueError("engine.device is cuda, and torch sees no CUDA device: take auto or cpu")
    return available and config.engine.device != "cpu"


def check_device(config: TrainConfig) -> None:
    """Raise ValueError if the device is not there, or cannot do what is asked of it."""
    if is_sharded(config) and not uses_cuda(config):
        raise ValueError(
            "engine.parallel is fsdp, and accelerate shards on GPUs alone: take ddp, or shard a "
            "model of your own with fully_shard"
        )
    if uses_cuda(config) and local_rank() >= torch.cuda.device_count():
        raise ValueError(
            f"LOCAL_RANK is {local_rank()}, and torch sees {torch.cuda.device_count()} CUDA "
            "devices: start one process a device"
        )


def check_optimization(config: TrainConfig) -> None:
    """Raise an error if the optimizer or the schedule is unknown, or cannot be had here.

    Raises:
        ValueError: it is unknown, or does not go with FSDP2.
        ModuleNotFoundError: the optimizer's package is missing.
    """
    training = config.training
    schedules = [name.value for name in SchedulerType if name.value not in _OF_THE_LOSS]
    known = {"schedule": [*_SCHEDULES, *schedules], "optimizer": ["auto", *OPTIMIZERS]}
    for name, values in known.items():
        if getattr(training, name) not in values:
            named = ", ".join(dict.fromkeys(values))
            raise ValueError(
                f"training.{name} is {getattr(training, name)}; expected one of {named}"
            )
    package = OPTIMIZERS.get(training.optimizer, "torch")
    if find_spec(package) is None:
        raise ModuleNotFoundError(
            f"training.optimizer {training.optimizer} needs {package}, which is not installed; "
            f"install it with: pip install {package}",
            name=package,
        )
    if is_sharded(config) and (training.ema or training.optimizer == "muon"):
        what = "training.ema" if training.ema else "training.optimizer muon"
        raise ValueError(
            f"{what} does not go with engine.parallel fsdp: leave it out, or take ddp"
        )


def optimizer_name(config: TrainConfig) -> str:
    """In `OPTIMIZERS`."""
    if config.training.optimizer != "auto":
        return config.training.optimizer
    return "adamw_torch_fused" if uses_cuda(config) else "adamw_torch"


def _schedule(training: TrainingSection) -> tuple[str, dict[str, Any]]:
    """transformers' name, and arguments."""
    name, options = _SCHEDULES.get(training.schedule, (training.schedule, {}))
    if name == SchedulerType.WARMUP_STABLE_DECAY:
        options = {"num_decay_steps": max(1, training.steps // 5)}
    return name, {**options, **training.schedule_options}


def is_bf16(config: TrainConfig) -> bool:
    """Whether matrix products are bfloat16."""
    precision = config.engine.precision
    return uses_cuda(config) if precision == "auto" else precision == "bf16"


def is_sharded(config: TrainConfig) -> bool:
    """Whether parameters are sharded by FSDP2: asked for, and a launcher started the ranks."""
    return config.engine.parallel == "fsdp" and "WORLD_SIZE" in os.environ


def data_ranks(config: TrainConfig) -> int:
    """Ranks with rows of their own: those that share the tokens of rows count once."""
    return max(1, world_size() // config.engine.context_parallel)


def rows_per_step(config: TrainConfig) -> int:
    """Rows of an optimizer step on all ranks."""
    return config.training.batch_size * config.training.accumulate * data_ranks(config)


def tokens_per_step(config: TrainConfig) -> int:
    """Tokens of an optimizer step on all ranks."""
    return rows_per_step(config) * config.data.seq_len


def training_arguments(config: TrainConfig, layer_class: str) -> TrainingArguments:
    """What the Trainer is told.

    Args:
        layer_class: name of the decoder layers' class, what FSDP2 shards.
    """
    training, run = config.training, config.run
    schedule, schedule_arguments = _schedule(training)
    optimizer = optimizer_name(config)
    cuda = uses_cuda(config)
    options: dict[str, Any] = {}
    if is_sharded(config):
        options["fsdp"] = True
        options["fsdp_config"] = {
            "version": 2,
            "state_dict_type": "SHARDED_STATE_DICT",
            "transformer_layer_cls_to_wrap": [layer_class],
        }
    arguments = TrainingArguments(
        output_dir=config.out,
        seed=config.seed,
        use_cpu=not cuda,
        # Of sharded parameters, accelerate gathers bfloat16; else the Trainer of this package
        # runs autocast itself: accelerate's copies all logits to float32.
        bf16=is_bf16(config) and is_sharded(config),
        max_steps=training.steps,
        per_device_train_batch_size=training.batch_size,
        per_device_eval_batch_size=training.batch_size,
        gradient_accumulation_steps=training.accumulate,
        learning_rate=training.learning_rate,
        warmup_steps=training.warmup_steps,
        lr_scheduler_type=schedule,
        lr_scheduler_kwargs=schedule_arguments,
        # The Trainer of this package makes Muon.
        optim="adamw_torch" if optimizer == "muon" else optimizer,
        optim_args=",".join(f"{k}={v}" for k, v in training.optimizer_options.items()) or None,
        weight_decay=training.weight_decay,
        adam_beta1=training.betas[0],
        adam_beta2=training.betas[1],
        adam_epsilon=float(training.optimizer_options.get("eps", 1e-8)),
        max_grad_norm=training.max_grad_norm,
        logging_steps=run.log_every,
        logging_nan_inf_filter=False,
        eval_strategy="steps" if run.eval_every else "no",
        eval_steps=run.eval_every or None,
        prediction_loss_only=True,
        save_strategy="steps" if run.save_every else "no",
        save_steps=run.save_every or 500,  # not read without a strategy
        save_total_limit=run.keep,
        dataloader_num_workers=config.data.workers,
        dataloader_pin_memory=cuda,
        accelerator_config={"dispatch_batches": False, "non_blocking": cuda},
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,
        disable_tqdm=True,
        ignore_data_skip=True,  # the rows of a resumed run begin after those trained on
        report_to=[],
        use_cache=False,
        **options,
    )
    # A process trains on one GPU; of several that it sees, the Trainer makes an nn.DataParallel.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    if training.optimizer_options and optimizer != "muon":
        _check_options(arguments, training.optimizer_options)
    return arguments


def _check_options(arguments: TrainingArguments, options: Mapping[str, Any]) -> None:
    """ValueError for an option of the optimizer that transformers does not hand on."""
    _, passed = Trainer.get_optimizer_cls_and_kwargs(arguments)
    for name, value in options.items():
        if str(passed.get(name)) != str(value) and not _are_equal(passed.get(name), value):
            raise ValueError(
                f"training.optimizer_options.{name}={value} has no effect: transformers gives "
                f"{arguments.optim.value} {', '.join(sorted(passed))}"
            )


def _are_equal(x: Any, y: Any) -> bool:
    try:
        return float(x) == float(y)
    except (TypeError, ValueError):
        return False
