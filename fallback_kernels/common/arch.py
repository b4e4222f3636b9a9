"""Where kernels written for Hopper in Gluon run."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton

GLUON_VERSIONS = ("3.6.", "3.7.")  # Gluon is experimental: others may spell it differently

known_version = triton.__version__.startswith(GLUON_VERSIONS)
compiles_gluon = known_version and not triton.knobs.runtime.interpret


@lru_cache
def runs_gluon(device: torch.device) -> bool:
    """Whether kernels written for compute capability 9.0 can be compiled and run there."""
    if device.type != "cuda" or not compiles_gluon:
        return False
    return torch.cuda.get_device_capability(device)[0] == 9
