"""Before anything is timed, its results are held to a float64 reference on sampled queries.

For the backward the incoming gradient is zero except at the sampled queries. The gradients of
all keys and values are then those of these queries alone: affordable at any length.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_flex.bench.cases.case import Case
from nsa_flex.bench.cases.parts import Choice, CompressionTarget, compression_by_definition
from nsa_flex.bench.cases.targets import PER_QUERY, Function, Group, Target, Task

SAMPLED_QUERIES = 20
MAX_EXCESS = 1e-4  # float32 sums of float32 exponentials, of some thousand terms


class GateError(RuntimeError):
    """A result is wrong; the message says which and by how much."""


class Checked(NamedTuple):
    """What a right result leaves behind.

    Args:
        errors: relative error of the output and of each gradient over the error allowed.
        grad: a tensor laid out as the output, to be an incoming gradient; None for a choice.
    """

    errors: dict[str, float]
    grad: Tensor | None


def check(target: Target, case: Case, task: Task, function: Function) -> Checked:
    """Holds the output and each gradient to the reference.

    Raises:
        GateError: an error is above what is allowed, or not a number.
    """
    grad = None
    if isinstance(target, Choice):
        ratios = {"excess": _worst_excess(target, case, task, function) / MAX_EXCESS}
    elif isinstance(target, CompressionTarget):
        ratios, grad = _check_compression(case, task, function)
    else:
        ratios, grad = _check_groups(target, case, task, function)
    wrong = {name: ratio for name, ratio in ratios.items() if not ratio <= 1}
    if wrong:
        listed = ", ".join(f"{name} {ratio:.2f}" for name, ratio in wrong.items())
        raise GateError(f"errors over what is allowed: {listed}")
    return Checked({name: round(ratio, 3) for name, ratio in ratios.items()}, grad)


def allowed_error(eager_error: float, dtype: torch.dtype) -> float:
    """Twice what eager PyTorch errs in that dtype; in float32 some last places."""
    eps = torch.finfo(dtype).eps
    return 32 * eps if dtype == torch.float32 else 2 * eager_error + eps / 8


def sample_positions(length: int, device: torch.device) -> Tensor:
    """int64 (R,), ascending: both ends, edges of blocks, and random queries."""
    edges = [0, 1, 31, 63, 64, 511, 512, length // 2, length - 2, length - 1]
    drawn = torch.randint(length, (SAMPLED_QUERIES,)).tolist()
    kept = sorted({p for p in [*edges, *drawn] if 0 <= p < length})
    return torch.tensor(kept, device=device)


def sample_groups(case: Case, device: torch.device) -> list[Group]:
    """The first and the last KV head, of the first and the last batch row."""
    positions = sample_positions(case.seq_len, device)
    ends = {(0, 0), (case.batch - 1, case.kv_heads - 1)}
    return [Group(batch, head, positions) for batch, head in sorted(ends)]


def _check_groups(
    target: Target, case: Case, task: Task, function: Function
) -> tuple[dict[str, float], Tensor]:
    device = next(iter(task.arguments.values())).device
    groups = [
        Group(g.batch, g.head, g.positions[target.clear(case, task, g)])
        for g in sample_groups(case, device)
    ]
    out = function(*task.arguments.values())
    errors = _Errors(case.torch_dtype)
    grad = torch.zeros_like(out)
    for group in groups:
        grad[_rows(case, group)] = torch.randn_like(grad[_rows(case, group)])
    got = _gradients(out, task, grad) if case.train else {}
    for group in groups:
        truth, eager = (
            _reference(target, case, task, group, grad, dtype)
            for dtype in (torch.float64, case.torch_dtype)
        )
        errors.add("out", out.detach()[_rows(case, group)], truth["out"], eager["out"])
        for name, gradient in got.items():
            mine = gradient[_place(name, case, group)]
            errors.add(f"grad_{name}", mine, truth[name], eager[name])
    return errors.ratios(), grad


def _reference(
    target: Target, case: Case, task: Task, group: Group, grad: Tensor, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Output ("out") and gradient of each argument of one group, in `dtype`."""
    arguments = {
        name: x.detach()[_place(name, case, group)].to(dtype).requires_grad_(case.train)
        for name, x in task.arguments.items()
    }
    out = target.reference(case, task, group, arguments)
    if not case.train:
        return {"out": out}
    wanted = torch.autograd.grad(
        out, list(arguments.values()), grad[_rows(case, group)].to(out.dtype), allow_unused=True
    )
    pairs = zip(arguments, wanted, strict=True)
    return {"out": out.detach(), **{name: g for name, g in pairs if g is not None}}


