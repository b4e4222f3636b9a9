"""Times continuous batching of a patched Llama against the same engine with dense attention.

transformers' engine (5.23), four layers as wide as Llama-3.1-8B's, random weights, bfloat16,
greedy. All requests come at once: prompts of random tokens whose lengths are log-uniform, and as
many new tokens each. A row tells seconds until the last one is done, in a second run: the first,
of other tokens and the same lengths, compiles kernels. Of some requests the tokens are compared
with `generate`, and held to a forward pass over them.

Dense attention is what the engine takes: FlashAttention where it is installed, else SDPA, which
attends to all tokens of all requests at once under a mask. That is why the default is 16 requests:
the time of SDPA grows with the product of all tokens. --requests 64 --max-prompt 65536
--new-tokens 256 takes dense attention minutes. Where it is not done after --dense-seconds, its row
says so, and what that bounds: the time from below, the throughput from above.

In bfloat16 rounding decides between tokens that are about as good. --dtype float32 --exact fails
unless all tokens that are checked are those of `generate`.

The prefix row: later requests go on from a prefix that one has brought. Their prefill should cost
what their own tokens cost. That is what prefix and own tokens take where nothing is shared, less
the prefix alone, and a request of 16 tokens, for what the engine takes whatever it does. The first
request has two passes of tokens behind the prefix: the engine (5.23) shares no blocks of the last
two passes of a prompt.

Example: python -m nsa_flex.bench.cases.serving --out serving.json
"""

from __future__ import annotations

import argparse
import statistics
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import transformers

from nsa_flex.bench.cases.pairs import FULL, TINY, Pair, forget, make_pair
from nsa_flex.bench.cases.serving_engine import (
    Prompt,
    TimeOver,
    check_tokens,
    check_version,
    engine,
    random_prompts,
    serve,
)
from nsa_flex.bench.command_line import parser_of
from nsa_flex.bench.measure.machine import describe
from nsa_flex.bench.measure.timing import peak_of, reset_peak
from nsa_flex.bench.report.generation import slower_run
from nsa_flex.bench.report.rows import Notebook, Row

SEED = 0
TINY_PROMPT = 16  # tokens


