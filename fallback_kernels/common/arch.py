"""Every question about the device and the compiler, asked once: what runs where, and why not."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton

from nsa_flex.installed import warn_if_untested

warn_if_untested("triton")

# Versions whose Gluon, which is experimental, and whose way to launch kernels are known here.
TRITON_VERSIONS: tuple[str, ...] = ("3.6.", "3.7.", "3.8.", "3.9.")
# Without both on Hopper, from bench/results/hopper_off_h100.json.
HOPPER_LOSS = (
    "at 2k tokens and 64/4 heads a forward takes about 20 % longer, and 5 % with its backward"
)
SM90_SHARED_MEMORY = 227 << 10  # bytes that one CTA may have on compute capability 9.0


class Device(NamedTuple):
    """What is asked of a CUDA device.

    capability: its compute capability. shared_memory: bytes that one CTA may have.
    """

    capability: tuple[int, int]
    shared_memory: int


SM90 = Device((9, 0), SM90_SHARED_MEMORY)

INTERPRETED: bool = triton.knobs.runtime.interpret  # kernels run in Triton's CPU interpreter


def triton_unsupported_reason(device: torch.device) -> str | None:
    """Why Triton's kernels do not run on `device`; None if they do."""
    if device.type != "cuda" and not INTERPRETED:
        return f"the Triton kernels need CUDA tensors, got {device}"
    return None


@lru_cache
def gluon_unsupported_reason(device: torch.device) -> str | None:
    """Why the `_sm90` kernels, written in Gluon, do not run on `device`; None if they do."""
    if INTERPRETED:
        return "Triton's interpreter does not run Gluon"
    if device.type != "cuda":
        return f"the Gluon kernels need CUDA tensors, got {device}"
    major, minor = device_properties(device).capability
    if major != 9:
        return f"the Gluon kernels need compute capability 9.x, got {major}.{minor}"
    return version_unsupported_reason(device)


def version_unsupported_reason(device: torch.device) -> str | None:
    """Why the Gluon kernels and packed launches are off with this Triton; None if they are not.

    On Hopper, which loses the most, it warns once.
    """
    if triton.__version__.startswith(TRITON_VERSIONS):
        return None
    *others, last = (f"{version}x" for version in TRITON_VERSIONS)
    known = f"{', '.join(others)} and {last}"
    if device_properties(device).capability[0] == 9:
        _warn_of_version(triton.__version__, known)
    return f"the Gluon kernels are written for Triton {known}, got {triton.__version__}"


@cache
def _warn_of_version(version: str, known: str) -> None:
    warnings.warn(
        f"the kernels for Hopper and the fast launcher are off: they are written for Triton "
        f"{known}, got {version}. All results stay right; {HOPPER_LOSS}. Install one of these",
        stacklevel=2,
    )


@lru_cache
def supports_tma(device: torch.device) -> bool:
    """Whether `device` has tensor copies; the interpreter plays them on the CPU."""
    return device.type != "cuda" or device_properties(device).capability >= (9, 0)


@lru_cache
def has_tensor_memory(device: torch.device) -> bool:
    """Whether products are summed in tensor memory, as on compute capability 10.x."""
    return device.type == "cuda" and device_properties(device).capability[0] == 10


@lru_cache
def supports_pdl(device: torch.device) -> bool:
    """Whether a kernel may start before the one before it has finished (programmatic launch)."""
    return device.type == "cuda" and device_properties(device).capability >= (9, 0)


@lru_cache
def shared_memory_bytes(device: torch.device) -> int:
    """Bytes of shared memory that one CTA may have on `device`."""
    if device.type != "cuda":
        return SM90_SHARED_MEMORY  # the interpreter has no limit; plan as on Hopper
    return device_properties(device).shared_memory


def device_properties(device: torch.device) -> Device:
    """What a CUDA device says of itself, or what `imagining` says of it."""
    if device in _imagined:
        return _imagined[device]
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack the field
    capability = (properties.major, properties.minor)
    return Device(capability, properties.shared_memory_per_block_optin)


@contextmanager
def imagining(device: torch.device, properties: Device) -> Iterator[None]:
    """Within, `device`, which need not be there, has these properties: for `explain` and tests."""
    before = _imagined.get(device)
    _imagined[device] = properties
    forget_answers()
    try:
        yield
    finally:
        del _imagined[device]
        if before is not None:
            _imagined[device] = before
        forget_answers()


def is_imagined(device: torch.device) -> bool:
    """Whether `imagining` says what `device` is."""
    return device in _imagined


_imagined: dict[torch.device, Device] = {}


def forget_answers() -> None:
    """All questions are asked anew; for whoever changes what their answers depend on."""
    for answer in (
        gluon_unsupported_reason,
        supports_tma,
        has_tensor_memory,
        supports_pdl,
        shared_memory_bytes,
    ):
        answer.cache_clear()
