"""Runs cases one after another: gate, times, peak memory, floor; one or two rows each."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nsa_flex.bench.cases.case import Case, Skip
from nsa_flex.bench.cases.compile_time import CompileCase, compile_times
from nsa_flex.bench.cases.layers import LayerCase, layer_columns
from nsa_flex.bench.cases.models import ModelCase, training_columns
from nsa_flex.bench.cases.registry import TARGETS, AnyCase
from nsa_flex.bench.cases.targets import Function, Target
from nsa_flex.bench.measure.gate import GateError, check
from nsa_flex.bench.measure.timing import Mark, PeakMemory, Step, measure
from nsa_flex.bench.measure.work import work_of
from nsa_flex.bench.report.rows import Notebook, Row

DEVICE_LOST = "CUDA error"


@dataclass(frozen=True)
class Options:
    """How to measure.

    Args:
        device: where.
        budget_ms: about how long the repeats of one measurement take together.
        compiler: backend of torch.compile.
        seed: of inputs and of the queries that the gate samples.
    """

    device: torch.device
    budget_ms: float = 300.0
    compiler: str = "inductor"
    seed: int = 0


def run(
    cases: Iterable[AnyCase],
    notebook: Notebook,
    ceilings: dict[str, Any],
    options: Options,
    tell: Callable[[AnyCase, list[Row]], None],
) -> list[Row]:
    """Measures what the notebook lacks; `tell` hears of every case when it is done.

    Returns:
        The rows of all the cases, in their order; of those up to it, if one crashed the device.
    """
    found: list[Row] = []
    with _modules_kept():
        for case in cases:
            rows = notebook.done(case.key)
            if not rows:
                rows = notebook.add(rows_of(case, ceilings, options))
            tell(case, rows)
            found += rows
            if any(DEVICE_LOST in row.get("reason", "") for row in rows):
                break  # a process does not recover from it: every later case would fail too
    return found


@contextlib.contextmanager
def _modules_kept() -> Iterator[None]:
    """Inside, no collection looks at what is there already: two a case took half its time."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def passes_of(case: AnyCase) -> tuple[str, ...]:
    """What each row of a case tells the time of."""
    if isinstance(case, ModelCase):
        return ("training_step",)
    if isinstance(case, CompileCase):
        return ("compile_cold", "compile_warm")
    return ("forward_backward", "backward") if case.train else ("forward",)


def rows_of(case: AnyCase, ceilings: dict[str, Any], options: Options) -> list[Row]:
    """Rows of one case: measured, skipped with its reason, or failed with what was wrong."""
    try:
        torch.manual_seed(options.seed)
        torch._dynamo.reset()
        columns = _measured(case, ceilings, options)
        return [
            {**case.fields(), "pass": which, "status": "ok", **columns[which], **ceilings}
            for which in passes_of(case)
        ]
    except Skip as error:
        status, reason = "skipped", str(error)
    except torch.OutOfMemoryError as error:
        status, reason = "skipped", f"out of memory: {_gist(error)}"
    except GateError as error:
        status, reason = "failed", str(error)
    except Exception as error:
        # A backend that says it cannot is no failure of ours: every other error is.
        status = "skipped" if _is_refusal(error) else "failed"
        reason = f"{type(error).__name__}: {_gist(error)}"
    finally:
        _clean_up(options.device)
    why = {"status": status, "reason": reason}
    return [{**case.fields(), "pass": which, **why} for which in passes_of(case)]


def _measured(
    case: AnyCase, ceilings: dict[str, Any], options: Options
) -> dict[str, dict[str, Any]]:
    """Columns of each pass."""
    if isinstance(case, ModelCase):
        if case.implementation.endswith("-graph") and options.device.type != "cuda":
            raise Skip("CUDA graphs are captured on CUDA")
        columns = training_columns(
            case, ceilings, options.device, options.compiler, options.budget_ms
        )
        return {"training_step": columns}
    if isinstance(case, LayerCase):
        return layer_columns(case, options.device, options.compiler, options.budget_ms)
    if isinstance(case, CompileCase):
        if options.device.type != "cuda":
            raise Skip("compile times are taken on CUDA")
        return {
            f"compile_{name}": {"median_ms": round(1e3 * seconds), "repeats": 1}
            for name, seconds in compile_times(case).items()
        }
    return _measured_attention(TARGETS[case.target], case, ceilings, options)


def _measured_attention(
    target: Target, case: Case, ceilings: dict[str, Any], options: Options
) -> dict[str, dict[str, Any]]:
    reason = target.unsupported_reason(case, _memory(options.device))
    if reason is not None:
        raise Skip(reason)
    task = target.prepare(case, options.device)
    function = target.function(case, task, options.compiler)
    with torch.set_grad_enabled(case.train):
        errors, grad = check(target, case, task, function)
        _clean_up(options.device)
        arguments = list(task.arguments.values())
        step = _step(function, arguments, grad if case.train else None)
        peak = PeakMemory(options.device)
        # What runs eagerly is bound by its host, which belongs to it.
        hide_host = not case.implementation.endswith("eager")
        times = measure(
            step, options.device, options.budget_ms, hide_host=hide_host, first_run=peak
        )
    return {
        which: {
            **times[interval].columns(),
            "peak_bytes": peak.bytes,
            **work_of(case, which).columns(ceilings, times[interval].median_ms),
            "error_over_allowed": errors,
            **task.facts,
            "compiler": options.compiler,
        }
        for which, interval in zip(passes_of(case), ("whole", "second"), strict=False)
    }


def _step(function: Function, arguments: list[Tensor], grad: Tensor | None) -> Step:
    """grad: memory of an incoming gradient, laid out as the output; None without a backward."""
    if grad is None:
        return lambda mark: function(*arguments)
    grad.normal_()

    def step(mark: Mark) -> None:
        out = function(*arguments)
        mark()
        torch.autograd.grad(out, arguments, grad, allow_unused=True)

    return step


def _memory(device: torch.device) -> int:
    """Bytes that a case may take: the GPU's, 4 GiB on a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return 4 * 2**30


def _is_refusal(error: Exception) -> bool:
    text = str(error)
    return "cannot compute" in text or "No available kernel" in text


def _gist(error: Exception) -> str:
    """First and last line of its text: compilers put the source in front and the fault behind."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [""]
    return " … ".join(line[:200] for line in dict.fromkeys((lines[0], lines[-1])))


def _clean_up(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):  # after a crash nothing works; it was reported
            torch.cuda.empty_cache()
