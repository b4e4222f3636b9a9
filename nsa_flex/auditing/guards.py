"""What a failed guard says: why torch compiled again, at which line, and how to save it."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

from nsa_flex.auditing.batches import Batch

_SIZE = re.compile(
    r"tensor '(?P<name>.*?)' size mismatch at index (?P<dim>\d+)\. "
    r"expected (?P<expected>\d+), actual (?P<actual>\d+)"
)
# A guard over a symbol names the tensor and dimension, then quotes the line that asked.
_SYMBOL = re.compile(r"(?P<name>[\w.\[\]'\"]+)\.size\(\)\[(?P<dim>\d+)\]")
_QUOTED_LINE = re.compile(r"# (?P<file>[^#:]*\.py):(?P<line>\d+) in (?P<function>[\w<>]+)")

_MENDS = (
    ("dtype mismatch", "call it with one dtype, or cast where the data enters"),
    ("requires_grad mismatch", "give the argument the same requires_grad in every call"),
    ("stride mismatch", "give the argument one memory layout: .contiguous() where it is made"),
    ("rank mismatch", "give the argument the same number of dimensions in every call"),
    ("GLOBAL_STATE", "keep grad mode, autocast and the number of threads the same in every call"),
    (
        "cell_contents",
        "the function closes over a Python value that changes: pass it in as a tensor",
    ),
    (
        "__closure__",
        "the function closes over a Python value that changes: pass it in as a tensor",
    ),
    ("duck sizing", "two sizes are equal in one batch and not in another: pass another first"),
    ("___check_obj_id", "it is given another object in every call: make it once and keep it"),
    ("G[", "a global value changes between calls: pass it in as a tensor"),
)


# What Dynamo calls the rest of a function behind a graph break.
_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+?)_at_\d+")


def original_name(text: str) -> str:
    """Functions by the names that their authors gave them.

    >>> original_name("model.py:5 in torch_dynamo_resume_in_forward_at_7")
    'model.py:5 in forward'
    """
    return _RESUMED.sub(r"\1", text)


@dataclass(frozen=True)
class Cause:
    """Reading of one failed guard; `cause` and the rest as in `Recompile`."""

    cause: str
    guard: str
    location: str
    mend: str


class GuardReader:
    """Tells recompilations that torch always makes from those that the code causes.

    Torch compiles for the first sizes that it meets and once more, with a symbol, for each
    dimension that changes later; and it takes sizes 0 and 1 for constants. What goes beyond that
    is the code's doing.
    """

    def __init__(self) -> None:
        self._lengths: set[tuple[str, str, str]] = set()
        self._small: set[frozenset[tuple[str, int]]] = set()

    def start(self, batch: Batch) -> bool:
        """Whether no earlier batch had its sizes 0 and 1 at these places. Call it per batch."""
        new = batch.small not in self._small
        self._small.add(batch.small)
        return new

    def read(self, guard: str, fallback: str, new_small_sizes: bool) -> Cause:
        """Args: the guard's text, the function's own line, and what `start` said."""
        guard = re.sub(r"^\d+/\d+(_\d+)?: ", "", " ".join(guard.split()))
        location = _quoted_location(guard) or fallback
        shown = guard.partition(" # ")[0]
        size = _SIZE.search(guard)
        if size and new_small_sizes and "1" in (size["expected"], size["actual"]):
            return Cause("size-one", shown, location, "torch takes a size of 1 for a constant")
        if size:
            place = fallback, size["name"], size["dim"]
            cause = "length" if place not in self._lengths else "code"
            self._lengths.add(place)
            return Cause(cause, shown, location, _mark_dynamic(size["name"], size["dim"]))
        if "duck sizing" in guard:
            return Cause("same-size", shown, location, dict(_MENDS)["duck sizing"])
        if new_small_sizes and re.match(r"2 <= |.*0/1 specialization", guard):
            return Cause("size-one", shown, location, "torch takes a size of 1 for a constant")
        return Cause("code", shown, location, _mend(guard))


def _mend(guard: str) -> str:
    symbol = _SYMBOL.search(guard)
    if symbol:
        return (
            f"what it computes depends on dimension {symbol['dim']} of {symbol['name']}: make it "
            "one computation for all lengths (mask, pad, torch.where); "
            f"{_mark_dynamic(*symbol.groups())} makes torch raise at the line that prevents it"
        )
    for text, mend in _MENDS:
        if text in guard:
            return mend
    value, equals, _ = guard.partition(" == ")
    if equals:
        return (
            f"{value} changes between calls and the graph is built on its value: keep it, or make "
            "it a tensor (of a module: a buffer)"
        )
    return "keep this the same in every call"


def _mark_dynamic(name: str, dim: str) -> str:
    return f"torch._dynamo.mark_dynamic({name}, {dim}) before the first call"


def _quoted_location(guard: str) -> str | None:
    """The user's line in a guard's comment, whose path torch shortens at its front."""
    for match in _QUOTED_LINE.finditer(guard):
        file = _whole_path(match["file"])
        if file is not None:
            return f"{file}:{match['line']} in {original_name(match['function'])}"
    return None


def _whole_path(end: str) -> str | None:
    files = (getattr(module, "__file__", None) or "" for module in list(sys.modules.values()))
    return next((file for file in files if file.endswith(end)), None)
