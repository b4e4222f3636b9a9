"""A run's folder: whose it is while it is written, and checkpoints that are whole or not there."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import shutil
import socket
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from nsa_flex.training.errors import TrainingError
from nsa_flex.training.record import RECORD_FILE

LOCK_FILE = "run.lock"
MODEL_FOLDER = "model"  # of a run that ended
AVERAGE_FOLDER = "model-average"


@contextlib.contextmanager
def locked(run: Path) -> Iterator[None]:
    """Within, no other process can hold the lock on `run`, which exists.

    The system takes the lock away from a process that ends, however it ends, and gives it to none
    of its children: there are no stale ones. The file says who holds it.

    Raises:
        ValueError: another process holds it; its number and host are named.
        OSError: the file cannot be written, or its file system knows no locks.
    """
    with (run / LOCK_FILE).open("a+") as file:
        _take(file.fileno(), run)
        os.ftruncate(file.fileno(), 0)
        os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        try:
            yield
        finally:
            os.ftruncate(file.fileno(), 0)


def check_free(run: Path) -> None:
    """Raise ValueError if another process holds the lock on `run`; nothing is written."""
    if (run / LOCK_FILE).exists():
        with (run / LOCK_FILE).open("r+") as file:
            _take(file.fileno(), run)


def _take(file: int, run: Path) -> None:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of the process: forks do not inherit it
    except (BlockingIOError, PermissionError) as error:
        holder = os.pread(file, 200, 0).decode(errors="replace").strip() or "another process"
        raise ValueError(
            f"{run} is in use by {holder}: wait for it or stop it, or choose another out"
        ) from error


PREFIX = "checkpoint-"
_ASIDE = ".writing"
_ABANDONED = "abandoned-"


@contextlib.contextmanager
def written_aside(run: Path, step: int, *, writes: bool = True) -> Iterator[Path]:
    """A folder to write checkpoint `step` under; it gets its place in `run` when all is written.

    Args:
        writes: false on ranks other than 0, which neither make the folder nor rename it.

    Yields:
        the folder that stands for `run`: the checkpoint goes to its `checkpoint-<step>`.

    Raises:
        TrainingError: a file could not be written. What was is removed; earlier checkpoints stay.
    """
    aside, name = run / _ASIDE, f"{PREFIX}{step}"
    try:
        if writes:
            remove_unfinished(run)
            aside.mkdir(parents=True)
        yield aside
        if writes:
            _finish(aside / name)
            if (run / name).exists():  # written before the run was killed, and reached again
                shutil.rmtree(run / name)
            (aside / name).rename(run / name)
            _flush_folder(run)
            aside.rmdir()
    except (OSError, SafetensorError) as error:
        remove_unfinished(run)
        last = last_checkpoint(run)
        raise TrainingError(
            f"checkpoint {step} could not be written to {run} ({error}): free some space, then "
            f"resume from {'the start' if last is None else last.name}"
        ) from error


def checkpoints(run: Path) -> list[Path]:
    """All that have their place in `run`, by steps."""
    found = [path for path in run.glob(f"{PREFIX}*") if path.name[len(PREFIX) :].isdigit()]
    return sorted(found, key=step_of)


def last_checkpoint(run: Path) -> Path | None:
    """The one with the most steps, or None."""
    return max(checkpoints(run), key=step_of, default=None)


def chosen_checkpoint(run: Path, name: str) -> Path:
    """A checkpoint by its steps or its path.

    Raises:
        ValueError: there is no such folder, or its name does not say the steps.
    """
    path = run / f"{PREFIX}{name}" if name.isdigit() else Path(name)
    if not path.is_dir() or not path.name[len(PREFIX) :].isdigit():
        there = ", ".join(str(step_of(each)) for each in checkpoints(run)) or "none"
        raise ValueError(f"{path} is no checkpoint; {run} has those of the steps: {there}")
    return path


def set_aside(run: Path, start: Path) -> None:
    """Rename the checkpoints that a run has left behind by going on from `start`."""
    for path in checkpoints(run):
        if step_of(path) >= step_of(start) and path.resolve() != start.resolve():
            aside = run / f"{_ABANDONED}{step_of(path)}"
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)


def set_models_aside(run: Path, step: int) -> None:
    """Rename the models that a run wrote at its end, `step`, before it goes on."""
    for name in (MODEL_FOLDER, AVERAGE_FOLDER):
        if (run / name).exists():
            aside = run / f"earlier-{name}-{step}"
            shutil.rmtree(aside, ignore_errors=True)
            (run / name).rename(aside)


def check_whole(checkpoint: Path, run: Path) -> None:
    """Raise TrainingError if a file of `checkpoint` is damaged; it is named, and what to do."""
    wrong = _damage(checkpoint)
    if wrong is None:
        return
    earlier = [path for path in checkpoints(run) if step_of(path) < step_of(checkpoint)]
    whole = next((path for path in reversed(earlier) if _damage(path) is None), None)
    after = (
        "no earlier one is whole: choose another out"
        if whole is None
        else f"go on from {whole.name} with --resume-from {step_of(whole)}"
    )
    raise TrainingError(f"{checkpoint / wrong}; {after}")


def _damage(checkpoint: Path) -> str | None:
    """The first file that is not as it was written, and how; contents of tensors are not read."""
    name = RECORD_FILE
    try:
        sizes = json.loads((checkpoint / name).read_text())["sizes"]
        for name, size in sizes.items():
            path = checkpoint / name
            if path.stat().st_size != size:
                return f"{name} is damaged: {path.stat().st_size} bytes, expected {size}"
            if path.suffix == ".safetensors":
                with safe_open(path, framework="pt"):
                    pass
            elif path.suffix == ".json":
                json.loads(path.read_text())
    except OSError as error:
        return f"{name} is damaged: {error.strerror}"
    except (SafetensorError, ValueError, KeyError) as error:
        return f"{name} is damaged: {error}"
    return None


def remove_unfinished(run: Path) -> None:
    """Remove what a killed process left half written."""
    shutil.rmtree(run / _ASIDE, ignore_errors=True)


def step_of(checkpoint: Path) -> int:
    """Optimizer steps that a checkpoint has behind it."""
    return int(checkpoint.name[len(PREFIX) :])


@contextlib.contextmanager
def folder_aside(folder: Path) -> Iterator[Path]:
    """A folder to write that takes the place of `folder` once it is whole."""
    aside = folder.with_name(f".{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    yield aside
    _finish(aside)
    if folder.exists():
        shutil.rmtree(folder)
    aside.rename(folder)
    _flush_folder(folder.parent)


def save_state(path: Path, state: Any) -> None:
    """Write nested dicts and lists: tensors to safetensors, the rest to its header."""
    tensors: dict[str, Tensor] = {}
    plain = _take_tensors(state, "", tensors, {})
    save_file(tensors, path, metadata={"state": json.dumps(plain)})


def load_state(path: Path) -> Any:
    """What `save_state` wrote. Integer keys of dicts come back as integers."""
    with safe_open(path, framework="pt") as file:
        plain = json.loads(file.metadata()["state"])
        return _put_tensors(plain, file.get_tensor)


def random_state() -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's global generators, this rank's device's too."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state = {
        "python": [version, list(numbers), gauss],
        "numpy": [name, torch.from_numpy(np.array(keys)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Inverse of `random_state`."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy(), *rest))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _take_tensors(value: Any, name: str, tensors: dict[str, Tensor], names: dict) -> Any:
    """The plain part of `value`; its tensors go to `tensors`.

    Args:
        names: of what is in `tensors`, by its memory: what several share is written once.
    """

    def taken(part: Any, key: Any) -> Any:
        return _take_tensors(part, f"{name}/{key}", tensors, names)

    wraps: bool = is_traceable_wrapper_subclass(value)
    if wraps:
        inner, context = value.__tensor_flatten__()
        return {
            "class": [type(value).__module__, type(value).__name__],
            "inner": [[key, taken(getattr(value, key), key)] for key in inner],
            "context": [str(x) if isinstance(x, torch.dtype) else x for x in context],
        }
    if isinstance(value, Tensor):
        memory = (value.data_ptr() or name, value.dtype, value.shape, value.stride())
        if names.setdefault(memory, name) == name:
            tensors[name] = value.detach().contiguous()
        return {"tensor": names[memory]}
    if isinstance(value, dict):
        return {"dict": [[key, taken(x, key)] for key, x in value.items()]}
    if isinstance(value, (list, tuple)):
        return [taken(x, i) for i, x in enumerate(value)]
    return value


def _put_tensors(value: Any, get_tensor: Any) -> Any:
    if isinstance(value, list):
        return [_put_tensors(x, get_tensor) for x in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return get_tensor(value["tensor"])
    if "class" in value:
        return _put_subclass(value, get_tensor)
    return {key: _put_tensors(x, get_tensor) for key, x in value["dict"]}


def _put_subclass(value: dict[str, Any], get_tensor: Any) -> Tensor:
    """A tensor of torchao's, of quantized moments; no file names a class of another package."""
    module, name = value["class"]
    if not module.startswith("torchao."):
        raise ValueError(f"a checkpoint has a tensor of {module}.{name}; expected one of torchao")
    inner = {n: _put_tensors(x, get_tensor) for n, x in value["inner"]}
    context = [_context(x) for x in value["context"]]
    return getattr(import_module(module), name).__tensor_unflatten__(inner, context)


def _context(value: Any) -> Any:
    """A dtype by its name, a shape as a tuple; else as it is."""
    if isinstance(value, str):
        return getattr(torch, value.removeprefix("torch."))
    return tuple(value) if isinstance(value, list) else value


def _finish(folder: Path) -> None:
    """Every file below gets the mode that files get here, and is on the disk.

    safetensors makes files that nobody else can read. The folder's own mode knows the umask.
    """
    for parent, _, files in os.walk(folder):
        mode = Path(parent).stat().st_mode & 0o666
        for name in files:
            with (Path(parent) / name).open("rb") as file:
                os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
        _flush_folder(Path(parent))


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
