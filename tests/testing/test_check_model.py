"""The harness itself: it finds what is broken on purpose, and leaves the model as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import nsa_flex
from nsa_flex.cache import LayerCache
from nsa_flex.patching.layer import NSALayer
from nsa_flex.testing import CHECKS, ConformanceReport, check_model
from nsa_flex.testing.lifetime_checks import differences, snapshot
from nsa_flex.testing.models import model_named


def llama() -> nn.Module:
    torch.manual_seed(0)
    return model_named("llama")


def statuses(report: ConformanceReport) -> dict[str, str]:
    return {check.name: check.status for check in report.checks}


def break_layer(monkeypatch: pytest.MonkeyPatch, change: Callable[..., Any]) -> None:
    """Let `change` alter the arguments of every call of a patched layer."""
    forward = NSALayer.forward

    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = change(args, kwargs)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(NSALayer, "forward", broken)


def test_a_llama_is_right_in_every_check() -> None:
    told: list[str] = []
    report = check_model(llama(), tell=told.append)
    assert statuses(report) == dict.fromkeys(CHECKS, "ok"), report
    assert report.ok
    assert report.verdict == "right"
    assert report.layers == ("model.layers.0.self_attn.nsa", "model.layers.1.self_attn.nsa")
    assert tuple(told) == CHECKS


def test_the_model_stays_as_it_was() -> None:
    model = llama()
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    before, config = snapshot(model), model.config
    random = torch.get_rng_state()
    check_model(model)
    assert not differences(before, snapshot(model))
    assert model.config is config
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert [n for n, p in model.named_parameters() if p.grad is not None] == ["lm_head.weight"]
    assert torch.equal(torch.get_rng_state(), random)


def test_a_later_token_that_is_seen_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def see_the_last(args: Any, kwargs: Any) -> Any:
        hidden, query, key, value, *rest = args
        return (hidden, query, key, value + value[:, :, -1:].mean(), *rest), kwargs

    break_layer(monkeypatch, see_the_last)
    report = check_model(llama(), checks=["causality"])
    assert report.verdict == "wrong"
    assert not report.ok
    assert statuses(report)["causality"] == "wrong"
    assert "logits up to token 0 under other tokens after it differ by" in (
        report["causality"].detail
    )


def test_padding_and_documents_that_are_forgotten_are_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forget(args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "rows": None}

    break_layer(monkeypatch, forget)
    wrong = ("left padding", "packed by position_ids", "packed by cu_seq_lens", "dynamic cache")
    found = statuses(check_model(llama(), checks=[*wrong, "causality", "dense start"]))
    assert {name: found[name] for name in wrong} == dict.fromkeys(wrong, "wrong")
    assert found["causality"] == found["dense start"] == "ok"


def test_a_scale_that_is_forgotten_shows_in_the_dense_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_layer(monkeypatch, lambda args, kwargs: (args, {**kwargs, "scale": 1.0}))
    found = statuses(check_model(llama(), checks=["dense start"]))
    assert found == {"patch": "ok", "dense start": "wrong"}


def test_a_cache_that_forgets_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = LayerCache.attend

    def stale(self: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        return attend(self, query.flip(1), *args, **kwargs)

    monkeypatch.setattr(LayerCache, "attend", stale)
    checks = ["dynamic cache", "static cache", "left padding"]
    found = statuses(check_model(llama(), checks=checks))
    assert found["dynamic cache"] == found["static cache"] == "wrong"
    assert found["left padding"] == "ok"


def test_parameters_without_a_gradient_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def detached(args: Any, kwargs: Any) -> Any:
        hidden, *rest = args
        return (torch.zeros_like(hidden), *rest), kwargs

    break_layer(monkeypatch, detached)
    report = check_model(llama(), checks=["gradients"])
    assert report["gradients"].status == "wrong"
    assert "gates.linear.weight is zero" in report["gradients"].detail


def test_what_unpatch_leaves_behind_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from nsa_flex.testing import lifetime_checks

    def forgetful(model: Any) -> Any:
        nsa_flex.unpatch(model)
        model.model.layers[0].self_attn.leftover = True
        return model

    monkeypatch.setattr(lifetime_checks, "unpatch", forgetful)
    report = check_model(llama(), checks=["unpatch"])
    assert report["unpatch"].detail == (
        "unpatch leaves something behind: model.layers.0.self_attn: attributes"
    )


def test_weights_that_are_not_loaded_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from nsa_flex.testing import lifetime_checks

    def reset(*args: Any, **kwargs: Any) -> Any:
        model = nsa_flex.load(*args, **kwargs)
        nn.init.zeros_(model.model.layers[0].self_attn.nsa.gates.linear.weight)
        return model

    monkeypatch.setattr(lifetime_checks, "load", reset)
    found = statuses(check_model(llama(), checks=["save and load"]))
    assert found["save and load"] == "wrong"


def test_a_crash_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "surprise": 1}

    break_layer(monkeypatch, crash)
    report = check_model(llama(), checks=["causality"])
    assert report.verdict == "crashed"
    assert report["causality"].status == "crashed"
    assert "surprise" in report["causality"].detail


def test_a_refusal_by_patch_is_no_failure() -> None:
    report = check_model(model_named("gemma2"))
    assert (report.verdict, report.ok, report.layers) == ("refused", True, ())
    assert statuses(report) == {"patch": "refused"}
    assert "soft-capping" in report["patch"].detail


def test_a_refusal_that_changes_the_model_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from nsa_flex.testing import run

    def half_way(model: Any, config: Any) -> Any:
        model.half_way = True
        return nsa_flex.patch(model, config)

    monkeypatch.setattr(run, "patch", half_way)
    report = check_model(model_named("gemma2"))
    assert report["patch"].status == "wrong"
    assert report["patch"].detail.endswith("left something behind: the model: attributes")


def test_an_error_of_other_code_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    break_layer(monkeypatch, lambda args, kwargs: int("no number"))
    report = check_model(llama(), checks=["causality"])
    assert report["causality"].status == "crashed"
    assert report["causality"].detail.startswith("ValueError: invalid literal for int()")


def test_a_refusal_in_generate_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        nsa_flex.NSAConfig(window_size=0)

    monkeypatch.setattr(LayerCache, "attend", refuse)
    report = check_model(llama(), checks=["dynamic cache", "static cache"])
    assert [check.status for check in report.checks] == ["ok", "refused", "refused"]


class Dreamer(nn.Module):
    """Sees later tokens with and without NSA."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = llama()
        self.config = self.inner.config

    def forward(self, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
        logits = self.inner(ids, **inputs).logits
        return logits + logits.mean(1, keepdim=True)


def test_what_the_model_gets_wrong_without_nsa_is_inherited() -> None:
    checks = ["causality", "dynamic cache", "dense start", "gradients"]
    found = statuses(check_model(Dreamer(), checks=checks))
    assert found["causality"] == "inherited"
    assert found["dynamic cache"] == "inherited"  # it has no generate
    assert found["dense start"] == found["gradients"] == "ok"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: llama().bfloat16(), "model has parameters of torch.bfloat16; rounding would"),
        (lambda: nn.Identity(), "model has no parameters; expected a causal language model"),
        (lambda: nsa_flex.testing, "model is a module; it must be an nn.Module"),
    ],
)
def test_what_cannot_be_checked_is_refused(model: Callable[[], Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        check_model(model())


def test_a_patched_model_is_checked_as_it_is() -> None:
    config = nsa_flex.NSAConfig(4, 4, 4, 4, 0, 1, 6, "mean", "tiled_top_k", ("selected",))
    model = nsa_flex.patch(llama(), config, init="unbiased")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = check_model(model)
    assert statuses(report) == dict.fromkeys(CHECKS, "ok"), report
    assert report.layers == ("model.layers.0.self_attn.nsa", "model.layers.1.self_attn.nsa")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match="model is patched already: leave config out to check"):
        check_model(model, config)


def test_a_model_that_fails_on_token_ids_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Dreamer()
    monkeypatch.setattr(Dreamer, "forward", lambda self, ids: ids.missing)
    with pytest.raises(ValueError, match="model fails without NSA too, called with token ids"):
        check_model(model)


def test_a_check_that_is_unknown_is_refused() -> None:
    with pytest.raises(ValueError, match="checks names padding; known are patch, dense start"):
        check_model(llama(), checks=["padding"])


def test_the_config_gives_the_lengths() -> None:
    config = nsa_flex.NSAConfig(16, 8, 16, 3, window_size=24)
    checks = ["causality", "dense start", "right padding"]
    report = check_model(llama(), config, name="mine", tokens=(5, 40), seed=3, checks=checks)
    assert report.model == "mine"
    assert report.ok, report


def test_the_report_as_text_and_as_plain_values() -> None:
    report = check_model(model_named("gemma2"), name="gemma2")
    assert str(report).startswith("gemma2: refused, 0 sparse layers\n  refused   patch  ")
    values = report.to_dict()
    assert values["verdict"] == "refused"
    assert values["checks"][0]["name"] == "patch"
    with pytest.raises(KeyError):
        report["causality"]
