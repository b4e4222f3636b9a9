"""What `check_model` found: a status for every check, and the words for each that is not ok."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from nsa_flex.config import NSAConfig
from nsa_flex.patching import NSALayer, patch, unpatch
from nsa_flex.testing import forward_checks, lifetime_checks
from nsa_flex.testing.lifetime_checks import differences, snapshot
from nsa_flex.testing.sparse_models import shrink, small_sizes, sparse_modules
from nsa_flex.testing.subject import (
    Subject,
    WrongNumbers,
    device_of,
    logits,
    scatter_added,
    token_range,
    twin_of,
)

Status: TypeAlias = Literal["ok", "refused", "inherited", "wrong", "crashed"]
Verdict: TypeAlias = Literal["right", "refused", "wrong", "crashed"]

FAILURES: tuple[Literal["crashed"], Literal["wrong"]] = ("crashed", "wrong")


@dataclass(frozen=True)
class Check:
    """One property of the patched model.

    Args:
        name: of the check, as in `CHECKS`.
        status: "ok"; "refused", a ValueError of nsa_flex; "inherited", the unpatched model fails
            in the same way; "wrong", other numbers than expected; "crashed", another exception.
        detail: the error's size, the refusal or the exception; "" where it is ok.
    """

    name: str
    status: Status
    detail: str = ""


@dataclass(frozen=True)
class ConformanceReport:
    """What `check_model` found.

    Args:
        model: name of the model.
        layers: names of the patched attention modules; none where `patch` refused.
        checks: in the order they ran; "patch" alone where it refused.
    """

    model: str
    layers: tuple[str, ...]
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether no check is wrong or crashed. A refusal is no failure."""
        return not any(check.status in FAILURES for check in self.checks)

    @property
    def verdict(self) -> Verdict:
        """The worst that was found: "crashed", "wrong"; "refused" if it cannot run; or "right"."""
        for failure in FAILURES:
            if any(check.status == failure for check in self.checks):
                return failure
        runs = {check.name: check.status for check in self.checks}
        is_refused = "refused" in (runs["patch"], runs.get("causality"))
        return "refused" if is_refused else "right"

    def __getitem__(self, name: str) -> Check:
        """The check of that name; KeyError if it did not run."""
        for check in self.checks:
            if check.name == name:
                return check
        raise KeyError(name)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "model": self.model,
            "ok": self.ok,
            "verdict": self.verdict,
            "layers": list(self.layers),
            "checks": [asdict(check) for check in self.checks],
        }

    def __str__(self) -> str:
        lines = [f"{self.model}: {self.verdict}, {len(self.layers)} sparse layers"]
        for check in self.checks:
            detail = f"  {check.detail}" if check.detail else ""
            lines.append(f"  {check.status:<9} {check.name}{detail}")
        return "\n".join(lines)


# Small blocks: a few dozen tokens hold every case.
SMALL = NSAConfig(
    compress_block_size=8,
    compress_stride=4,
    select_block_size=8,
    num_selected_blocks=4,
    num_initial_blocks=1,
    num_local_blocks=2,
    window_size=12,
)

Run = Callable[[nn.Module, Subject], None]

# Of the unpatched model, which they patch themselves.
_OF_UNPATCHED: dict[str, Run] = {
    "dense start": forward_checks.dense_start,
    "twin on the same config": lifetime_checks.twin,
    "unpatch": lifetime_checks.undo,
}
# Of the patched model; where one fails, the unpatched model is tried likewise.
_OF_PATCHED: dict[str, Run] = {
    "causality": forward_checks.causality,
    "left padding": forward_checks.left_padding,
    "right padding": forward_checks.right_padding,
    "packed by position_ids": forward_checks.packed_by_positions,
    "packed by cu_seq_lens": forward_checks.packed_by_lengths,
    "dynamic cache": forward_checks.dynamic_cache,
    "static cache": forward_checks.static_cache,
    "save and load": lifetime_checks.save_and_load,
    "gradients": lifetime_checks.gradients,
}
# Models ignore cu_seq_lens unless their attention reads it, and a patched one must not; without
# NSA there is no gradient to look at.
_NEVER_INHERITED = {
    ("packed by cu_seq_lens", "wrong"),
    ("gradients", "wrong"),
    ("gradients", "crashed"),
}
CHECKS = ("patch", *_OF_UNPATCHED, *_OF_PATCHED)

_OWN = Path(__file__).parents[1]


