"""Times `model.generate()` itself, host included: a patched Llama against the same one unpatched.

Four layers as wide as Llama-3.1-8B's, random weights, bfloat16, greedy. The cache is

    dynamic   generate's default: a cache that grows, a model that is not compiled
    static    cache_implementation="static": transformers compiles the step (reduce-overhead)

Each row is one call of `generate`. A logits processor records a CUDA event at each token; the
first 16 tokens after the prompt's (compilation, capture) do not count. Every row starts as a new
process would: nothing compiled. The prefill is that of the third call, where the first compiles
kernels and two record launch plans; dense attention's is that of the second. The logits of every
step are held to one forward pass over all tokens without a cache. Compiled steps of NSA are held
to steps that are not compiled too, in a call where Inductor rounds as eager code does.

Steps that are not compiled wait for the host, whose speed drifts by 30 % within minutes. With
--rounds 3 NSA and dense attention take turns, three times: `ms_per_token` and `prefill_ms` are the
median of the rounds, `least_round_ms` is the fastest round, `round_ms` has all. What compiles or
is checked counts in the first round alone; compiled steps are compiled again in each.

Dense attention is transformers' SDPA, with cuDNN and without it, and FA-2 where it is installed.

Where activations are quantized, logits may be as far off as quantization itself moves them.

--quantize times torchao's weights beside bfloat16, dense attention on SDPA alone; with
--quantized-only without bfloat16, whose checks compile twice more. int8dyn wants more than 16
prompts on CUDA: --quantize int8dyn --cases static:32x2048. Inductor tunes the kernels of int8wo
and float8wo; a row says how it was told to. --profile CASE prints what a token of that case is
made of.

Example: python -m nsa_flex.bench.cases.generate --out generate.json
Example: python -m nsa_flex.bench.cases.generate --cases dynamic:1x8192 --rounds 3 --out eager.json
Example: python -m nsa_flex.bench.cases.generate --quantize int8wo --out int8.json
"""

from __future__ import annotations

import argparse
import gc
import time
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from nsa_flex.bench.cases.generate_check import failure_of, logits_columns, rounded_alike
from nsa_flex.bench.cases.generate_steps import (
    GenerateCase,
    Round,
    TokenClock,
    columns,
    profile,
    prompts_of,
    reserve,
)
from nsa_flex.bench.cases.pairs import (
    FULL,
    QUANTIZED,
    TINY,
    WEIGHTS_ALONE,
    Pair,
    attending,
    compiled_for,
    dense_attentions,
    forget,
    inductor_settings,
    make_pair,
    quantized,
    unsupported_reason,
)
from nsa_flex.bench.command_line import parser_of
from nsa_flex.bench.measure.machine import describe
from nsa_flex.bench.measure.timing import peak_of, reset_peak, time_limit
from nsa_flex.bench.report.rows import Notebook, Row

# The most telling first: what is left when the time is over is not measured.
DEFAULT = (
    *("static:8x32768", "dynamic:1x8192", "dynamic:1x32768", "static:1x32768"),
    *("static:1x8192", "static:1x65536", "dynamic:1x65536", "dynamic:8x32768"),
    *("static:8x8192", "dynamic:8x8192"),
)
# Compiled, since weights that are not would be made whole anew for each token.
QUANTIZED_DEFAULT, QUANTIZED_DENSE = ("static:1x8192", "static:1x32768"), ["sdpa"]


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
        reset_peak(ids.device)
        if ids.is_cuda:
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
                "peak_bytes": peak_of(ids.device),
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


def rows_of(pair: Pair, case: GenerateCase, kind: str | None, options: Any) -> list[Row]:
    """NSA's, then those of dense attention on each implementation that is to be timed."""
    who = ["nsa", *dense_attentions(options.dense)]
    return take_turns(pair, who, case, kind, options.row_seconds, options.rounds)


def told(row: Row) -> str:
    """A line for the terminal."""
    if row["status"] != "ok":
        return f"{row['case']}: {row['status']}, {row['reason']}"
    rounds = f", rounds {row['round_ms']}" if len(row["round_ms"]) > 1 else ""
    return (
        f"{row['case']}: {row['ms_per_token']:.3f} ms a token (p20 {row['p20_ms']:.3f}, "
        f"p80 {row['p80_ms']:.3f}{rounds}), prefill {row['prefill_ms']:.1f}, "
        f"first step {row['first_step_ms'] / 1e3:.1f} s, {row['graphs']} graphs, "
        f"{row['cudagraph_skips']} skips, error {row['logits_error']}, "
        f"{100 * row['steps_off']:.1f} % of the steps off"
    )


