"""The benchmark of `generate` runs, its rows say what they are, and it notices wrong steps."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config

pytest.importorskip("transformers")

from nsa_flex.bench.cases import generate
from nsa_flex.bench.cases.generate import Turns, main, ratios, take_turns
from nsa_flex.bench.cases.generate_check import (
    columns_rounded_alike,
    failure_of,
    rounded_alike,
)
from nsa_flex.bench.cases.generate_steps import GenerateCase, Round, columns, prompts_of
from nsa_flex.bench.cases.pairs import (
    QUANTIZED,
    TINY,
    Pair,
    compiled_for,
    dense_attentions,
    inductor_settings,
    make_pair,
    quantization,
    quantized,
    unsupported_reason,
)
from nsa_flex.bench.report.rows import read_rows

CPU = torch.device("cpu")
CASE = GenerateCase("dynamic", 1, 40, 4)


def run(tmp_path: Path, *options: str) -> list[dict[str, Any]]:
    out = tmp_path / "rows.json"
    main(["--device", "cpu", "--tiny", "--steps-per-row", "4", "--out", str(out), *options])
    return read_rows(out)


def row_of(pair: Pair, who: str, case: GenerateCase, seconds: float = 60) -> dict[str, Any]:
    (row,) = take_turns(pair, [who], case, None, seconds)
    return row


@pytest.fixture(scope="module")
def pair() -> Pair:
    return make_pair(TINY, 80, CPU)


@pytest.mark.exhaustive
def test_rows_of_both_models_and_caches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = run(tmp_path, "--cases", "static:2x40", "dynamic:1x33", "--dense", "sdpa")
    assert [(row["implementation"], row["cache"], row["batch"]) for row in rows] == [
        (who, *case) for case in (("static", 2), ("dynamic", 1)) for who in ("nsa", "dense")
    ]
    assert [row["attention"] for row in rows] == ["nsa_flex", "sdpa"] * 2
    for row in rows:
        assert row["status"] == "ok"
        assert row["steps"] == 4
        assert 0 < row["p20_ms"] <= row["median_ms"] <= row["p80_ms"]
        assert row["prefill_ms"] > 0
        assert row["logits_error"] < 1e-5  # float32
        assert row["steps_off"] == 0
        assert {"sources", "torch", "transformers", "device", "date"} <= set(row)
    told = capsys.readouterr().out
    assert re.search(r"static 2x40 : dense / NSA ms_per_token \d+\.\d\d \(sdpa\), prefill", told)


def test_both_models_share_their_weights(pair: Pair) -> None:
    ours = dict(pair.nsa.named_parameters())
    assert all(x is ours[name] for name, x in pair.dense.named_parameters())
    assert len(ours) > len(dict(pair.dense.named_parameters()))


def spoil(
    monkeypatch: pytest.MonkeyPatch,
    pair: Pair,
    wrong: Callable[[], bool],
    by: float = 1.0,
    rows: int = 1,
) -> None:
    """Makes single tokens go wrong in the last rows of a batch, where `wrong` says so."""
    layer = type(pair.dense.model.layers[0].mlp)
    forward = layer.forward

    def spoiled(self: Any, x: torch.Tensor) -> torch.Tensor:
        out = forward(self, x)
        if x.shape[1] == 1 and wrong():
            out[-rows:] += by
        return out

    monkeypatch.setattr(layer, "forward", spoiled)


@pytest.mark.parametrize("who", ["nsa", "sdpa"])
def test_wrong_steps_of_one_row_fail(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    spoil(monkeypatch, pair, lambda: True)
    row = row_of(pair, who, GenerateCase("dynamic", 3, 40, 4))
    assert row["status"] == "failed"
    assert re.match(r"the logits of half the steps are off by \d", row["reason"])
    assert row["logits_error"] > 0.1
    assert row["steps_off"] == pytest.approx(1 / 3, abs=0.001)
    assert row["ms_per_token"] > 0  # what was measured stays


def test_a_single_wrong_step_is_counted(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()
    spoil(monkeypatch, pair, lambda: next(calls) == 7)
    row = row_of(pair, "sdpa", CASE)
    # call 7 is of the last layer, in the fourth of 20 steps: no later one reads what it gave
    assert (row["status"], row["steps_off"]) == ("ok", 0.05)


Outputs = list[tuple[bool, torch.Tensor]]


@pytest.fixture
def outputs(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Outputs:
    """Of each call of `generate` whether it is to compile, and its tokens once there are any."""
    plain, found = pair.nsa.generate, []

    def called(ids: torch.Tensor, *, disable_compile: bool, **options: Any) -> torch.Tensor:
        assert inductor_config.emulate_precision_casts
        found.append((not disable_compile, ids))
        out = plain(ids, disable_compile=disable_compile, **options)
        found[-1] = (not disable_compile, out)
        return out

    monkeypatch.setattr(pair.nsa, "generate", called)
    return found


def held(pair: Pair, batch: int) -> tuple[dict[str, Any], str | None]:
    """The columns of compiled steps held to eager ones, and what is wrong with them."""
    case = GenerateCase("static", batch, 40, 4)
    found = rounded_alike(pair.nsa, prompts_of(case, pair.size.vocab_size, CPU), case)
    return found, failure_of({"logits_error": 0.02} | found)


def test_compiled_steps_are_the_eager_ones(pair: Pair, outputs: Outputs) -> None:
    found, failure = held(pair, 2)
    assert set(found.values()) == {0}
    assert failure is None
    assert [compiled for compiled, _ in outputs] == [True] * 3 + [False] * 3
    assert not inductor_config.emulate_precision_casts
    assert failure_of({"logits_error": float("nan")}) is not None


THOUSANDTHS = 5e-5  # added to the MLP of each layer, and some thousandths in the logits


@pytest.mark.kept(lambda rows: rows == 1)
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_the_order_of_sums_may_move_one_row_of_eight(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, outputs: Outputs, rows: int
) -> None:
    spoil(monkeypatch, pair, lambda: outputs[-1][0], THOUSANDTHS, rows)
    found, failure = held(pair, 8)
    assert found["rows_moved"] == rows
    assert 1e-3 < found["worst_row_rounded_alike"] < 0.03
    if rows == 1:
        assert failure is None
    else:
        error = found["logits_error_rounded_alike"]
        assert 1e-3 < error < 0.03
        told = f"compiled steps that round as eager ones do are off by {error}, relative"
        assert failure == told


def test_one_row_of_garbage_fails(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, outputs: Outputs
) -> None:
    spoil(monkeypatch, pair, lambda: outputs[-1][0])
    found, failure = held(pair, 8)
    assert (found["rows_moved"], found["logits_error_rounded_alike"]) == (1, 0)
    worst = found["worst_row_rounded_alike"]
    told = f"half the compiled steps of a row are off from eager ones by {worst}, relative"
    assert (worst > 0.1, failure) == (True, told)


@pytest.mark.exhaustive
def test_eager_steps_take_the_tokens_of_compiled_ones(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, outputs: Outputs
) -> None:
    """Else one token that rounding decides makes all steps behind it differ."""
    held(pair, 2)
    right = [out for _, out in outputs]
    outputs.clear()
    spoil(monkeypatch, pair, lambda: outputs[-1][0])
    held(pair, 2)
    spoiled = [out for _, out in outputs]
    assert not torch.equal(spoiled[0], right[0])
    for compiled, eager in zip(spoiled[:3], spoiled[3:], strict=True):
        assert torch.equal(compiled, eager)


@pytest.mark.kept(lambda spoiled: spoiled == 2)
@pytest.mark.parametrize("spoiled", [1, 2, 3])  # of three prompts
def test_compiled_steps_may_differ_after_one_prompt(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, outputs: Outputs, spoiled: int
) -> None:
    spoil(monkeypatch, pair, lambda: len(outputs) <= spoiled, THOUSANDTHS)
    found, failure = held(pair, 2)
    assert found["worst_row_rounded_alike"] > 1e-3
    assert (failure is not None) == (spoiled == 3)


@pytest.mark.parametrize(
    ("where", "error", "passes"),
    [
        ((slice(None), slice(4)), 5e-3, True),  # four rows of 32, after each prompt
        ((slice(None), slice(5)), 5e-3, False),
        ((slice(1), slice(None)), 5e-3, True),  # all rows, after one prompt
        ((slice(2), slice(None)), 5e-3, False),
        ((slice(None), slice(None), 3), 5e-3, False),  # all rows, at one step
        ((slice(1), slice(1)), 0.11, False),  # one row, after one prompt
        ((slice(1), slice(1), slice(9)), 0.11, True),  # and in fewer than half of the steps
        ((slice(1), slice(1)), float("nan"), False),
        ((0, 0, 0), float("nan"), False),
    ],
)
def test_how_many_rows_may_be_off(where: Any, error: float, passes: bool) -> None:
    errors = torch.zeros(3, 32, 19)
    errors[where] = error
    found = {"logits_error": 0.02} | columns_rounded_alike(errors)
    assert (failure_of(found) is None) == passes


@pytest.mark.parametrize(
    ("error", "quantization_error", "passes"),
    [
        (0.2, 0.21, True),
        (0.2, 0.19, False),
        (0.09, 0.01, True),  # what bfloat16 is allowed
        (0.49, 0.9, True),
        (0.51, 0.9, False),  # weights too coarse to tell anything
        (float("nan"), 0.2, False),
        (0.2, float("nan"), False),
    ],
)
def test_steps_of_quantized_activations_may_be_as_far_off_as_quantization_moves_logits(
    error: float, quantization_error: float, passes: bool
) -> None:
    found = {"logits_error": error, "quantization_error": quantization_error}
    assert (failure_of(found) is None) == passes
    assert failure_of({"logits_error": 0.2}) is not None


@pytest.mark.parametrize("batch", [1, 7])
def test_no_row_of_a_small_batch_may_be_off(batch: int) -> None:
    errors = torch.zeros(3, batch, 19)
    errors[:, 0] = 5e-3
    assert failure_of({"logits_error": 0.02} | columns_rounded_alike(errors)) is not None


@pytest.mark.exhaustive
def test_dense_attention_without_cudnn(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def look(*args: Any) -> None:
        autograd_cache = functorch_config.enable_autograd_cache
        seen.append((torch.backends.cuda.cudnn_sdp_enabled(), autograd_cache))
        raise RuntimeError("seen")

    before = (torch.backends.cuda.cudnn_sdp_enabled(), functorch_config.enable_autograd_cache)
    monkeypatch.setattr(Turns, "_measure", look)
    rows = take_turns(pair, dense_attentions(None), CASE, None, 1)
    assert [row["attention"] for row in rows][:2] == ["sdpa", "sdpa-no-cudnn"]
    assert rows[1]["case"] == "generate/dense-sdpa-no-cudnn tiny dynamic 1x40"
    assert seen[:2] == [before, (False, False)]
    assert pair.dense.config._attn_implementation == "sdpa"


def test_a_row_that_takes_too_long_fails(pair: Pair) -> None:
    turns = Turns(pair, "nsa", CASE, None, 0.0)
    with pytest.raises(RuntimeError, match="tokens of 21 when the time for the row ended"):
        turns._measure()


def test_a_failure_is_a_row(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Turns, "_measure", fail)
    row = row_of(pair, "nsa", CASE)
    assert (row["status"], row["reason"]) == ("failed", "RuntimeError: out of memory")
    assert ratios([row]) == []


@pytest.mark.exhaustive
def test_models_take_turns_in_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    order, take = [], Turns.take
    monkeypatch.setattr(Turns, "take", lambda self: [order.append(self.who), take(self)])
    rows = run(tmp_path, "--cases", "dynamic:1x40", "--dense", "sdpa", "--rounds", "3")
    assert order == ["nsa", "sdpa"] * 3
    for row in rows:
        assert (row["status"], row["steps"], len(row["round_ms"])) == ("ok", 4, 3)
        assert row["least_round_ms"] == min(row["round_ms"])
        assert row["ms_per_token"] == sorted(row["round_ms"])[1]
    told = capsys.readouterr().out
    assert re.search(r"dense / NSA ms_per_token \S+ \(sdpa\), least_round_ms \S+ \(sdpa\)", told)


def test_only_the_first_round_is_cold(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, plain = [], pair.nsa.generate
    monkeypatch.setattr(
        pair.nsa, "generate", lambda *a, **k: [calls.append(k.get("max_time")), plain(*a, **k)][1]
    )
    take_turns(pair, ["nsa"], CASE, None, 60, 2)
    assert calls == [0.0, 0.0, 60, 0.0, 60]  # the first ones end with the prompt's token


def test_columns_of_rounds() -> None:
    rounds = [
        Round(7.0, 100.0, [1.0, 3.0]),
        Round(5.0, 1.0, [4.0, 8.0]),
        Round(6.0, 1.0, [5.0, 5.0]),
    ]
    found = columns(rounds)
    assert (found["round_ms"], found["least_round_ms"]) == ([2.0, 6.0, 5.0], 2.0)
    assert (found["ms_per_token"], found["median_ms"]) == (5.0, 4.5)
    assert (found["prefill_ms"], found["first_step_ms"], found["steps"]) == (6.0, 100.0, 2)


def test_a_turn_that_fails_ends_the_row(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    measure, taken = Turns._measure, []

    def second_fails(self: Turns) -> None:
        taken.append(self)
        if len(taken) == 2:
            raise RuntimeError("out of memory")
        measure(self)

    monkeypatch.setattr(Turns, "_measure", second_fails)
    (row,) = take_turns(pair, ["nsa"], CASE, None, 60, 3)
    assert (row["status"], row["reason"]) == ("failed", "RuntimeError: out of memory")
    assert (len(taken), len(row["round_ms"])) == (2, 1)


def test_no_row_starts_after_the_budget(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    main(["--device", "cpu", "--tiny", "--budget", "0", "--out", str(out)])
    assert not out.exists()


@pytest.mark.exhaustive
def test_quantized_rows(tmp_path: Path, pair: Pair) -> None:
    pytest.importorskip("torchao")
    rows = run(tmp_path, "--cases", "static:1x40", "--quantize", "int8wo")
    assert [(row["implementation"], row["quantized"]) for row in rows] == [
        *(("nsa", None), ("dense", None)),
        *(("nsa", "int8wo"), ("dense", "int8wo")),
    ]
    assert {row["status"] for row in rows} == {"ok"}
    assert [row["inductor"] for row in rows] == [{}] * 2 + [
        {"coordinate_descent_tuning": True}
    ] * 2
    with pytest.raises(ValueError, match="quantize='int3': expected one of int8wo"):
        quantized(pair, "int3")


@pytest.mark.exhaustive
def test_quantized_rows_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torchao")
    rows = run(tmp_path, "--cases", "static:1x40", "--quantize", "int8wo", "--quantized-only")
    assert [(row["implementation"], row["quantized"]) for row in rows] == [
        ("nsa", "int8wo"),
        ("dense", "int8wo"),
    ]
    with pytest.raises(SystemExit):
        run(tmp_path, "--cases", "static:1x40", "--quantized-only")
    assert "--quantized-only needs --quantize" in capsys.readouterr().err


@pytest.mark.kept(lambda kind: kind == "int8wo")
@pytest.mark.parametrize("kind", ["int8dyn", "int8wo"])
def test_rows_say_how_far_quantized_activations_move_logits(pair: Pair, kind: str) -> None:
    pytest.importorskip("torchao")
    small = quantized(pair, kind)
    assert small.exact is pair
    for row in take_turns(small, ["nsa", "sdpa"], CASE, kind, 60):
        assert row["status"] == "ok"
        assert ("quantization_error" in row) == (kind == "int8dyn")
        if kind == "int8dyn":
            assert 1e-3 < row["quantization_error"] < 0.5


def test_activations_have_a_scale_a_token() -> None:
    """Else a token of a step is rounded otherwise than the same token of a prompt."""
    torchao = pytest.importorskip("torchao.quantization")
    assert quantization("float8dyn").granularity == [torchao.PerRow()] * 2
    assert quantization("int8dyn").granularity in (torchao.PerRow(), [torchao.PerRow()] * 2)


def test_int8_activations_want_more_rows_than_a_small_batch_has(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = torch.device("cuda")
    supported = {(kind, n) for kind in QUANTIZED for n in (1, 16, 17) if kind != "int8dyn"}
    assert all(unsupported_reason(kind, n, cuda) is None for kind, n in supported)
    assert unsupported_reason(None, 1, cuda) is None
    assert unsupported_reason("int8dyn", 1, CPU) is None
    assert unsupported_reason("int8dyn", 17, cuda) is None
    reason = unsupported_reason("int8dyn", 16, cuda)
    monkeypatch.setattr(generate, "unsupported_reason", lambda *_: reason)
    (row,) = take_turns(pair, ["nsa"], CASE, "int8dyn", 60)
    assert row["status"] == "skipped"
    assert row["reason"] == (
        "torch._int_mm multiplies more than 16 rows on CUDA, and a step has one a prompt: 16"
    )
    assert "ms_per_token" not in row
    assert ratios([row]) == []


@inductor_config.patch(
    coordinate_descent_tuning=False, coordinate_descent_check_all_directions=False
)
def test_quantized_weights_leave_inductors_settings_to_their_own_rows(pair: Pair) -> None:
    """torchao would change them for the rows that are not quantized too."""
    pytest.importorskip("torchao")

    def tuned() -> tuple[bool, bool]:
        every = inductor_config.coordinate_descent_check_all_directions
        return inductor_config.coordinate_descent_tuning, every

    before = tuned()
    quantized(pair, "int8wo")
    with compiled_for(None):
        assert tuned() == before
    for kind in QUANTIZED:
        by_descent = kind in ("int8wo", "float8wo")
        with compiled_for(kind):
            assert tuned() == (by_descent, before[1])
            by_templates = "TRITON" in inductor_config.max_autotune_gemm_backends
            assert by_templates == by_descent
        assert inductor_settings(kind)
    assert tuned() == before == (False, False)


def test_a_row_that_hangs_has_failed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Turns, "_measure", lambda *_: time.sleep(60))
    row = row_of(pair, "nsa", CASE, 0.2)
    assert (row["status"], row["reason"]) == ("failed", "TimeoutError: not done after 0.2 s")


@pytest.mark.parametrize("text", ["static", "static:8", "sliding:1x8", "static:1x", "static:ax8"])
def test_cases_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="expected CACHE:BATCHxTOKENS, static or dynamic"):
        GenerateCase.parse(text, 64)


@pytest.mark.exhaustive
def test_profile_prints_both(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--device", "cpu", "--tiny", "--steps-per-row", "2", "--profile", "dynamic:1x40"])
    told = capsys.readouterr().out
    assert "== nsa dynamic 1x40" in told
    assert "== dense dynamic 1x40" in told
    assert "nsa_flex::choose_blocks" in told
    assert "masked_attention" in told  # a Python function
