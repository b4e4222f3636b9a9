"""Calls of operators that do without the layers of torch.library, and those that may not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")
from nsa_flex.fallback_kernels.launch import direct


class Counted:
    """An operator `x * factor + y`, y 0 if left out, and how often torch.library's kernel ran."""

    def __init__(self, name: str) -> None:
        self.dispatched = 0

        @torch.library.custom_op(f"nsa_flex_test::{name}", mutates_args=())
        def operator(x: Tensor, factor: float, y: Tensor | None = None, power: int = 1) -> Tensor:
            out = (x * factor) ** power
            return out if y is None else out + y

        @operator.register_fake
        def _(x: Tensor, factor: float, y: Tensor | None = None, power: int = 1) -> Tensor:
            return torch.empty_like(x)

        def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
            ctx.factor = inputs[1]

        def differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            return grad * ctx.factor, None, None, None

        operator.register_autograd(differentiate, setup_context=keep)
        formula = direct.make_autograd_impl(operator._opoverload, operator)

        def counting(*args: Any) -> Any:
            self.dispatched += 1
            return formula(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(direct, "make_autograd_impl", lambda *_: counting)
            direct.register_kernels(operator, "CPU")
            self.direct = direct.directly(operator, keep, differentiate)
        self.overload: Any = operator._opoverload


@pytest.fixture
def _plain_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The real question, but for the device."""

    def is_plain(x: Tensor) -> bool:
        return (
            not torch.compiler.is_compiling()
            and type(x) in (Tensor, torch.nn.Parameter)
            and not torch._C._len_torch_dispatch_stack()
            and not torch._C._len_torch_function_stack()
            and torch._C._functorch.peek_interpreter_stack() is None
        )

    monkeypatch.setattr(direct, "is_plain", is_plain)
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def operator() -> Counted:
    return Counted("short")


@pytest.fixture(autouse=True)
def _from_zero(operator: Counted) -> None:
    operator.dispatched = 0


def check_compiled(operator: Counted, x: Tensor, backend: str = "inductor") -> None:
    compiled = torch.compile(lambda x: operator.direct(x, 3.0).sin(), backend=backend)
    compiled(x)  # the first call is watched
    operator.dispatched = 0
    out = compiled(x)
    (found,) = torch.autograd.grad(out.sum(), x)
    assert operator.dispatched == 0
    torch.testing.assert_close(out, (3 * x).sin())
    torch.testing.assert_close(found, 3 * (3 * x).cos())


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.usefixtures("_plain_on_cpu")
def test_compiled_code_goes_round_torch_library(operator: Counted, backend: str) -> None:
    check_compiled(operator, torch.randn(5, requires_grad=True), backend)


@pytest.mark.gpu
def test_compiled_code_goes_round_torch_library_on_cuda() -> None:
    check_compiled(Counted("on_cuda"), torch.randn(5, device="cuda", requires_grad=True))


@pytest.mark.usefixtures("_plain_on_cpu")
def test_arguments_by_name_and_left_out(operator: Counted) -> None:
    x, y = torch.randn(2, 5)
    with torch.no_grad():
        assert torch.equal(operator.overload(x, 2.0), 2 * x)
        assert torch.equal(operator.overload(x, 2.0, y=y), 2 * x + y)
        assert torch.equal(operator.overload(x, 2.0, power=2), (2 * x) ** 2)
        assert torch.equal(operator.overload(x, 2.0, y, 2), (2 * x) ** 2 + y)
        assert torch.equal(operator.overload(factor=2.0, x=x), 2 * x)
        assert operator.dispatched == 0
        for args, kwargs in [((x,), {}), ((x, 2.0), {"z": y}), ((x, 2.0, y), {"y": y})]:
            with pytest.raises((RuntimeError, TypeError)):
                operator.overload(*args, **kwargs)


@pytest.mark.usefixtures("_plain_on_cpu")
def test_gradients_and_watched_calls_go_to_torch_library(operator: Counted) -> None:
    x = torch.randn(5, requires_grad=True)
    (found,) = torch.autograd.grad(operator.overload(x, 2.0).sum(), x)
    assert torch.equal(found, torch.full((5,), 2.0))
    assert operator.dispatched == 1

    names: list[str] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Seen():
        operator.overload(x, 2.0)
    assert "nsa_flex_test.short.default" in names


def test_nothing_is_plain_on_a_cpu(operator: Counted) -> None:
    x = torch.randn(5)
    with torch.no_grad():
        assert torch.equal(operator.overload(x, 2.0), 2 * x)
    assert operator.dispatched == 1


def test_the_checks_of_torch_pass(operator: Counted) -> None:
    x = torch.randn(5, requires_grad=True)
    torch.library.opcheck(operator.overload, (x, 2.0))
