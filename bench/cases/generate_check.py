"""Whether the logits of `generate` are right, at every step and in every row of the batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch import Tensor

from nsa_flex.bench.cases.generate_case import GenerateCase
from nsa_flex.bench.cases.generate_clock import TokenClock
from nsa_flex.bench.cases.generate_models import forget
from nsa_flex.bench.report.rows import Row

# A step that is wrong gives logits as far from the right ones as their own size. One that chooses
# another block where two scores are nearly equal errs by a tenth or more too.
MAX_LOGITS_ERROR = 0.1
# An eighth of a unit in the last place of bfloat16: no logit that matters may round otherwise.
MAX_ERROR_ROUNDED_ALIKE = 1e-3
SHORT = 3  # steps behind those that warm up
PROMPTS = 3  # of each row, where compiled steps are held to eager ones


@torch.no_grad()
def logits_columns(model: Any, out: Tensor, logits: list[Tensor]) -> Row:
    """Relative errors of each step behind the prompt against one forward pass over all tokens.

    Args:
        out: (B, S) tokens that `generate` gave.
        logits: of each new token, the prompt's first, (B, V).

    Returns:
        logits_error: median over the steps, of the batch row where it is greatest.
        steps_off: share of the steps of all rows with an error above `MAX_LOGITS_ERROR`.
    """
    kept = len(logits)
    expected = model(out[:, :-1], use_cache=False, logits_to_keep=kept).logits
    errors = relative_errors(torch.stack(logits, 1)[:, 1:], expected[:, 1:])
    by_row = errors.quantile(0.5, dim=1)
    off = (~(errors < MAX_LOGITS_ERROR)).float().mean()
    return {"logits_error": three_digits(by_row.max()), "steps_off": three_digits(off)}


@torch.no_grad()
def error_rounded_alike(model: Any, ids: Tensor, case: GenerateCase) -> float:
    """Relative error of compiled steps against steps that are not compiled, of the worst row.

    Inductor is told to round to the inputs' dtype wherever eager code does. Otherwise it keeps
    float32 between operations that it fuses, and blocks whose scores are nearly equal change
    places. The order of its sums stays its own: after one of five prompts, one row of a batch is
    off by thousandths, the same row whenever that prompt is run. So a row counts with the least
    error of several prompts, each the one before moved by a token; and half of all errors are at
    most what is returned.
    """
    prompts = [ids.roll(tokens, 1) for tokens in range(PROMPTS)]
    options = replace(case, steps=SHORT).options()
    found: list[Tensor] = []
    for compiled in (True, False):
        forget(model)
        with inductor_config.patch(emulate_precision_casts=True):
            found.append(torch.stack([_logits(model, x, not compiled, options) for x in prompts]))
    forget(model)
    errors = relative_errors(*found).amax(-1)
    return three_digits(torch.maximum(errors.amin(0).max(), errors.median()))


def _logits(model: Any, ids: Tensor, disable_compile: bool, options: Row) -> Tensor:
    """(B, steps, V), of a call of `generate`."""
    clock = TokenClock(ids.device)
    model.generate(ids, logits_processor=[clock], disable_compile=disable_compile, **options)
    return torch.stack(clock.logits, 1)


def failure_of(row: Row) -> str | None:
    """What is wrong with a row's logits, if anything is."""
    if not row["logits_error"] < MAX_LOGITS_ERROR:
        return f"the logits of half the steps are off by {row['logits_error']} or more, relative"
    alike = row.get("logits_error_rounded_alike", 0.0)
    if not alike < MAX_ERROR_ROUNDED_ALIKE:
        return f"compiled steps that round as eager ones do are off by {alike}, relative"
    return None


def relative_errors(found: Tensor, expected: Tensor) -> Tensor:
    """(..., steps), of logits (..., steps, V), in float32."""
    found, expected = found.float(), expected.float()
    return (found - expected).norm(dim=-1) / expected.norm(dim=-1)


def three_digits(x: Tensor) -> float:
    """The number in `x` as a row has it."""
    return float(f"{x.item():.3g}")