def _gradients(out: Tensor, task: Task, grad: Tensor) -> dict[str, Tensor]:
    found = torch.autograd.grad(out, list(task.arguments.values()), grad, allow_unused=True)
    return {name: g for name, g in zip(task.arguments, found, strict=True) if g is not None}


def _rows(case: Case, group: Group) -> tuple[int, Tensor, Tensor]:
    """Index of a group's sampled queries in (B, Hq, S, ...)."""
    first = group.head * case.group_size
    heads = torch.arange(first, first + case.group_size, device=group.positions.device)
    return group.batch, heads[:, None], group.positions


def _place(name: str, case: Case, group: Group) -> tuple[int | Tensor, ...]:
    """Index of a group in the argument of that name."""
    return _rows(case, group) if name in PER_QUERY else (group.batch, group.head)


def _worst_excess(target: Choice, case: Case, task: Task, function: Function) -> float:
    chosen = function(*task.arguments.values())
    return max(
        target.excess(case, task, g, chosen[g.batch, g.head, g.positions])
        for g in sample_groups(case, chosen.device)
    )


def _check_compression(
    case: Case, task: Task, function: Function
) -> tuple[dict[str, float], Tensor]:
    """All blocks of φ, or the first and last ones of long inputs, against the definition."""
    names = list(task.arguments)
    out = function(*task.arguments.values())
    shown = torch.zeros(out.shape[2], dtype=torch.bool, device=out.device)
    shown[:64] = shown[-64:] = True
    grad = torch.randn_like(out) * shown[:, None]
    got = _gradients(out, task, grad) if case.train else {}
    ends: list[dict[str, Tensor]] = []
    for dtype in (torch.float64, case.torch_dtype):
        arguments = {
            name: x.detach().to(dtype).requires_grad_(case.train)
            for name, x in task.arguments.items()
        }
        weights = {name: arguments[name] for name in names[1:]}
        written = compression_by_definition(arguments["key"], weights, case.config)
        each = {"out": written.detach()}
        if case.train:
            found = torch.autograd.grad(written, list(arguments.values()), grad.to(dtype))
            each |= dict(zip(names, found, strict=True))
        ends.append(each)
    errors = _Errors(case.torch_dtype)
    for name, mine in {"out": out.detach(), **got}.items():
        errors.add(name if name == "out" else f"grad_{name}", mine, ends[0][name], ends[1][name])
    return errors.ratios(), grad


class _Errors:
    """Squared errors of several pieces, by name."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])

    def add(self, name: str, got: Tensor, want: Tensor, eager: Tensor) -> None:
        """One piece: what came, the truth in float64, and what eager made of it."""
        truth = want.double()
        for place, x in enumerate((got.double() - truth, eager.double() - truth, truth)):
            self.sums[name][place] += x.square().sum().item()

    def ratios(self) -> dict[str, float]:
        """Error over allowed error, norms over all pieces."""
        found = {}
        for name, (mine, eager, size) in self.sums.items():
            norm = size**0.5 or 1.0
            allowed = allowed_error(eager**0.5 / norm, self.dtype)
            found[name] = mine**0.5 / norm / allowed
        return found
