"""What ran a benchmark: device, versions, sources, clock, and the rates it reaches."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import nsa_flex
from nsa_flex.bench.measure.timing import Call, measure

PACKAGE = Path(nsa_flex.__file__).parent


def describe(device: torch.device) -> dict[str, Any]:
    """Columns that every row of a run shares. A resumed run must agree on `IDENTITY`."""
    return {
        "device": device_name(device),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "nsa_flex": nsa_flex.__version__,
        "commit": commit(),
        "sources": fingerprint(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


# What makes two rows of one case comparable without a second thought.
IDENTITY = ("device", "torch", "triton", "sources")


def device_name(device: torch.device) -> str:
    """As the driver calls it; the processor's name on a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def fingerprint() -> str:
    """Hash of the package's Python files but its command line, in a wheel or a checkout."""
    digest = hashlib.sha256()
    for parent, folders, files in os.walk(PACKAGE, followlinks=True):
        folders[:] = sorted(set(folders) - {"cli", "results", "__pycache__"})
        for name in sorted(files):
            if name.endswith(".py"):
                digest.update(Path(parent, name).relative_to(PACKAGE).as_posix().encode())
                digest.update(Path(parent, name).read_bytes())
    return digest.hexdigest()[:12]


@functools.cache
def commit() -> str | None:
    """The checkout's commit, "-dirty" behind it if files differ; else NSA_FLEX_COMMIT, or None."""
    found = _answer("git", "-C", str(PACKAGE), "describe", "--always", "--dirty", "--abbrev=10")
    return found or os.environ.get("NSA_FLEX_COMMIT") or None


def _answer(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def ceilings(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Rates of a large matrix product and of a large copy, and the clock while it multiplied."""
    size = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(a)
    multiply = functools.partial(torch.mm, a, b, out=product)
    multiply()
    times = measure(lambda mark: multiply(), device, 150)["whole"]
    clocks = _clocks_under_load(device, multiply) if device.type == "cuda" else {}
    numbers = 2**30 if device.type == "cuda" else 2**24
    source = torch.zeros(numbers, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    copied = measure(lambda mark: target.copy_(source), device, 100)["whole"]
    return {
        "matrix_tflops": _rounded(2 * size**3 / times.p20_ms / 1e9),
        "memory_gb_per_s": _rounded(2 * source.nbytes / copied.p20_ms / 1e6),
        **clocks,
    }


def _rounded(rate: float) -> float:
    """To four digits, however slow the device: never to 0."""
    return float(f"{rate:.4g}")


def _clocks_under_load(device: torch.device, multiply: Call) -> dict[str, Any]:
    """MHz of processors and memory and the limit of power, while work is queued."""
    for _ in range(400):
        multiply()
    found = _answer(
        "nvidia-smi",
        f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}",
        "--query-gpu=clocks.sm,clocks.mem,power.limit",
        "--format=csv,noheader,nounits",
    )
    torch.cuda.synchronize(device)
    values = [value.strip() for value in found.split(",")]
    names = ("sm_clock_mhz", "memory_clock_mhz", "power_limit_w")
    return dict(zip(names, values, strict=False)) if len(values) == len(names) else {}
