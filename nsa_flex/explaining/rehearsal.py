"""What a call would launch on a CUDA device: the call itself, on tensors that hold nothing.

Nothing here knows which kernel follows which. Tensors are on the meta device and say that they are
on another one, nsa_flex's operators run their bodies, and Triton kernels are noted where they
would be launched: what is told comes from the code that launches, and cannot drift from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from nsa_flex.installed import HAS_TRITON
from nsa_flex.reasons import listening

_META = torch.device("meta")
_KERNELS = "nsa_flex.fallback_kernels."


class Launch(NamedTuple):
    """A Triton kernel that would run.

    kernel: its name, as profilers show it. stage: the folder of `fallback_kernels` it is in.
    """

    kernel: str
    stage: str


@dataclass
class Rehearsed:
    """What a rehearsal found, in order.

    launches: of all kernels. reasons: why kernels do not run, with their stage: "selected: the
    Gluon kernels need ...", each once.
    """

    launches: list[Launch] = field(default_factory=list)
    reasons: dict[str, None] = field(default_factory=dict)


def twin(x: Tensor) -> Tensor:
    """A tensor like `x` in shape, strides and dtype, on the meta device."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=_META)


@contextmanager
def rehearsing(device: torch.device) -> Iterator[Rehearsed]:
    """Within, meta tensors say they are on `device`, and this thread notes launches and reasons.

    A CUDA device need not be there; it has an index.
    """
    rehearsed = Rehearsed()

    def note_launch(kernel: Any, *_call: Any) -> None:
        launch = Launch(kernel.fn.__name__, _stage(kernel.fn.__module__))
        rehearsed.launches.append(launch)

    def note_reason(module: str, reason: str) -> None:
        rehearsed.reasons.setdefault(f"{_stage(module)}: {reason}")

    with ExitStack() as stack:
        if HAS_TRITON:
            from nsa_flex.fallback_kernels.common.launches import intercepting_launches

            stack.enter_context(_on_a_device(device))
            stack.enter_context(intercepting_launches(note_launch))
        stack.enter_context(listening(note_reason))
        stack.enter_context(pretending(device))
        yield rehearsed


@contextmanager
def pretending(device: torch.device) -> Iterator[None]:
    """Within, meta tensors say they are on `device`, and nsa_flex's operators run their bodies."""
    devices = _Devices(device)
    with _Bodies(devices), devices:
        yield


def with_index(device: torch.device) -> torch.device:
    """The device as a tensor on it names it."""
    if device == torch.device("cuda"):
        return torch.device("cuda", torch.cuda.current_device() if _has_cuda() else 0)
    return device


def _has_cuda() -> bool:
    return torch.cuda.is_available()


@contextmanager
def _on_a_device(device: torch.device) -> Iterator[None]:
    """Within, a CUDA device is one of compute capability 9.0 where there is none to ask."""
    from nsa_flex.fallback_kernels.common import arch

    if device.type != "cuda" or _has_cuda() or arch.is_imagined(device):
        yield
        return
    with arch.imagining(device, arch.SM90):
        yield


class _Devices(TorchFunctionMode):
    """Meta tensors say they are on `device`, and what would be made there is on meta."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.names = (device, torch.device(device.type))
        self.asks_device = Tensor.device.__get__

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func == self.asks_device:
            found = func(*args)
            return self.device if found.type == "meta" else found
        if func == Tensor.data_ptr and args[0].is_meta:
            # On meta all are 0; which tensors share memory is asked.
            x = args[0]
            return 256 * x.untyped_storage()._cdata + x.storage_offset() * x.element_size()
        kwargs = {name: self._held(value) for name, value in (kwargs or {}).items()}
        return func(*(self._held(value) for value in args), **kwargs)

    def _held(self, value: Any) -> Any:
        is_device = isinstance(value, torch.device) and value in self.names
        return _META if is_device else value


class _Bodies(TorchDispatchMode):
    """Operators of nsa_flex run what they run on a device, and then what they run on meta."""

    def __init__(self, devices: _Devices) -> None:
        super().__init__()
        self.devices = devices

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "nsa_flex":
            # No public way leads from an operator to the function that it was made of.
            from torch._library.custom_ops import OPDEFS

            with self, self.devices, torch.no_grad():
                OPDEFS[func._schema.name]._init_fn(*args, **kwargs)
        return func(*args, **kwargs)


def _stage(module: str) -> str:
    """The folder in `fallback_kernels`; of modules elsewhere the name."""
    if module.startswith(_KERNELS):
        return module.removeprefix(_KERNELS).partition(".")[0]
    return module.rpartition(".")[2]
