"""Models take turns at a case of `generate`, in rounds; a row of each.

What a host takes drifts within minutes, by more than models differ. Turns in rounds meet the same
drift.
"""

from __future__ import annotations

import gc
import time
import traceback
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from nsa_flex.bench.cases.generate_attention import attending
from nsa_flex.bench.cases.generate_case import GenerateCase, prompts_of
from nsa_flex.bench.cases.generate_check import failure_of, logits_columns, rounded_alike
from nsa_flex.bench.cases.generate_clock import Round, TokenClock, columns, reserve
from nsa_flex.bench.cases.generate_models import (
    WEIGHTS_ALONE,
    Pair,
    compiled_for,
    forget,
    inductor_settings,
    unsupported_reason,
)
from nsa_flex.bench.measure.time_limit import time_limit
from nsa_flex.bench.report.rows import Row


def take_turns(
    pair: Pair,
    who: list[str],
    case: GenerateCase,
    kind: str | None,
    max_seconds: float,
    rounds: int = 1,
) -> list[Row]:
    """A row of each of `who`; the others are as of `Turns`."""
    each = [Turns(pair, name, case, kind, max_seconds) for name in who]
    for _ in range(rounds):
        for turns in each:
            turns.take()
    forget(pair.nsa, pair.dense)
    return [turns.row() for turns in each]


class Turns:
    """The turns of one model at one case.

    Args:
        pair: the models.
        who: "nsa", or the attention of the dense model.
        case: the call.
        kind: of the weights, in `QUANTIZED`, None for those that are not quantized.
        max_seconds: of a turn.
    """

    def __init__(
        self, pair: Pair, who: str, case: GenerateCase, kind: str | None, max_seconds: float
    ) -> None:
        self.pair, self.who, self.case, self.kind = pair, who, case, kind
        self.max_seconds = max_seconds
        self.is_nsa = who == "nsa"
        self.model = pair.of("nsa" if self.is_nsa else "dense")
        self.rounds: list[Round] = []
        self.first: Row = {}
        self.refusal = unsupported_reason(kind, case.batch, self.model.device)
        self.failure: str | None = None

    def take(self) -> None:
        """One more turn, unless one has failed or none can be timed.

        The first one starts as a new process would: nothing compiled. So do all turns of compiled
        steps, whose graphs and caches would be memory of the others' turns.
        """
        if self.refusal or self.failure:
            return
        is_compiled = self.case.cache == "static"
        if is_compiled or not self.rounds:
            forget(self.model)
        try:
            attention = nullcontext() if self.is_nsa else attending(self.model, self.who)
            with time_limit(self.max_seconds), compiled_for(self.kind), attention:
                self._measure()
        except Exception as error:
            traceback.print_exc()
            self.failure = f"{type(error).__name__}: {error}"[:300]
        if is_compiled:
            forget(self.model)
        gc.collect()

    @torch.no_grad()
    def _measure(self) -> None:
        model, case = self.model, self.case
        ids = prompts_of(case, self.pair.size.vocab_size, model.device)
        counters = torch._dynamo.utils.counters
        counters.clear()
        begin = time.perf_counter()
        for _ in range(2 if self.is_nsa and not self.rounds else 1):
            model.generate(ids, max_time=0.0, **case.options())  # ends with the prompt's token
        first_calls_s = time.perf_counter() - begin
        reserve(ids.device, case.batch, model.config.vocab_size, case.num_new)
        if ids.is_cuda:
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        clock = TokenClock(ids.device)
        out = model.generate(
            ids, logits_processor=[clock], max_time=self.max_seconds, **case.options()
        )
        timed = clock.round(case.steps)
        compiled = "_compiled_call" in vars(model)
        if ids.is_cuda and compiled != (case.cache == "static"):
            raise RuntimeError(f"generate compiled: {compiled}, with a {case.cache} cache")
        if not self.rounds:
            self.first = {
                "peak_bytes": torch.cuda.max_memory_allocated() if ids.is_cuda else None,
                "compiled": compiled,
                "graphs": counters["stats"]["unique_graphs"],
                "cudagraph_skips": counters["inductor"]["cudagraph_skips"],
                "first_calls_s": round(first_calls_s, 2),
                **logits_columns(model, out, clock.logits, self._exact()),
                **self._rounded_alike(ids, compiled),
            }
        self.rounds.append(timed)

    def _exact(self) -> Any | None:
        """The model without quantized weights, where activations are quantized too."""
        if self.pair.exact is None or self.kind in WEIGHTS_ALONE:
            return None
        return self.pair.exact.of("nsa" if self.is_nsa else "dense")

    def _rounded_alike(self, ids: Tensor, compiled: bool) -> Row:
        if not (self.is_nsa and compiled and self.kind is None):
            return {}
        return rounded_alike(self.model, ids, self.case)

    def row(self) -> Row:
        """What was measured, or why not.

        A row whose logits are wrong has failed, and keeps its numbers.
        """
        kind_of_model = "nsa" if self.is_nsa else "dense"
        name = self.who if self.is_nsa else f"dense-{self.who}"
        label = f" {self.kind}" if self.kind else ""
        shape = f"{self.case.batch}x{self.case.prompt}"
        found: Row = {**columns(self.rounds), **self.first} if self.rounds else {}
        return {
            "case": f"generate/{name} {self.pair.name} {self.case.cache} {shape}{label}",
            **self.pair.fields(kind_of_model),
            **({} if self.is_nsa else {"attention": self.who}),
            **self.case.fields(),
            "quantized": self.kind,
            "inductor": inductor_settings(self.kind),
            **self._status(found),
            **found,
        }

    def _status(self, found: Row) -> Row:
        if self.refusal:
            return {"status": "skipped", "reason": self.refusal}
        reason = self.failure or failure_of(found)
        return {"status": "failed", "reason": reason} if reason else {"status": "ok"}
