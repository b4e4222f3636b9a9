"""Launch plans: a replay does what the body does, and is used only where nothing can differ."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import pkgutil
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from nsa_flex import NSAConfig, nsa_attention
from reference import played_cudnn
from reference.interpreter import DEVICE, INTERPRETED, interpreted, kernels
from reference.modes import deterministic_algorithms

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton.runtime.jit import KernelInterface  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from nsa_flex import fallback_kernels  # noqa: E402
from nsa_flex.bench.tools.matrix_entries import targeting  # noqa: E402
from nsa_flex.fallback_kernels.common.launches import (  # noqa: E402
    intercepting_launches,
    is_recordable,
    recordable,
)
from nsa_flex.fallback_kernels.compressed import cudnn  # noqa: E402
from nsa_flex.fallback_kernels.fused.operators import core_attention  # noqa: E402
from nsa_flex.fallback_kernels.launch import packing, plans  # noqa: E402
from nsa_flex.fallback_kernels.launch import steps as plan_steps  # noqa: E402
from nsa_flex.fallback_kernels.launch.plans import (  # noqa: E402
    forget_plans,
    planned,
    without_plans,
)
from nsa_flex.fallback_kernels.launch.streams import round_robin  # noqa: E402

test_kernels_under_the_interpreter = interpreted(__file__)


@pytest.fixture(autouse=True)
def _plans_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Operators are planned on the CPU too, and nothing is left behind."""
    monkeypatch.setattr(plans, "DEVICES", {"cuda", "cpu"})
    forget_plans()
    yield
    forget_plans()


@recordable
@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, factor, size, BLOCK: tl.constexpr):
    """out = x + factor * y, of `size` numbers."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < size)
    y = tl.load(y_ptr + i, mask=i < size)
    tl.store(out_ptr + i, x + factor * y, mask=i < size)


@recordable
@triton.jit
def copy_tiles_kernel(x_tiles, out_tiles, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """out = x, by tensor copies."""
    tile = x_tiles.load([tl.program_id(0) * ROWS, 0])
    out_tiles.store([tl.program_id(0) * ROWS, 0], tile.reshape([ROWS, COLUMNS]))


@triton.jit
def of_others_kernel(out_ptr):
    """out[0] = 7."""
    tl.store(out_ptr, 7.0)


class Counted:
    """A planned body, and how often it ran."""

    def __init__(self, body: Callable[..., Any]) -> None:
        self.ran = 0

        def counted(*args: Any) -> Any:
            self.ran += 1
            return body(*args)

        self.operator = planned(counted)

    def __call__(self, *args: Any) -> Any:
        with torch.no_grad():
            return self.operator(*args)


def launch_add(x: Tensor, y: Tensor, out: Tensor, factor: float) -> None:
    size = x.numel()
    add_kernel[(triton.cdiv(size, 16),)](x, y, out, factor, size, BLOCK=16)


def blend(x: Tensor, y: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Copies, views, offsets, lists of views, results in place and a result that is a view."""
    rows, columns = x.shape
    x, y = x.contiguous(), y.t().contiguous().t().contiguous()
    both = torch.empty((2, rows, columns), device=x.device)
    launch_add(x, y, both[1], factor)  # at an offset
    launch_add(y, x, both[0], factor)
    first, second = both.split(1)
    running = torch.zeros(columns + 1, device=x.device)
    torch.cumsum(first[0].sum(0), 0, out=running[1:])
    second.mul_(2)
    numbers = torch.arange(columns, device=x.device) + 1
    return both.transpose(1, 2), running[1:] * numbers


def numbers(*shape: int, device: str = DEVICE) -> Tensor:
    return torch.randn(shape, device=device)


@kernels
def test_a_replay_computes_what_the_body_computes() -> None:
    operator = Counted(blend)
    for _ in range(5):
        x, y = numbers(3, 20), numbers(3, 20)
        for found, expected in zip(operator(x, y, 0.5), blend(x, y, 0.5), strict=True):
            assert torch.equal(found, expected)
            assert found.stride() == expected.stride()
    assert operator.ran == 2  # once before it is known, once recorded
    assert operator.operator.plans.replayed == 3