def check_model(
    model: nn.Module,
    config: NSAConfig | None = None,
    *,
    name: str | None = None,
    tokens: tuple[int, int] | None = None,
    seed: int = 0,
    checks: Collection[str] = CHECKS,
    tell: Callable[[str], None] = lambda check: None,
) -> ConformanceReport:
    """Patch a twin of `model` and try everything that a patched model must keep.

    Of a model that is patched already, the twin is one of it as it is, and its own config counts.
    Of a MiniCPM4 with a sparse_config, and of a MiniMax-M3 whose attn_implementation is nsa_flex,
    the twin has smaller blocks, and is not patched.
    The twin shares the model's tensors; `model` itself, its configs and its gradients stay as
    they are. Memory for a second copy of the weights is needed by "save and load" alone.

    Args:
        model: a causal language model that takes token ids, float32 or float64.
        config: NSA's sizes, from which the lengths of the inputs follow; blocks of 8 if None, so
            that a few dozen tokens hold every case. None for a patched model.
        name: of the model in the report; its class if None.
        tokens: (first, last), the range of the random token ids, the last excluded. If None, from
            3 to the vocabulary's end, or to the first special token of its upper part.
        seed: of the token ids, gates and φ. Where two blocks score the same to the last bits,
            rounding may choose either: what is wrong for one seed alone is that, and gone in
            float64.
        checks: which of `CHECKS` to run; "patch" always does.
        tell: called with the name of every check before it runs.

    Returns:
        A status for each check. "refused" is a ValueError of nsa_flex, which leaves the model as
        it was; "inherited" means that the unpatched model fails in the same way.

    Raises:
        TypeError: `model` is no nn.Module.
        ValueError: a name in `checks` is unknown; `config` is given for a patched model; `model`
            has no parameters, fails on token ids alone, or is of a half-precision dtype, whose
            rounding would hide what a check looks for.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=99, **sizes))
    >>> print(check_model(model, name="llama", checks=["causality", "left padding"]))
    llama: right, 2 sparse layers
      ok        patch
      ok        causality
      ok        left padding
    """
    _check_arguments(model, checks)
    own = _own_config(model)
    if own is not None and config is not None:
        raise ValueError(
            "model is patched already: leave config out to check it as it is, or call "
            "nsa_flex.unpatch(model) first"
        )
    subject = Subject(own or config or SMALL, tokens or token_range(model), seed)
    name = type(model).__name__ if name is None else name
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # φ starts at random
        return _report(name, model, subject, checks, tell)


def _report(
    name: str,
    model: nn.Module,
    subject: Subject,
    checks: Collection[str],
    tell: Callable[[str], None],
) -> ConformanceReport:
    base, patched = (twin_of(model, own_configs=True).eval() for _ in range(2))
    tell("patch")
    own = sparse_modules(patched)
    if own:
        found = [Check("patch", "ok")]
        shrink(patched)
        base.set_attn_implementation("sdpa")
    elif _own_config(model) is None:
        found = [_patch(patched, subject)]
        scatter_added(patched, subject.seed)
    else:
        found = [Check("patch", "ok")]
        unpatch(base)
    layers = tuple(own) or tuple(
        name for name, module in patched.named_modules() if isinstance(module, NSALayer)
    )
    if found[0].status == "ok":
        _check_runs(base, subject)
        known = _OF_PATCHED if own else CHECKS[1:]
        for check in [name for name in known if name in checks]:
            tell(check)
            found.append(_run(check, patched, base, subject))
    return ConformanceReport(name, layers, tuple(found))


def _check_arguments(model: nn.Module, checks: Collection[str]) -> None:
    unknown = sorted(set(checks) - set(CHECKS))
    if unknown:
        raise ValueError(f"checks names {', '.join(unknown)}; known are {', '.join(CHECKS)}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; it must be an nn.Module")
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if not dtypes:
        raise ValueError("model has no parameters; expected a causal language model")
    half = sorted(str(dtype) for dtype in dtypes - {torch.float32, torch.float64})
    if half:
        raise ValueError(
            f"model has parameters of {', '.join(half)}; rounding would hide what a check looks "
            "for: load it in float32, or call model.float()"
        )


def _own_config(model: nn.Module) -> NSAConfig | None:
    """That of the first layer of a patched model, or of a smaller twin; None if it is neither."""
    small = small_sizes(model)
    if small is not None:
        return small
    return next((each.config for each in model.modules() if isinstance(each, NSALayer)), None)


def _check_runs(model: nn.Module, subject: Subject) -> None:
    try:
        logits(model, subject.ids(1, subject.length, device_of(model)))
    except Exception as error:
        raise ValueError(
            f"model fails without NSA too, called with token ids alone: {_with_place(error)}"
        ) from error


def _run_patch(model: nn.Module, subject: Subject) -> None:
    patch(model, subject.config)


def _patch(model: nn.Module, subject: Subject) -> Check:
    before = snapshot(model)
    found = _outcome("patch", _run_patch, model, subject)
    differ = "" if found.status == "ok" else differences(before, snapshot(model))
    if differ:
        return Check("patch", "wrong", f"{found.detail} left something behind: {differ}")
    return found


def _run(check: str, patched: nn.Module, base: nn.Module, subject: Subject) -> Check:
    """The check of the patched model; where that fails, of the unpatched one as well."""
    if check in _OF_UNPATCHED:
        return _outcome(check, _OF_UNPATCHED[check], base, subject)
    run = _OF_PATCHED[check]
    before = snapshot(patched.eval())
    found = _outcome(check, run, patched, subject)
    differ = differences(before, snapshot(patched.eval())) if found.status == "refused" else ""
    if differ:
        return Check(check, "wrong", f"{found.detail} left something behind: {differ}")
    if found.status not in FAILURES or (check, found.status) in _NEVER_INHERITED:
        return found
    other = _outcome(check, run, base.eval(), subject)
    if other.status == found.status:
        return Check(check, "inherited", f"as without NSA: {other.detail}")
    return found


def _outcome(check: str, run: Run, model: nn.Module, subject: Subject) -> Check:
    """Run one check and put what came into words."""
    try:
        run(model, subject)
    except WrongNumbers as error:
        return Check(check, "wrong", str(error))
    except Exception as error:
        if _is_refusal(error):
            return Check(check, "refused", _one_line(error))
        return Check(check, "crashed", _with_place(error))
    return Check(check, "ok")


def _is_refusal(error: Exception) -> bool:
    """Whether nsa_flex said no: by a ValueError, or by an assertion on values on the device."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = Path(last.filename)
    is_own = _OWN in place.parents and _OWN / "testing" not in place.parents
    is_assertion = "_assert_async" in (last.line or "")
    return is_own and (isinstance(error, ValueError) or is_assertion)


def _with_place(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {_one_line(error)} ({Path(last.filename).name}:{last.lineno})"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
