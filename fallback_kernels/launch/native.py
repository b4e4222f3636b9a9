"""`packed_launch.c` as a module, compiled as Triton compiles its own launcher."""

from __future__ import annotations

import functools
import struct
import subprocess
import warnings
from pathlib import Path
from typing import Any

# What compiling C, or packing something unknown, may raise.
PROBLEMS = (
    *(AttributeError, ImportError, LookupError, OSError, OverflowError, RuntimeError, TypeError),
    *(ValueError, struct.error, subprocess.SubprocessError),
)


@functools.cache
def native() -> Any:
    """The module; None where it does not compile. It is kept in Triton's cache."""
    try:
        from triton.backends.nvidia import driver
        from triton.runtime.build import compile_module_from_src

        source = Path(__file__).with_name("packed_launch.c").read_text()
        return compile_module_from_src(source, "packed_launch", include_dirs=driver.include_dirs)
    except PROBLEMS as problem:
        warnings.warn(f"kernels are launched the slow way: {problem}", stacklevel=2)
        return None