@kernels
def test_results_are_new_memory_each_time() -> None:
    operator = Counted(blend)
    x, y = numbers(3, 20), numbers(3, 20)
    results = [operator(x, y, 0.5) for _ in range(4)]
    expected = [r.clone() for r in results[2]]
    operator(numbers(3, 20), numbers(3, 20), 0.5)
    assert all(torch.equal(a, b) for a, b in zip(results[2], expected, strict=True))
    assert results[2][0].data_ptr() != results[3][0].data_ptr()


def _strided(x: Tensor) -> Tensor:
    return numbers(20, 3).t()


def _misaligned(x: Tensor) -> Tensor:
    return numbers(61).as_strided((3, 20), (20, 1), 1)


@kernels
@pytest.mark.parametrize(
    "other",
    [
        lambda x, y: (x[:2], y[:2], 0.5),
        lambda x, y: (_strided(x), y, 0.5),
        lambda x, y: (_misaligned(x), y, 0.5),
        lambda x, y: (x, y, 0.25),
        lambda x, y: (x, y, 1),
        lambda x, y: (x, x, 0.5),
        lambda x, y: (x, y.double(), 0.5),
    ],
    ids=["shape", "strides", "alignment", "number", "int", "same tensor", "dtype"],
)
def test_what_a_plan_depends_on(other: Callable[[Tensor, Tensor], tuple[Any, ...]]) -> None:
    operator = Counted(blend)
    x, y = numbers(3, 20), numbers(3, 20)
    for _ in range(3):
        operator(x, y, 0.5)
    args = other(x, y)
    ran = operator.ran
    for _ in range(3):
        for found, expected in zip(operator(*args), blend(*args), strict=True):
            assert torch.equal(found, expected)
    assert operator.ran == ran + 2


@kernels
def test_deterministic_algorithms_have_plans_of_their_own() -> None:
    operator = Counted(blend)
    x, y = numbers(3, 20), numbers(3, 20)
    for _ in range(3):
        operator(x, y, 0.5)
    with deterministic_algorithms(warn_only=True):
        operator(x, y, 0.5)
    assert operator.ran == 3


@kernels
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (lambda x: x * x.sum().item(), "tells Python of values"),
        (lambda x: x[x > 0], "tells Python of values"),
        (lambda x: x + OUTSIDE.to(x.device), "from outside the operator"),
        (lambda x: {"a": x + 1}, "returns dict"),
        (lambda x: torch.arange(4, device=x.device).add_(1) + x, "kept with the plan"),
        (lambda x: torch.rand_like(x), None),
    ],
    ids=["item", "nonzero", "outside", "dict", "written constant", "random"],
)
def test_bodies_that_cannot_be_recorded_run_as_they_are(
    body: Callable[[Tensor], Any], reason: str | None
) -> None:
    operator = Counted(body)
    results = [operator(numbers(4).abs() + 1) for _ in range(4)]
    if reason is None:  # recorded; but random numbers are drawn anew
        assert operator.ran == 2
        assert not torch.equal(results[2], results[3])
        return
    assert operator.ran == 4
    assert any(reason in problem for problem in operator.operator.plans.problems)


OUTSIDE = torch.ones(4)


@kernels
def test_what_depends_on_no_argument_is_kept_unless_it_is_written() -> None:
    def body(x: Tensor) -> tuple[Tensor, Tensor]:
        steps = torch.arange(4, device=x.device, dtype=x.dtype)
        sums = torch.zeros(4, device=x.device)
        launch_add(x, steps, sums, 1.0)
        sums.add_(sums)
        return sums, steps * 2

    operator = Counted(body)
    for _ in range(4):
        x = numbers(4)
        sums, doubled = operator(x)
        assert torch.equal(sums, 2 * (x + torch.arange(4, device=DEVICE)))
        assert doubled.tolist() == [0, 2, 4, 6]
        doubled.zero_()  # the caller's own


@kernels
def test_operators_without_results_and_with_lists() -> None:
    def body(x: Tensor) -> Tensor:
        parts = torch.unsafe_split(x * 2, 4)
        torch._foreach_add_([parts[0]], 1.0)
        return parts[0] + 1

    operator = Counted(body)
    for _ in range(4):
        x = numbers(4)
        assert torch.equal(operator(x), x * 2 + 1 + 1)
    assert operator.ran == 2


