"""`nsa-flex info`: what this machine offers, as far as nsa_flex cares."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import nsa_flex
from nsa_flex.cli.outputs import print_json
from nsa_flex.installed import HAS_FLASH_ATTN, version_of

PACKAGES = ("torch", "numpy", "triton", "flash-attn", "transformers", "torchao")


def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Show versions, devices and the C++ compiler: what a bug report should hold.

    Example: `nsa-flex info`

    Example: `nsa-flex info --json > environment.json`
    """
    facts = collect()
    if as_json:
        print_json(facts)
    else:
        Console().print(_table(facts))


def collect() -> dict[str, Any]:
    """Plain JSON types. A package that is not installed, or no compiler found, is None."""
    return {
        "nsa_flex": nsa_flex.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version_of(name) for name in PACKAGES} | {"torch": torch.__version__},
        "fa2": "flash-attn" if HAS_FLASH_ATTN else "torch",
        "cpu": {
            "threads": torch.get_num_threads(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "cxx_compiler": cxx_compiler(),
        },
        "cuda": {
            "build": torch.version.cuda,
            "devices": [_cuda_device(index) for index in range(torch.cuda.device_count())],
        },
    }


def cxx_compiler() -> str | None:
    """Path of the compiler that torch.compile would call on the CPU."""
    default = "clang++" if sys.platform == "darwin" else "g++"
    return shutil.which(os.environ.get("CXX", default))


def _cuda_device(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
    }


def _table(facts: dict[str, Any]) -> Table:
    table = Table("nsa-flex", facts["nsa_flex"])
    table.add_row("python", f"{facts['python']} on {facts['platform']}")
    for name, version in facts["packages"].items():
        table.add_row(name, version or "not installed")
    table.add_row("fa2 runs on", facts["fa2"])
    cpu = facts["cpu"]
    table.add_row("cpu", f"{cpu['capability']}, {cpu['threads']} threads")
    table.add_row("C++ compiler", cpu["cxx_compiler"] or "none: torch.compile will fail on CPU")
    for device in facts["cuda"]["devices"]:
        table.add_row(
            "cuda",
            f"{device['name']}, sm {device['capability']}, {device['memory_gib']} GiB",
        )
    if not facts["cuda"]["devices"]:
        table.add_row("cuda", "no device")
    return table