def throughput(pair: Pair, who: str, prompts: list[Prompt], options: Any) -> Row:
    """A row: all prompts at once. Dense attention that takes too long gives bounds.

    Raises:
        RuntimeError: NSA took longer than `options.row_seconds`, a request failed, or its tokens
            are not the model's.
    """
    model, num_new = pair.of(who), options.new_tokens
    lengths = [len(prompt) + num_new for prompt in prompts]
    count, most = len(prompts), options.row_seconds if who == "nsa" else options.dense_seconds
    reversed_prompts = [prompt[::-1] for prompt in prompts]
    with engine(model, lengths, num_new, options.batch_tokens, requests=count) as manager:
        attention = model.config._attn_implementation
        try:
            # The same lengths first, which compiles and records; no prefix is the same.
            first = max(x.seconds for x in serve(manager, reversed_prompts, num_new, most))
            reset_peak(model.device)
            start = time.perf_counter()
            done = serve(manager, prompts, num_new, most)
        except TimeOver as error:
            if who == "nsa":
                raise
            return {"attention": attention, **bounds(lengths, num_new, most), "reason": f"{error}"}
        seconds = time.perf_counter() - start
        peak = peak_of(model.device)
    sample = [i * count // options.checked for i in range(options.checked)]
    new, whole = sum(len(each.tokens) for each in done), sum(lengths)
    return {
        "attention": attention,
        "seconds": round(seconds, 5),
        "first_run_seconds": round(first, 3),
        "prompt_tokens": whole - new,
        "new_tokens": new,
        "new_tokens_per_s": round(new / seconds, 1),
        "tokens_per_s": round(whole / seconds, 1),
        "median_request_s": round(statistics.median(each.seconds for each in done), 3),
        "peak_bytes": peak,
        **check_tokens(
            model,
            [prompts[i] for i in sample],
            [done[i].tokens for i in sample],
            exact=options.exact,
        ),
    }


def bounds(lengths: list[int], num_new: int, seconds: float) -> Row:
    """Columns of requests that were not done after so many seconds; `lengths` with new tokens."""
    new = num_new * len(lengths)
    return {
        "status": "not done",
        "seconds_more_than": seconds,
        "prompt_tokens": sum(lengths) - new,
        "new_tokens": new,
        "new_tokens_per_s_less_than": round(new / seconds, 1),
    }


def shared_prefix(pair: Pair, who: str, options: Any) -> Row:
    """A row: seconds to the first token of requests that go on from one prefix.

    Raises:
        RuntimeError: it took longer than `options.row_seconds`, or a request failed.
    """
    model, own = pair.of(who), options.own_tokens
    vocab, count = pair.size.vocab_size, options.repeats + 1
    (prefix,) = random_prompts(1, options.prefix, options.prefix, vocab, SEED)
    ends = random_prompts(count, own, own, vocab, SEED + 1)
    bringing = 2 * options.batch_tokens
    (behind,) = random_prompts(1, bringing, bringing, vocab, SEED + 4)
    tiny = random_prompts(count, TINY_PROMPT, TINY_PROMPT, vocab, SEED + 5)
    lengths = [len(prefix) + max(own, bringing) + 1] * count

    def first_tokens(prompts: list[Prompt], shares_prefixes: bool) -> list[float]:
        tokens = options.batch_tokens
        with engine(
            model, lengths, 1, tokens, requests=1, shares_prefixes=shares_prefixes
        ) as manager:
            for seed in (2, 3):  # kernels compile, plans are recorded
                warm = random_prompts(1, len(prefix) + own, len(prefix) + own, vocab, SEED + seed)
                serve(manager, warm, 1, options.row_seconds)
            return [
                1e3 * serve(manager, [prompt], 1, options.row_seconds)[0].seconds
                for prompt in prompts
            ]

    first, _, *later = first_tokens([prefix + behind, *(prefix + end for end in ends)], True)
    fixed, alone, whole = (
        statistics.median(first_tokens(prompts, False)[1:])
        for prompts in (tiny, [prefix] * count, [prefix + end for end in ends])
    )
    own_ms, later_ms = whole - alone + fixed, statistics.median(later)
    return {
        "attention": model.config._attn_implementation,
        "prefix_tokens": len(prefix),
        "own_tokens": own,
        "first_ms": round(first, 2),
        "later_ms": round(later_ms, 2),
        "own_ms": round(own_ms, 2),
        "fixed_ms": round(fixed, 2),
        "later_over_own": round(later_ms / own_ms, 3),
        "repeats": len(later),
    }


def row_of(what: str, pair: Pair, who: str, shape: str, measure: Any) -> Row:
    """A row with the columns that say what was measured; a failure is a row too."""
    name = who if who == "nsa" else f"dense-{pair.dense.config._attn_implementation}"
    start: Row = {"case": f"{what}/{name} {pair.name} {shape}", **pair.fields(who), "target": what}
    try:
        found = {"status": "ok", **measure()}
    except Exception as error:
        traceback.print_exc()
        found = {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:300]}
    forget(pair.of(who))
    return {**start, **found}


def measure_all(options: Any) -> list[Row]:
    """All rows that fit into the budget, written as they are measured."""
    device, begin = torch.device(options.device), time.perf_counter()
    behind = max(options.own_tokens, 2 * options.batch_tokens)
    longest = max(options.max_prompt, options.prefix + behind) + options.new_tokens
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    pair = make_pair(TINY if options.tiny else FULL, longest, device, dtype)
    shared = {**describe(device), "transformers": transformers.__version__}
    notebook = Notebook(options.out, shared, fresh=True)
    sizes = (options.requests, options.min_prompt, options.max_prompt)
    prompts = random_prompts(*sizes, pair.size.vocab_size, SEED)
    shape = f"{sizes[0]} x {sizes[1]}-{sizes[2]} + {options.new_tokens}"
    prefix = f"{options.prefix} + {options.own_tokens}"
    plan = [
        ("serve", "nsa", shape, lambda: throughput(pair, "nsa", prompts, options)),
        ("serve-prefix", "nsa", prefix, lambda: shared_prefix(pair, "nsa", options)),
        ("serve", "dense", shape, lambda: throughput(pair, "dense", prompts, options)),
        ("serve-prefix", "dense", prefix, lambda: shared_prefix(pair, "dense", options)),
    ]
    for what, who, named, measure in plan:
        seconds = time.perf_counter() - begin
        if what not in options.what:
            continue
        if seconds > options.budget:
            print(f"{what} {who}: not measured, {options.budget} s are over")
            continue
        columns = {"requests": sizes[0], "batch_tokens": options.batch_tokens}
        row = {**row_of(what, pair, who, named, measure), **columns}
        (added,) = notebook.add([row])
        seconds = time.perf_counter() - begin
        print(told(added), f"[{seconds:.0f} s]", flush=True)
    return notebook.rows


