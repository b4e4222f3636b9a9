"""Whether the logits of `generate` are right, at every step and in every row of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch import Tensor

from nsa_flex.bench.cases.generate_steps import GenerateCase, TokenClock
from nsa_flex.bench.cases.pairs import forget
from nsa_flex.bench.report.rows import Row

# A step that is wrong gives logits as far from the right ones as their own size. One that chooses
# another block where two scores are nearly equal errs by a tenth or more too.
MAX_LOGITS_ERROR = 0.1
# Where activations are rounded to 8 bits, what rounds otherwise in bfloat16 becomes a step of 8
# bits: steps may be as far from a pass over all tokens as that pass is from unquantized weights,
# but no farther than this. A step that reads a wrong cache is farther off than its own size.
MAX_QUANTIZED_ERROR = 0.5
# An eighth of a unit in the last place of bfloat16: no logit that matters may round otherwise.
MAX_ERROR_ROUNDED_ALIKE = 1e-3
SHORT = 3  # steps behind those that warm up
PROMPTS = 3  # of each row, where compiled steps are held to eager ones
# Of so many rows, one may be moved by the order of sums after each of the prompts. After one
# prompt it moved 6 rows of 224 in 34 steps of two layers 1024 wide. 19 steps of four layers 4096
# wide have 4.5 times as many sums, so that with the upper bound for 6 (95 %) at most a quarter of
# the rows is moved after one prompt, 1 in 60 after three: more than 1 row of 8 in less than 1 run
# of 100, more than 4 of 32 in 1 of 5000. A kernel that is wrong moves all rows, or its own
# always.
ROWS_TO_ONE_MOVED = 8


@torch.no_grad()
def logits_columns(model: Any, out: Tensor, logits: list[Tensor], exact: Any | None = None) -> Row:
    """Relative errors of each step behind the prompt against one forward pass over all tokens.

    Args:
        out: (B, S) tokens that `generate` gave.
        logits: of each new token, the prompt's first, (B, V).
        exact: the same model with weights and activations that are not quantized, if they are.

    Returns:
        logits_error: median over the steps, of the batch row where it is greatest.
        steps_off: share of the steps of all rows with an error above `MAX_LOGITS_ERROR`.
        quantization_error: the median so far of the model's own forward pass from that of `exact`,
            of the batch row where it is least. Only with `exact`.
    """
    expected = _uncached(model, out, len(logits))
    errors = relative_errors(torch.stack(logits, 1)[:, 1:], expected)
    off = (~(errors < MAX_LOGITS_ERROR)).float().mean()
    found: Row = {
        "logits_error": three_digits(errors.quantile(0.5, dim=1).max()),
        "steps_off": three_digits(off),
    }
    if exact is None:
        return found
    rounded = relative_errors(expected, _uncached(exact, out, len(logits)))
    return {**found, "quantization_error": three_digits(rounded.quantile(0.5, dim=1).min())}


def _uncached(model: Any, out: Tensor, kept: int) -> Tensor:
    """(B, kept - 1, V), the logits of all new tokens but the first, by one pass over all."""
    return model(out[:, :-1], use_cache=False, logits_to_keep=kept).logits[:, 1:]


class Follower(TokenClock):
    """Has `generate` take the tokens of another call, whatever logits it makes itself.

    Args:
        device: of the model.
        followed: (B, steps, V), the logits of that call.
    """

    def __init__(self, device: torch.device, followed: Tensor) -> None:
        super().__init__(device)
        self.followed = followed

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Those of the other call."""
        super().__call__(input_ids, scores)
        return self.followed[:, len(self.logits) - 1]


@torch.no_grad()
def rounded_alike(model: Any, ids: Tensor, case: GenerateCase) -> Row:
    """Columns of compiled steps against steps that are not compiled, over the same tokens.

    Inductor is told to round to the inputs' dtype wherever eager code does. Otherwise it keeps
    float32 between operations that it fuses, and blocks whose scores are nearly equal change
    places. The order of its sums stays its own: after some prompts a row of the batch is off by
    thousandths, the same row whenever that prompt is run. So there are several prompts, each the
    one before moved by a token.
    """
    prompts = [ids.roll(tokens, 1) for tokens in range(PROMPTS)]
    options = replace(case, steps=SHORT).options()
    with inductor_config.patch(emulate_precision_casts=True):
        forget(model)
        clocks = [TokenClock(ids.device) for _ in prompts]
        found = _logits(model, prompts, clocks, disable_compile=False, **options)
        forget(model)
        clocks = [Follower(ids.device, each) for each in found]
        expected = _logits(model, prompts, clocks, disable_compile=True, **options)
    forget(model)
    return columns_rounded_alike(relative_errors(found[:, :, 1:], expected[:, :, 1:]))


def columns_rounded_alike(errors: Tensor) -> Row:
    """Of relative errors (prompts, B, steps).

    Returns:
        logits_error_rounded_alike: of the worst step after the prompt that suits the row best,
            the greatest of seven rows in eight; at least what half of all prompts and rows err.
        worst_row_rounded_alike: median over the steps, of the row and prompt where it is greatest.
        rows_moved: rows above `MAX_ERROR_ROUNDED_ALIKE` after each of the prompts.
    """
    of_prompts = errors.amax(-1)
    by_row = of_prompts.amin(0).sort().values
    moved = ~(by_row < MAX_ERROR_ROUNDED_ALIKE)
    held = by_row[len(by_row) - len(by_row) // ROWS_TO_ONE_MOVED - 1]
    return {
        "logits_error_rounded_alike": three_digits(torch.maximum(held, of_prompts.median())),
        "worst_row_rounded_alike": three_digits(errors.quantile(0.5, dim=-1).max()),
        "rows_moved": int(moved.sum()),
    }


def _logits(
    model: Any, prompts: list[Tensor], clocks: Sequence[TokenClock], **options: Any
) -> Tensor:
    """(prompts, B, steps, V), of a call of `generate` each."""
    for ids, clock in zip(prompts, clocks, strict=True):
        model.generate(ids, logits_processor=[clock], **options)
    return torch.stack([torch.stack(clock.logits, 1) for clock in clocks])


def failure_of(row: Row) -> str | None:
    """What is wrong with a row's logits, if anything is."""
    allowed = min(row.get("quantization_error", 0.0), MAX_QUANTIZED_ERROR)
    if not row["logits_error"] < max(MAX_LOGITS_ERROR, allowed):
        return f"the logits of half the steps are off by {row['logits_error']} or more, relative"
    alike = row.get("logits_error_rounded_alike", 0.0)
    if not alike < MAX_ERROR_ROUNDED_ALIKE:
        return f"compiled steps that round as eager ones do are off by {alike}, relative"
    worst = row.get("worst_row_rounded_alike", 0.0)
    if not worst < MAX_LOGITS_ERROR:
        return f"half the compiled steps of a row are off from eager ones by {worst}, relative"
    return None


def relative_errors(found: Tensor, expected: Tensor) -> Tensor:
    """(..., steps), of logits (..., steps, V), in float32."""
    found, expected = found.float(), expected.float()
    return (found - expected).norm(dim=-1) / expected.norm(dim=-1)


def three_digits(x: Tensor) -> float:
    """The number in `x` as a row has it."""
    return float(f"{x.item():.3g}")
