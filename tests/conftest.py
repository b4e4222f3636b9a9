"""What every test shares: seeds, devices, hypothesis profiles, poisoned memory."""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import random
import secrets
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import filelock
import hypothesis
import numpy as np
import pytest
import torch

from reference import one_gloo_thread, poisoned_memory

hypothesis.settings.register_profile("ci", deadline=None, max_examples=40)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=300)
hypothesis.settings.load_profile("ci")  # --hypothesis-profile=thorough overrides


KEPT_BYTES = 1 << 30  # of device memory, from one test to the next


class TorchGenerator:
    """torch's global generators as hypothesis wants them: a replay sees the same numbers."""

    def __init__(self, run_seed: int) -> None:
        self.run_seed = run_seed

    def seed(self, value: int) -> None:
        torch.manual_seed((self.run_seed + value) % 2**63)

    def getstate(self) -> Any:
        return torch.get_rng_state()

    def setstate(self, state: Any) -> None:
        torch.set_rng_state(state)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seed", type=int, default=os.environ.get("PYTEST_SEED"),
        help="seed of the random tensors; default: $PYTEST_SEED, or else a fresh one",
    )  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.option.seed is None:
        from_controller = getattr(config, "workerinput", {})
        config.option.seed = from_controller.get("seed", secrets.randbelow(2**31))
    if config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(config.option.seed)
    config.torch_generator = TorchGenerator(config.option.seed)  # type: ignore[attr-defined]
    hypothesis.register_random(config.torch_generator)  # type: ignore[attr-defined]
    poisoned_memory.install()
    one_gloo_thread.install()
    if not torch.cuda.is_available():  # where garbage holds no memory of a device
        gc.set_threshold(20_000, 20, 20)  # collecting took a tenth of all time


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """A worker of pytest-xdist has the seed that the controller reports."""
    node.workerinput["seed"] = node.config.option.seed


def pytest_collection_finish() -> None:
    """Garbage collections need not look at what importing made."""
    gc.collect()
    gc.freeze()


def pytest_report_header(config: pytest.Config) -> list[str]:
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return [
        f"seed: {config.option.seed} (--seed {config.option.seed} repeats it)",
        f"torch {torch.__version__}, CUDA: {', '.join(devices) or 'none, gpu tests left out'}",
    ]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        terminalreporter.write_line(f"repeat with --seed {config.option.seed}")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Cases of which a test's `kept` says no are exhaustive."""
    if (mark := item.get_closest_marker("kept")) is None:
        return
    (kept,) = mark.args
    values = item.callspec.params  # type: ignore[attr-defined]
    if not kept(**{name: values[name] for name in inspect.signature(kept).parameters}):
        item.add_marker("exhaustive")


@pytest.hookimpl(trylast=True)  # after `-m` left out what it does
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # No worker shall come upon a test of a minute at the end: files in Triton's interpreter, then
    # what compiles much.
    items.sort(
        key=lambda item: (
            not item.name.startswith("test_kernels_under_the_interpreter"),
            item.get_closest_marker("long") is None,
        )
    )
    left_out = {item for item in items if is_left_out(item, config.option.markexpr)}
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=list(left_out))
    if torch.cuda.is_available():
        spread_large(items)


def is_left_out(item: pytest.Item, expression: str) -> bool:
    """What this machine cannot run, and what runs only where the expression after `-m` names it.

    A GPU is fast enough for exhaustive tests: `make gpu-test` runs them all.
    """
    if item.get_closest_marker("gpu"):
        return not torch.cuda.is_available()
    if item.get_closest_marker("browser") and shutil.which("chromium") is None:
        return True
    return item.get_closest_marker("exhaustive") is not None and "exhaustive" not in expression


def spread_large(items: list[pytest.Item]) -> None:
    """Tests that take turns, apart: no worker of pytest-xdist should wait for another's."""
    large = [item for item in items if item.get_closest_marker("large")]
    others = [item for item in items if not item.get_closest_marker("large")]
    step = len(others) // (len(large) + 1)
    for number, item in enumerate(large, 1):
        others.insert(number * step + number - 1, item)
    items[:] = others


@pytest.fixture(autouse=True)
def _fresh_random_state(request: pytest.FixtureRequest) -> None:
    """Depends on the run's seed and the test's name, not on which tests ran before."""
    seed = (request.config.option.seed + zlib.crc32(request.node.nodeid.encode())) % 2**32
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture(autouse=True)
def _shared_device(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[None]:
    """Workers share a device: what a test held is given back, and `large` ones take turns."""
    alone: Any = contextlib.nullcontext()
    if request.node.get_closest_marker("large"):
        run = tmp_path_factory.getbasetemp().parent  # of all workers of pytest-xdist
        alone = filelock.FileLock(run / "large.lock")
    with alone:
        yield
        if torch.cuda.is_available() and torch.cuda.memory_reserved() > KEPT_BYTES:
            torch.cuda.empty_cache()


@pytest.fixture(autouse=True, scope="module")
def _fresh_compiler() -> Iterator[None]:
    """No test file sees, or exhausts the recompilation limit of, another's compiled code."""
    yield
    torch._dynamo.reset()


@pytest.fixture
def forget_shapes() -> None:
    """A compiler that knows no shapes."""
    torch._dynamo.reset()


@pytest.fixture
def forget_plans() -> Iterator[Callable[[], None]]:
    """For tests that change the selection's limits, of which kept plans know nothing.

    No plan comes from another test or goes to the next; the call forgets those made since.
    """
    from nsa_flex.fallback_kernels.selected import config

    def forget() -> None:
        config._kept.cache_clear()
        config._chunks.cache_clear()

    forget()
    yield forget
    forget()


@pytest.fixture(params=["filled", "as it is"])
def new_memory(request: pytest.FixtureRequest) -> Iterator[str]:
    """With memory filled, which adds operations to launch plans, and as users have it."""
    with poisoned_memory.lifted() if request.param == "as it is" else contextlib.nullcontext():
        yield request.param


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Runs the test on the CPU and, where there is one, on the CUDA device."""
    return torch.device(request.param)


@pytest.fixture
def offsets(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The `query_offset` of each call of `nsa_attention` by a cache."""
    from nsa_flex import nsa_attention
    from nsa_flex.cache import layer as cache_layer

    seen: list[Any] = []

    def watched(*args: Any, **options: Any) -> Any:
        seen.append(options["query_offset"])
        return nsa_attention(*args, **options)

    monkeypatch.setattr(cache_layer, "nsa_attention", watched)
    return seen


@pytest.fixture(autouse=True)
def _operators_plan_anew() -> Iterator[None]:
    """Tests change what launch plans follow from: none outlives its test."""
    yield
    plans = sys.modules.get("nsa_flex.fallback_kernels.launch.plans")
    if plans is not None:
        plans.forget_plans()