class Watcher(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@kernels
def test_a_recorded_call_keeps_no_memory_longer() -> None:
    gone = []

    def body(x: Tensor) -> Tensor:
        doubled = x * 2
        memory = StorageWeakRef(doubled.untyped_storage())
        view = doubled.t()
        out = view + 1
        del doubled, view
        gone.append(memory.expired())
        return out

    operator = Counted(body)
    for _ in range(3):
        x = numbers(3, 5)
        assert torch.equal(operator(x), (x * 2).t() + 1)
    assert gone == [True, True]  # run once, recorded once
    assert operator.operator.plans.replayed == 1


@kernels
def test_whoever_watches_operators_sees_the_body() -> None:
    operator = Counted(blend)
    x, y = numbers(3, 20), numbers(3, 20)
    for _ in range(3):
        operator(x, y, 0.5)
    with Watcher():
        operator(x, y, 0.5)
    assert operator.ran == 3


@kernels
def test_hooks_of_triton_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = Counted(blend)
    x, y = numbers(3, 20), numbers(3, 20)
    for _ in range(3):
        operator(x, y, 0.5)
    hook = triton.knobs.runtime.launch_enter_hook
    hook.add(_ignore)
    try:
        operator(x, y, 0.5)
    finally:
        hook.remove(_ignore)
    assert operator.ran == 3


def _ignore(*args: Any) -> None:
    return None


def test_every_kernel_of_the_package_is_recordable() -> None:
    """A launch that a recorder does not see would be missing in a plan."""
    found, launched = set(), set()
    for module in pkgutil.walk_packages(
        fallback_kernels.__path__, fallback_kernels.__name__ + "."
    ):
        for name, x in vars(importlib.import_module(module.name)).items():
            if name.endswith("_kernel") and isinstance(x, KernelInterface):
                assert is_recordable(x), f"{module.name}.{name} lacks @recordable"
                found.add(name)
        for node in ast.walk(ast.parse(inspect.getsource(sys.modules[module.name]))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                launched.add(ast.unparse(node.func.value))
    # Where tiles choose the kernel, or a call passes it on, the variable is called so.
    assert len(found) > 40
    assert launched - found <= {"kernel", "self.kernel"}


@kernels
def test_kernels_of_others_are_as_triton_made_them() -> None:
    """Also while launches are intercepted; a second one has it back afterwards."""
    before = KernelInterface.__dict__["__getitem__"]
    seen: list[Any] = []
    x = numbers(4)
    with intercepting_launches(lambda kernel, *_: seen.append(kernel)):
        assert KernelInterface.__dict__["__getitem__"] is before
        assert not is_recordable(of_others_kernel)
        of_others_kernel[(1,)](x)
        assert x[0] == 7
        with intercepting_launches(lambda *_: seen.append("inner")):
            launch_add(x, x, x, 1.0)
        thread = threading.Thread(target=launch_add, args=(x, x, x, 1.0))
        thread.start()
        thread.join()
        assert x[0] == 14  # another thread launches
        launch_add(x, x, x, 1.0)
    assert seen == ["inner", add_kernel]
    launch_add(x, x, x, 1.0)
    assert x[0] == 28


@kernels
def test_plans_can_be_turned_off() -> None:
    """Within `without_plans` the body runs, in every thread; afterwards plans are replayed."""
    operator = Counted(blend)
    kept = operator.operator.plans
    x, y = numbers(3, 20), numbers(3, 20)

    def replay() -> Any:
        return kept.replay([x, y], (0.5,), lambda: (x, y, 0.5))

    for _ in range(3):
        operator(x, y, 0.5)
    assert replay() is not None
    with without_plans():
        assert not plans.plans_enabled()
        thread = threading.Thread(target=operator, args=(x, y, 0.5))
        thread.start()
        thread.join()
        operator(x, y, 0.5)
        assert replay() is None
        other = Counted(blend)
        for _ in range(3):
            other(x, y, 0.5)
    assert operator.ran == 4
    assert other.ran == 3
    assert not other.operator.plans.by_key
    assert plans.plans_enabled()
    operator(x, y, 0.5)
    assert operator.ran == 4
    assert replay() is not None


@kernels
@pytest.mark.parametrize(("value", "enabled"), [("0", False), (None, True)])
def test_the_environment_turns_plans_off(value: str | None, enabled: bool) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "NSA_FLEX_LAUNCH_PLANS"}
    if value is not None:
        environment["NSA_FLEX_LAUNCH_PLANS"] = value
    code = "from nsa_flex.fallback_kernels.launch import plans; print(plans.plans_enabled())"
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(enabled)


@kernels
def test_the_core_without_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward give the bits that replays give."""
    dtype = torch.float32
    if INTERPRETED:
        monkeypatch.setattr(cudnn, "causal", played_cudnn.causal)
        monkeypatch.setattr(cudnn, "causal_gradients", played_cudnn.causal_gradients)
    else:
        dtype = torch.bfloat16
    config = NSAConfig(8, 4, 16, 4, window_size=20)
    tokens, blocks = 40, config.num_compressed_blocks(40)
    sizes = [(4, tokens, 16), *[(2, tokens, 16)] * 2, *[(2, blocks, 16)] * 2, (4, tokens, 3)]
    leaves = [numbers(1, *size).to(dtype).requires_grad_() for size in sizes]
    q, k, v, ck, cv, gates = leaves

    def run() -> list[Tensor]:
        out = core_attention(q, k, v, ck, cv, k, v, gates, config=config, scale=0.25).out
        return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    def replayed() -> int:
        return sum(each.replayed for each in plans._all_plans)

    with deterministic_algorithms():
        for _ in range(2):
            run()
        before = replayed()
        expected = run()
        with_plans = replayed()
        with without_plans():
            found = run()
    assert with_plans - before >= 2, plans.plan_problems()
    assert replayed() == with_plans
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@kernels
def test_the_oldest_plan_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "MAX_PLANS", 2)
    operator = Counted(blend)
    for columns in (4, 5, 6):
        operator(numbers(2, columns), numbers(2, columns), 0.5)
    assert len(operator.operator.plans.by_key) == 2


@kernels
def test_plans_of_one_rest_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than are asked before a key is made, one after the other."""
    monkeypatch.setattr(plans, "MAX_RECENT", 2)
    operator = Counted(blend)
    for call in range(6):
        for columns in (4, 5, 6, 4):
            x, y = numbers(2, columns), numbers(2, columns)
            for found, expected in zip(operator(x, y, 0.5), blend(x, y, 0.5), strict=True):
                assert torch.equal(found, expected)
        assert operator.ran == min(call + 1, 2) * 3 + (call == 0)
    (recent,) = operator.operator.plans.recent.values()
    assert len(recent) == 2


@kernels
def test_a_recent_plan_is_replayed_alone() -> None:
    """`replay` serves what was replayed before, and nothing else."""
    operator = Counted(torch.add)
    kept = operator.operator.plans
    x, y = numbers(3, 20), numbers(3, 20)

    def replay(*args: Any) -> Any:
        tensors = [each for each in args if isinstance(each, Tensor)]
        others = tuple([each for each in args if not isinstance(each, Tensor)])
        return kept.replay(tensors, others, lambda: args)

    for _ in range(2):
        operator(x, y)
        assert replay(x, y) is None
    operator(x, y)
    assert torch.equal(replay(y, x), x + y)
    for other in [(x, x), (x, y.double()), (x, y[:2]), (x, _misaligned(y)), (x, _strided(y)),
                  (x, y.to("meta")), (x, 1.0), (x, torch.nn.Parameter(y)), (x, y, y[:0]),
                  (x, object())]:  # fmt: skip
        assert replay(*other) is None
    with torch.inference_mode():
        assert torch.equal(operator(x, y), x + y)
    assert operator.ran == 2


@kernels
def test_what_else_a_replay_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers, deterministic algorithms and hooks, asked at each call; no call is read twice."""
    operator = Counted(blend)
    kept = operator.operator.plans
    x, y = numbers(3, 20), numbers(3, 20)
    read = []
    monkeypatch.setattr(plans, "read_call", lambda a, of=plans.read_call: read.append(a) or of(a))

    def replay(factor: float) -> Any:
        return kept.replay([x, y], (factor,), lambda: (x, y, factor))

    for _ in range(3):
        operator(x, y, 0.5)
    read.clear()
    for _ in range(4):
        assert torch.equal(replay(0.5)[0], blend(x, y, 0.5)[0])
    assert len(read) == 1
    assert replay(0.25) is None
    with deterministic_algorithms():
        assert replay(0.5) is None
    hook = triton.knobs.runtime.launch_enter_hook
    hook.add(_ignore)
    try:
        assert replay(0.5) is None
    finally:
        hook.remove(_ignore)
    assert replay(0.5) is not None
    assert operator.ran == 2


def test_launches_in_a_row_are_one_step() -> None:
    """On other streams too; what lies between keeps its place."""
    other, done = plan_steps.Release((0,)), []

    def launch(name: str) -> Any:
        step = object.__new__(packing.PackedLaunch)
        step.handles, step.compiled, step.registers = (name,), [name], {ord(name)}
        step.launch = lambda handles, pointers, stream: done.extend(handles)
        return step

    beside = plan_steps.OnStream(SimpleNamespace(), [launch("c"), launch("d")])  # type: ignore[arg-type]
    steps = [launch("a"), launch("b"), other, launch("e"), beside, launch("f")]
    joined = packing.join_launches(steps)
    assert [getattr(step, "handles", None) for step in joined] == [
        *(("a", "b"), None, ("e",), None, ("f",))
    ]
    assert joined[0].registers == {ord("a"), ord("b")}
    assert joined[0].compiled == ["a", "b"]
    assert [step.handles for step in beside.steps] == [("c", "d")]
    joined[0](plan_steps.Registers([], [], 0))
    assert done == ["a", "b"]


def add_twice(x: Tensor, y: Tensor) -> Tensor:
    """x + 2 y, transposed, by memory that nobody sees."""
    between, out = torch.empty_like(x), torch.empty_like(x)
    launch_add(x, y, between, 1.0)
    launch_add(between, y, out, 1.0)
    return out.t()


@kernels
def test_a_plan_of_launches_alone_by_recent_plans(new_memory: str) -> None:
    """Unaligned tensors, streams and graphs are as in other calls."""
    operator = Counted(add_twice)
    kept = operator.operator.plans

    def replay(*args: Tensor) -> Any:
        return kept.replay([*args], (), lambda: args)

    x, y = numbers(4, 12), numbers(4, 12)
    for _ in range(3):
        expected = operator(x, y)
    found = replay(x, y)
    assert found.stride() == expected.stride()
    torch.testing.assert_close(found, (x + 2 * y).t())
    torch.testing.assert_close(replay(y, x), (y + 2 * x).t())
    torch.testing.assert_close(found, (x + 2 * y).t())  # memory of its own
    assert replay(x, numbers(49)[1:].view(4, 12)) is None
    if DEVICE == "cuda":
        other = torch.cuda.Stream()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            found = replay(x, y * 3)
        torch.cuda.current_stream().wait_stream(other)
        torch.testing.assert_close(found, (x + 6 * y).t())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = replay(x, y)
        x.mul_(3)
        graph.replay()
        torch.testing.assert_close(found, (x + 2 * y).t())
    assert operator.ran == 2


@kernels
def test_the_plan_of_the_last_call_is_asked_first() -> None:
    operator = Counted(torch.add)
    kept = operator.operator.plans
    pairs = [(numbers(3, n), numbers(3, n)) for n in (4, 8, 12)]
    for x, y in pairs * 3:
        operator(x, y)
    for x, y in (*pairs, *pairs):
        found = kept.replay([x, y], (), lambda x=x, y=y: (x, y))  # type: ignore[misc]
        assert torch.equal(found, x + y)
        (recent,) = kept.recent.values()
        assert len(recent) == 3
        assert recent[0].guard(x, y)


@pytest.mark.gpu  # the interpreter runs one kernel at a time
def test_threads_replay_side_by_side() -> None:
    operator = Counted(blend)
    for _ in range(3):
        operator(numbers(3, 20), numbers(3, 20), 0.5)
    wrong: list[bool] = []

    def work() -> None:
        for _ in range(5):
            x, y = numbers(3, 20), numbers(3, 20)
            found = operator(x, y, 0.5)
            pairs = zip(found, blend(x, y, 0.5), strict=True)
            wrong.extend(not torch.equal(a, b) for a, b in pairs)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong
    assert not any(wrong)


def copied(x: Tensor) -> tuple[Tensor, Tensor]:
    """The lower half of a matrix of two tiles, then all of it, by tensor descriptors."""
    results = []
    for part in (x[16:], x):
        out = torch.empty_like(part)
        tiles = [TensorDescriptor.from_tensor(each, [16, 32]) for each in (part, out)]
        copy_tiles_kernel[(part.shape[0] // 16,)](*tiles, ROWS=16, COLUMNS=32)
        results.append(out)
    return results[0], results[1]


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [True, False])
def test_tensor_descriptors_follow_their_memory(
    packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where kernels cannot be packed there is no plan, and the body runs every time."""
    if not packed:
        monkeypatch.setattr(packing, "version_unsupported_reason", lambda _: "not here")
    operator = Counted(copied)
    matrices = [numbers(32, 32) for _ in range(3)]
    for x in [*matrices, *matrices, *matrices]:
        lower, all_rows = operator(x)
        assert torch.equal(lower, x[16:])
        assert torch.equal(all_rows, x)
    (plan,) = operator.operator.plans.by_key.values()
    if packed:
        assert packing.PackedLaunch in {type(step) for step in plan.steps}
    else:
        assert plan is False
        assert operator.operator.plans.problems == {"not here"}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, captured = operator(matrices[0])
    matrices[0].add_(1)
    graph.replay()
    assert torch.equal(captured, matrices[0])
    assert operator.ran == (2 if packed else 10)


@recordable
@triton.jit(do_not_specialize=["size", "wide"])
def scaled_kernel(
    x_ptr, nothing_ptr, out_ptr, flag, size, scale, wide, BLOCK: tl.constexpr, TWICE: tl.constexpr
):
    """out = scale * x, with parameters of several types."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < size) * scale
    if nothing_ptr is not None:
        x += tl.load(nothing_ptr + i, mask=i < size)
    if TWICE:
        x *= 2
    tl.store(out_ptr + i, tl.where(flag, x, wide.to(tl.float32)), mask=i < size)


@pytest.mark.gpu
def test_parameters_of_every_type_are_packed() -> None:
    """Views at odd offsets, None, booleans, numbers of 32 and 64 bits, floats, a past of 1."""

    def body(x: Tensor, flag: bool, scale: float, wide: int) -> tuple[Tensor, Tensor]:
        results = []
        for part in (x[1:], x):
            out = torch.empty_like(part)
            size = part.numel()
            scaled_kernel[(triton.cdiv(size, 32),)](
                part, None, out, flag, size, scale, wide, BLOCK=32, TWICE=True
            )
            results.append(out)
        return results[0], results[1]

    operator = Counted(body)
    for flag, scale, wide in [(True, 0.5, 1), (False, 2.0, 1 << 40), (True, -1.5, -3)]:
        for _ in range(4):
            x = numbers(71)
            lower, every = operator(x, flag, scale, wide)
            expected = 2 * scale * x if flag else torch.full_like(x, wide)
            torch.testing.assert_close(every, expected)
            torch.testing.assert_close(lower, expected[1:])
    kept = operator.operator.plans.by_key.values()
    kinds = {type(step) for plan in kept for step in plan.steps}
    assert {kind for kind in kinds if "Launch" in kind.__name__} == {packing.PackedLaunch}
    assert operator.ran == 6


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_c_file_compiles_without_warnings() -> None:
    """With the headers that Triton compiles its launcher with; running it needs a driver."""
    from triton.backends.nvidia import driver

    source = Path(packing.__file__).with_name("packed_launch.c")
    folders = [*driver.include_dirs, sysconfig.get_path("include")]
    command = ["cc", "-std=c11", "-Wall", "-Werror", "-fsyntax-only", str(source)]
    command += [f"-I{folder}" for folder in folders]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_packed_parameters() -> None:
    """Constants are left out, addresses are to come, and two null pointers end the parameters."""
    types = {
        "x": "*fp32", "block": "constexpr", "flag": "i1", "none": "*i32", "scale": "fp32",
        "wide": "i64",
    }  # fmt: skip
    compiled = SimpleNamespace(
        src=SimpleNamespace(signature=types), metadata=SimpleNamespace(tensordesc_meta=None)
    )
    args = [None, 64, True, None, 0.5, 1 << 40]
    packed = packing._Parameters(compiled, args, [(0, 3, 8)], [])
    places, sizes, memory, pointers, maps = packed.tables()
    assert struct.unpack("7I", places) == (0, 8, 16, 24, 32, 40, 48)
    assert struct.unpack("7I", sizes) == (8, 1, 8, 4, 8, 8, 8)
    assert struct.unpack("Q?7xQf4xqQQ", memory) == (0, True, 0, 0.5, 1 << 40, 0, 0)
    assert struct.unpack("IIq", pointers) == (0, 3, 8)
    assert maps == b""
    with pytest.raises(KeyError, match="bf16"):
        packing._Parameters(
            SimpleNamespace(
                src=SimpleNamespace(signature={"x": "bf16"}), metadata=compiled.metadata
            ),
            [1.0], [], [],
        )  # fmt: skip


# Triton looks at each element of a tuple: 1 is a constant, 16 and 1 << 40 are divisible by 16.
TUPLES = [(3, 1, 16, 1 << 40), (16, 3, 1, 5)]


@recordable
@triton.jit(do_not_specialize=["size"])
def tuples_kernel(x_ptr, strides, out_ptr, pair, size, BLOCK: tl.constexpr, OF: tl.constexpr):
    """out[i] = x[i] * (the strides' sum + a pair of a float and a tuple), OF a constant tuple."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = strides[0] + strides[1] * 2 + strides[2] * 3 + strides[3] % 7
    total += pair[1][0] * OF[0] + pair[1][1] * OF[1]
    x = tl.load(x_ptr + i, mask=i < size)
    tl.store(out_ptr + i, x * (total.to(tl.float32) + pair[0]), mask=i < size)


def launch_tuples(x: Tensor, strides: tuple[int, ...], size: int) -> Tensor:
    out = torch.zeros_like(x)
    grid = (triton.cdiv(size, 32),)
    tuples_kernel[grid](x, strides, out, (0.5, (1, 48)), size, BLOCK=32, OF=(2, 3))
    return out


@kernels
@pytest.mark.parametrize("packed", [True, False])
def test_tuples_of_numbers_are_arguments(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay gives the bits of a launch without a plan; so does a call that has none."""
    if not packed:
        monkeypatch.setattr(packing, "version_unsupported_reason", lambda _: "not here")
    operator = Counted(lambda x, *rest: launch_tuples(x, rest[:-1], rest[-1]))
    kept = operator.operator.plans
    for strides in TUPLES:
        for size in (1, 64, 70) * 3:
            x = numbers(71)
            a, b, c, d = strides
            factor = a + 2 * b + 3 * c + d % 7 + 2 + 48 * 3 + 0.5
            expected = torch.where(torch.arange(71, device=DEVICE) < size, x * factor, 0)
            found = operator(x, *strides, size)
            torch.testing.assert_close(found, expected)
            assert torch.equal(found, launch_tuples(x, strides, size))
    if INTERPRETED or packed:
        assert kept.replayed == 6, kept.problems
        launches = {type(step) for plan in kept.by_key.values() for step in plan.steps}
        assert INTERPRETED or packing.PackedLaunch in launches
    else:
        assert kept.replayed == 0
        assert kept.problems == {"not here"}


@pytest.mark.skipif(INTERPRETED, reason="kernels are compiled, not interpreted")
@pytest.mark.parametrize("strides", TUPLES)
def test_elements_of_tuples_are_packed_in_the_places_of_the_kernel(strides: Any) -> None:
    """As the compiled kernel takes them: one parameter an element, but for constants."""
    with targeting(90):
        compiled = tuples_kernel.warmup(
            torch.float32, strides, torch.float32, (0.5, (1, 48)), 70, BLOCK=32, OF=(2, 3),
            grid=(3,),
        )  # fmt: skip
    args = [None, strides, None, (0.5, (1, 48)), 70, 32, (2, 3)]
    packed = packing._Parameters(compiled, args, [(0, 0, 0), (2, 1, 0)], [])
    declared = re.findall(
        r"\.param \.(\w)(\d+) (?:\.ptr[^,]*?)?\w+_param_\d+", compiled.asm["ptx"]
    )
    assert [int(bits) // 8 for _, bits in declared] == packed.sizes
    given = [*(x for x in strides if x != 1)]
    number = {4: "i", 8: "q"}
    found = [
        struct.unpack_from(number[size], packed.memory, at)[0]
        for at, size in zip(packed.places[1 : 1 + len(given)], packed.sizes[1:], strict=False)
    ]
    assert found == given


def chunked(x: Tensor, y: Tensor) -> Tensor:
    """Halves on two streams, each with an operator of PyTorch and a launch."""
    out = torch.empty_like(x)
    halves = [(x[:8], y[:8], out[:8]), (x[8:], y[8:], out[8:])]

    def run(half: tuple[Tensor, Tensor, Tensor], factor: float) -> None:
        a, b, c = half
        launch_add(a * 1.0, b, c, factor)

    with torch.cuda.device_of(x):
        round_robin(x.device, halves, [2.0, 2.0], run)
    return out


@pytest.mark.gpu
def test_streams_captures_and_other_devices() -> None:
    operator = Counted(chunked)
    x, y = numbers(16, 1 << 16), numbers(16, 1 << 16)
    for _ in range(3):
        assert torch.equal(operator(x, y), x + 2 * y)
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        found = operator(x * 2, y)
    torch.cuda.current_stream().wait_stream(other)
    assert torch.equal(found, 2 * x + 2 * y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = operator(x, y)
    x.mul_(3)
    graph.replay()
    assert torch.equal(captured, x + 2 * y)
    assert operator.ran == 2
    if torch.cuda.device_count() > 1:
        a, b = x.to("cuda:1"), y.to("cuda:1")
        for _ in range(3):
            assert torch.equal(operator(a, b), a + 2 * b)
        assert operator.ran == 4


@pytest.mark.gpu
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("tokens", [70, 2048, 20000])
def test_nsa_attention_is_replayed(tokens: int, documents: bool) -> None:
    """Forward and backward of all operators, against their bodies."""
    config = NSAConfig()
    blocks = config.num_compressed_blocks(tokens)
    shapes = [(8, tokens, 64), (2, tokens, 64), (2, tokens, 64), (2, blocks, 64), (2, blocks, 64)]
    start = None
    if documents:
        start = (torch.arange(tokens, device="cuda") // 640 * 640)[None]

    def inputs() -> list[Tensor]:
        leaves = [
            torch.randn((1, s, h, d), device="cuda", dtype=torch.bfloat16).transpose(1, 2)
            for h, s, d in [*shapes, (8, tokens, 3)]
        ]
        return [x.requires_grad_() for x in leaves]

    def run(leaves: list[Tensor]) -> list[Tensor]:
        out = nsa_attention(*leaves, config=config, document_start=start)
        return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    leaves = inputs()
    expected = run(leaves)
    run(leaves)  # recorded
    before = [(p, p.replayed) for p in plans._all_plans]  # bodies of two may have one name
    found = run(leaves)
    again = run(
        [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in leaves]
    )
    replayed = sum(p.replayed - count for p, count in before)
    assert replayed >= 4, plans.plan_problems()
    for name, a, b, c in zip(
        ("out", "q", "k", "v", "ck", "cv", "gates"), expected, found, again, strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2, msg=lambda m, n=name: f"{n}: {m}")
        torch.testing.assert_close(a, c, rtol=1e-2, atol=1e-2, msg=lambda m, n=name: f"{n}: {m}")
    assert torch.equal(expected[0], found[0])


@pytest.mark.gpu
def test_plain_calls_and_watched_ones_compute_the_same() -> None:
    """A plain eager call goes round the operator; whoever watches, sees it."""
    config = NSAConfig()
    leaves = [
        torch.randn((1, tokens, heads, dim), device="cuda", dtype=torch.float16).transpose(1, 2)
        for heads, tokens, dim in [(8, 300, 32), (2, 300, 32), (2, 300, 32), (2, 17, 32),
                                   (2, 17, 32), (8, 300, 3)]
    ]  # fmt: skip
    leaves = [x.requires_grad_() for x in leaves]
    seen: list[str] = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    plain = nsa_attention(*leaves, config=config)
    gradients = torch.autograd.grad(plain, leaves, torch.ones_like(plain))
    with Names():
        watched = nsa_attention(*leaves, config=config)
        expected = torch.autograd.grad(watched, leaves, torch.ones_like(watched))
    assert {"nsa_flex.core_forward.default", "nsa_flex.core_backward.default"} <= set(seen)
    assert torch.equal(plain, watched)
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
    assert "core_forward" in str(plain.grad_fn.next_functions)
    out = nsa_attention(*leaves, config=config)
    (first,) = torch.autograd.grad(out.sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        torch.autograd.grad(first.sum(), leaves[:1])


@pytest.mark.gpu
def test_a_replay_takes_no_more_memory_than_the_body() -> None:
    config = NSAConfig()
    q, k, v = (
        torch.randn(1, 16384, h, 128, device="cuda", dtype=torch.bfloat16) for h in (16, 4, 4)
    )
    q, k, v = (x.transpose(1, 2).requires_grad_() for x in (q, k, v))
    n = config.num_compressed_blocks(16384)
    ck, cv = (torch.randn(1, 4, n, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    gates = torch.rand(1, 16, 16384, 3, device="cuda", dtype=torch.bfloat16)
    peaks = []
    for _ in range(4):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        nsa_attention(q, k, v, ck, cv, gates, config=config).sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        q.grad = k.grad = v.grad = None
    assert peaks[3] <= peaks[0]