def told(row: Row) -> str:
    """A line for the terminal."""
    if row["status"] != "ok":
        return f"{row['case']}: {row['status']}, {row['reason']}"
    if row["target"] == "serve-prefix":
        return (
            f"{row['case']}: first {row['first_ms']} ms, later {row['later_ms']}, own tokens "
            f"{row['own_ms']}: {row['later_over_own']} times"
        )
    return (
        f"{row['case']} ({row['attention']}): {row['seconds']} s, {row['first_run_seconds']} "
        f"in the first run, {row['new_tokens_per_s']} new "
        f"tokens/s; {row['requests_equal_to_generate']} of {row['requests_checked']} as generate, "
        f"{row['tokens_best']} of {row['tokens_checked']} tokens the best, worst gap "
        f"{row['worst_gap']}"
    )


def ratio(rows: list[Row]) -> str | None:
    """Dense ÷ NSA in seconds, if both were measured; at least what, if dense was not done."""
    served = {row["implementation"]: row for row in rows if row["target"] == "serve"}
    ours, dense = served.get("nsa"), served.get("dense")
    if ours is None or dense is None or ours["status"] != "ok" or dense["status"] == "failed":
        return None
    if dense["status"] == "ok":
        return f"dense / NSA: {dense['seconds'] / ours['seconds']:.2f} times as long"
    least = dense["seconds_more_than"] / slower_run(ours)
    return f"dense / NSA: more than {least:.2f} times as long"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = parser_of(__doc__)
    made.add_argument("--requests", type=int, default=16)
    made.add_argument("--min-prompt", type=int, default=2048, help="tokens")
    made.add_argument("--max-prompt", type=int, default=32768, help="tokens")
    made.add_argument("--new-tokens", type=int, default=64, help="of each request")
    made.add_argument("--batch-tokens", type=int, default=8192, help="of a pass of the engine")
    made.add_argument("--checked", type=int, default=4, help="requests that are checked")
    made.add_argument("--prefix", type=int, default=32768, help="tokens that are shared")
    made.add_argument("--own-tokens", type=int, default=4096, help="of those who share it")
    made.add_argument("--repeats", type=int, default=5, help="requests that share it")
    made.add_argument(
        "--what", nargs="+", choices=["serve", "serve-prefix"], default=["serve", "serve-prefix"]
    )
    made.add_argument("--dtype", choices=["bfloat16", "float32"], help="default bfloat16 on CUDA")
    made.add_argument("--budget", type=float, default=600, help="seconds; no row starts after")
    made.add_argument("--row-seconds", type=float, default=90, help="a slower row ends")
    made.add_argument(
        "--dense-seconds", type=float, default=90, help="dense attention ends, which is a bound"
    )
    made.add_argument("--exact", action="store_true", help="tokens must be those of generate")
    made.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    made.add_argument("--tiny", action="store_true", help="a tiny model, for tests")
    made.add_argument("--out", type=Path, required=True, help="JSON file of rows")
    return made


def main(arguments: list[str] | None = None) -> None:
    """Rows, and how many times as long dense attention took."""
    made = parser()
    options = made.parse_args(arguments)
    try:
        check_version()
    except RuntimeError as error:
        made.error(str(error))
    transformers.logging.set_verbosity_error()
    told_ratio = ratio(measure_all(options))
    if told_ratio:
        print(told_ratio)


if __name__ == "__main__":
    main()
