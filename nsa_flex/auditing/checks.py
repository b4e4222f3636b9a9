"""The checks of one phase of an audit, and what they have found so far."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch

from nsa_flex.auditing.batches import Batch, InputError, split
from nsa_flex.auditing.measuring import branches_of, measure, peak_bytes
from nsa_flex.auditing.mends import mend_of
from nsa_flex.auditing.ranks import find_ranks_apart
from nsa_flex.auditing.report import AuditFinding, BranchRun, Phase
from nsa_flex.auditing.sources import place_of
from nsa_flex.auditing.sweep import Swept, original_name, sweep
from nsa_flex.hot_path import Finding, ForwardBackward, NoGradientError, find_value_reads
from nsa_flex.hot_path.cache_copies import find_cache_copies
from nsa_flex.hot_path.findings import error_location
from nsa_flex.hot_path.syncs import find_syncs_of
from nsa_flex.parallel import SequenceShards

# On the meta device a read of a value raises one of these; anything else is a missing kernel.
_VALUE_READS = (
    "meta tensor",
    "Cannot copy out of meta",
    "data-dependent",
    "is not on the expected",
)


@dataclass
class Checks:
    """One audit at work; arguments as of `audit`, then what has been found so far."""

    fn: Callable
    dynamic: bool | None
    backend: str | None
    measured: bool
    tell: Callable[[str], None]
    findings: list[AuditFinding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    _eager_only: set[tuple[str, int]] = field(default_factory=set)

    def add(self, findings: Iterable[AuditFinding], phase: str | None = None) -> None:
        """Take findings, of `phase` unless they name their own."""
        phases = () if phase is None else (phase,)
        self.findings += [replace(f, phases=f.phases or phases) for f in findings]

    def phase(self, name: str, batches: list[Batch], *, train: bool) -> None:
        """All checks of one phase; what the audited function raises ends it, as a finding."""
        try:
            self._phase(name, batches, train)
        except NoGradientError:
            self.notes.append(
                f"{name}: no output requires a gradient, so that there is no backward to audit; "
                "return the loss, or what it is computed from, without detach() or no_grad()"
            )
        except Exception as error:
            self.add([error_finding(error)], name)

    def _phase(self, name: str, batches: list[Batch], train: bool) -> None:
        eager = self._syncs(name, batches, train)
        seen = {place_of(f.location)[:2] for f in eager}
        reads = [
            f
            for batch in batches
            for f in self._value_reads(name, batch, train)
            if f.kind != "device-copy" or place_of(f.location)[:2] not in seen
        ]
        if name == "decode":
            for batch in batches:
                self.add(self._cache_copies(batch), name)
        try:
            swept = self._sweep(name, batches, train)
        except Exception:
            self.add(map(_finding, eager), name)
            self.add(reads, name)
            raise
        phase = swept.phase
        self._add_syncs(eager, swept, name)
        self.add((f for f in reads if place_of(f.location)[:2] not in self._eager_only), name)
        self.add(swept.findings, name)
        self._note_recompiles(phase)
        self.phases.append(phase)
        if self.measured:
            self.phases[-1] = self._measure(phase, batches[0], train)

    def _sweep(self, name: str, batches: list[Batch], train: bool) -> Swept:
        return sweep(
            self.fn,
            batches,
            name=name,
            train=train,
            dynamic=self.dynamic,
            backend=self.backend or "aot_eager",
            tell=self.tell,
        )

    def _add_syncs(self, eager: list[Finding], swept: Swept, name: str) -> None:
        """Findings of eager and compiled code; what compiled code does not do is a note."""
        compiled = [replace(f, location=original_name(f.location)) for f in swept.syncs]
        breaks = {place_of(f.location)[:2] for f in swept.findings}
        confirmed = {key for f in compiled for key in _keys(f)}
        for f in eager:
            if _works_in_a_graph(f) or place_of(f.location)[:2] in breaks or _keys(f) & confirmed:
                self.add([_finding(f)], name)
            else:  # `if not torch.compiler.is_compiling():` or the like.
                self.notes.append(f"{name}: in eager mode only, {f.detail} at {f.location}")
                self._eager_only.add(place_of(f.location)[:2])
        known = {key for f in eager for key in _keys(f)}
        self.add((_finding(f) for f in compiled if not _keys(f) & known), name)

    def _syncs(self, name: str, batches: list[Batch], train: bool) -> list[Finding]:
        found: list[Finding] = []
        with torch.set_grad_enabled(train):
            step = ForwardBackward(self.fn) if train else self.fn
            for batch in batches:
                self.tell(f"{name}: looking for syncs, {batch.label}")
                found += find_syncs_of(functools.partial(batch.bind, step))
        return found

    def _cache_copies(self, batch: Batch) -> list[AuditFinding]:
        self.tell(f"decode: looking for copies of the cache, {batch.label}")
        with torch.no_grad():
            return [_finding(f) for f in find_cache_copies(functools.partial(batch.bind, self.fn))]

    def _value_reads(self, name: str, batch: Batch, train: bool) -> list[AuditFinding]:
        self.tell(f"{name}: running without data, {batch.label}")
        args, kwargs = split(batch.make())
        with torch.set_grad_enabled(train):
            step = ForwardBackward(self.fn) if train else self.fn
            try:
                found = find_value_reads(step, *args, **kwargs)
            except Exception as error:  # What cannot be copied, such as open files.
                self.notes.append(f"{name}: not run on the meta device: {_first_line(error)}")
                return []
        reads = [
            f
            for f in found
            if f.kind == "device-copy" or any(text in f.detail for text in _VALUE_READS)
        ]
        self.notes += [
            f"{name}: the meta device cannot run it: {f.detail} at {f.location}"
            for f in found
            if f not in reads
        ]
        return [_finding(f) for f in reads]

    def _note_recompiles(self, phase: Phase) -> None:
        text = {
            "length": "torch compiled again when this size changed for the first time; {0.mend} "
            "saves one compilation: {0.guard}",
            "number": "torch compiled again when this number first changed: {0.guard}",
            "size-one": "sizes of 0 or 1 have a graph of their own in torch: {0.guard}",
            "same-size": "two sizes were equal when torch made a graph (duck sizing): {0.guard}",
        }
        for each in phase.recompiles:
            if each.cause in text:
                self.notes.append(f"{phase.name}: {text[each.cause].format(each)}")

    def _measure(self, phase: Phase, batch: Batch, train: bool) -> Phase:
        def tell(line: str) -> None:
            self.tell(f"{phase.name}: {line}")

        numbers = {"peak_bytes_eager": float(peak_bytes(self.fn, batch, train=train))}
        try:
            result = measure(self.fn, batch, train=train, dynamic=self.dynamic, tell=tell)
        except Exception as error:  # No C++ compiler, or a bug of Inductor: say so, go on.
            self.notes.append(f"{phase.name}: not measured compiled: {_first_line(error)}")
            return replace(phase, measured=numbers)
        self.add(map(_finding, result.syncs), phase.name)
        skips = dict.fromkeys(result.skip_reasons)
        self.add(
            (
                AuditFinding(
                    "cudagraph-skip", _first_line(r), _place_in(r), mend_of("cudagraph-skip", "")
                )
                for r in skips
            ),
            phase.name,
        )
        return replace(
            phase,
            measured={**result.numbers, **numbers},
            kernels=result.kernels,
            cudagraphs=result.cudagraphs,
        )

    def ranks(self, batch: Batch, shards: SequenceShards) -> None:
        """Ranks that attend their own tokens alone, if batches have token ids."""
        if shards.size == 1:
            self.notes.append("ranks: the mesh has one rank, which has all tokens")
            return
        self.tell("looking for ranks that attend alone")
        try:
            found = find_ranks_apart(self.fn, batch.make(), shards)
        except Exception as error:
            found = [error_finding(error)]
        if found is None:
            self.notes.append(
                "ranks: a batch without token ids, integers (B, T), does not tell whether ranks "
                "attend one another's tokens"
            )
        self.add(found or [], "ranks")

    def branches(self, batch: Batch, train: bool) -> tuple[BranchRun, ...]:
        """Of `nsa_attention`, if the callable reaches it; none where it raises."""
        if not self.phases:
            return ()
        train = train and any(phase.name == "training" for phase in self.phases)
        self.tell("looking for branches of nsa_attention")
        step = ForwardBackward(self.fn) if train else self.fn
        with torch.set_grad_enabled(train):
            return branches_of(functools.partial(batch.bind, step))


def _keys(found: Finding) -> set[tuple[str, int | str]]:
    """Its line, and what it is: inside a graph only the function's first line is known."""
    file, line, _ = place_of(found.location)
    return {(file, line), (file, found.detail)}


def _works_in_a_graph(found: Finding) -> bool:
    """A graph holds such copies as operators: that it runs without a break says nothing."""
    return found.kind == "device-copy" or found.detail in ("Tensor.cpu()", "Tensor.numpy()")


def _finding(found: Finding) -> AuditFinding:
    return AuditFinding(
        found.kind, found.detail, found.location, mend_of(found.kind, found.detail)
    )


def error_finding(error: Exception) -> AuditFinding:
    """What the audited function, or one that makes its inputs, has raised."""
    if isinstance(error, InputError) and isinstance(error.__cause__, Exception):
        made = error_finding(error.__cause__)
        return replace(made, message=f"{made.message} (while an input was made)")
    return AuditFinding("error", _first_line(error), error_location(error), mend_of("error", ""))


def _first_line(error: object) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if isinstance(error, Exception) else text


def _place_in(reason: str) -> str:
    """The last `File "...", line n, in f` of a stack trace that torch quotes, if any."""
    lines = re.findall(r'File "(.+?)", line (\d+), in (\w+)', reason)
    return "{}:{} in {}".format(*lines[-1]) if lines else "<no user frame>"