def ratios(rows: list[Row]) -> list[str]:
    """Dense ÷ NSA of each case and kind of weights; the fastest dense one of each column."""
    lines = []
    done = [row for row in rows if row["status"] == "ok"]
    for ours in (row for row in done if row["implementation"] == "nsa"):
        same = ("cache", "batch", "seq_len", "quantized")
        others = [
            row
            for row in done
            if row["implementation"] == "dense" and all(row[x] == ours[x] for x in same)
        ]
        if others:
            shape = f"{ours['cache']} {ours['batch']}x{ours['seq_len']} {ours['quantized'] or ''}"
            least = ["least_round_ms"] if len(ours["round_ms"]) > 1 else []
            told = (_ratio(ours, others, name) for name in ("ms_per_token", *least, "prefill_ms"))
            lines.append(f"{shape}: dense / NSA {', '.join(told)}")
    return lines


def _ratio(ours: Row, others: list[Row], column: str) -> str:
    best = min(others, key=lambda row: row[column])
    return f"{column} {best[column] / ours[column]:.2f} ({best['attention']})"


def measure_all(cases: list[GenerateCase], kinds: list[str | None], options: Any) -> list[Row]:
    """All rows that fit into the budget, written as they are measured."""
    device, name = torch.device(options.device), TINY if options.tiny else FULL
    begin = time.perf_counter()
    pair = make_pair(name, max(case.prompt + case.num_new for case in cases), device)
    shared = {**describe(device), "transformers": transformers.__version__}
    notebook = Notebook(options.out, shared, fresh=True)
    rows: list[Row] = []
    pairs = {kind: pair if kind is None else quantized(pair, kind) for kind in kinds}
    for case in cases:
        for kind, each in pairs.items():
            if time.perf_counter() - begin > options.budget:
                print(f"{case}, {kind}: not measured, {options.budget} s are over")
                continue
            found = notebook.add(rows_of(each, case, kind, options))
            rows += found
            seconds = time.perf_counter() - begin
            print(*map(told, found), f"[{seconds:.0f} s]", sep="\n", flush=True)
    return rows


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = parser_of(__doc__)
    made.add_argument("--cases", nargs="+", help="CACHE:BATCHxTOKENS; default all of the guide")
    made.add_argument("--steps-per-row", type=int, default=64, help="tokens that are timed")
    made.add_argument(
        "--dense",
        nargs="+",
        help="attention implementations; default sdpa, sdpa-no-cudnn, FA-2 if installed",
    )
    made.add_argument("--rounds", type=int, default=1, help="turns of each model at a case")
    made.add_argument("--quantize", help=f"kinds of weights by comma: {', '.join(QUANTIZED)}")
    made.add_argument("--quantized-only", action="store_true", help="no rows of bfloat16 weights")
    made.add_argument("--profile", metavar="CASE", help="print what a token of this case takes")
    made.add_argument("--budget", type=float, default=400, help="seconds; no row starts after")
    made.add_argument("--row-seconds", type=float, default=60, help="a slower row has failed")
    made.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    made.add_argument("--tiny", action="store_true", help="a tiny model, for tests")
    made.add_argument("--out", type=Path, help="JSON file of rows")
    return made


def main(arguments: list[str] | None = None) -> None:
    """Rows or a profile, as asked."""
    made = parser()
    options = made.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    if options.profile:
        profile(GenerateCase.parse(options.profile, options.steps_per_row), options)
        return
    if options.out is None:
        made.error("--out is needed, but with --profile")
    if options.quantized_only and not options.quantize:
        made.error("--quantized-only needs --quantize")
    if options.rounds < 1:
        made.error(f"--rounds {options.rounds}: a row needs at least one")
    steps = options.steps_per_row
    cases = [GenerateCase.parse(text, steps) for text in options.cases or DEFAULT]
    kinds: list[str | None] = [None]
    if options.quantize:
        if not options.cases:
            cases = [GenerateCase.parse(text, steps) for text in QUANTIZED_DEFAULT]
        options.dense = options.dense or QUANTIZED_DENSE
        kinds = [None] * (not options.quantized_only) + options.quantize.split(",")
    rows = measure_all(cases, kinds, options)
    print("\n".join(ratios(rows)))


if __name__ == "__main__":
    main()
