"""Every question about the device and the compiler, asked once: what runs where, and why not."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton

# Gluon is experimental: other versions of Triton may spell it differently.
GLUON_VERSIONS = ("3.6.", "3.7.")
SM90_SHARED_MEMORY = 227 << 10  # bytes that one CTA may have on compute capability 9.0

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
    if not triton.__version__.startswith(GLUON_VERSIONS):
        known = " and ".join(f"{version}x" for version in GLUON_VERSIONS)
        return f"the Gluon kernels are written for Triton {known}, got {triton.__version__}"
    if device.type != "cuda":
        return f"the Gluon kernels need CUDA tensors, got {device}"
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        return f"the Gluon kernels need compute capability 9.x, got {major}.{minor}"
    return None


@lru_cache
def supports_tma(device: torch.device) -> bool:
    """Whether `device` has tensor copies; the interpreter plays them on the CPU."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


@lru_cache
def supports_pdl(device: torch.device) -> bool:
    """Whether a kernel may start before the one before it has finished (programmatic launch)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@lru_cache
def shared_memory_bytes(device: torch.device) -> int:
    """Bytes of shared memory that one CTA may have on `device`."""
    if device.type != "cuda":
        return SM90_SHARED_MEMORY  # the interpreter has no limit; plan as on Hopper
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack the field
    return properties.shared_memory_per_block_optin
