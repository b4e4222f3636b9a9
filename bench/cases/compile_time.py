"""Cold and warm compilation of the attention core, each in a process of its own.

    python -m nsa_flex.bench.cases.compile_time 64 4 8192 train

is that process: it prints the seconds; caches are where the environment says.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch

from nsa_flex.bench.cases.case import Case
from nsa_flex.bench.cases.core import Core


@dataclass(frozen=True)
class CompileCase:
    """The first call of the compiled core, in a new process."""

    query_heads: int
    kv_heads: int
    seq_len: int
    train: bool
    target = "compile"

    @property
    def key(self) -> str:
        """Names the case in rows."""
        heads = f"{self.query_heads}/{self.kv_heads}"
        return f"compile/nsa {'train' if self.train else 'forward'} {heads} S{self.seq_len}"

    def fields(self) -> dict[str, Any]:
        """The columns of a row that say what was measured."""
        case = self.core()
        return {**case.fields(), "case": self.key, "target": "compile"}

    def core(self) -> Case:
        """What is compiled."""
        return Case(
            "core",
            "nsa",
            self.train,
            self.seq_len,
            query_heads=self.query_heads,
            kv_heads=self.kv_heads,
        )


def compile_times(case: CompileCase) -> dict[str, float]:
    """Seconds of the first call with empty caches ("cold") and with those just filled ("warm")."""
    arguments = [str(case.query_heads), str(case.kv_heads), str(case.seq_len)]
    arguments.append("train" if case.train else "forward")
    command = [sys.executable, "-m", "nsa_flex.bench.cases.compile_time", *arguments]
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
        for name in ("cold", "warm"):
            done = subprocess.run(
                command, env={**os.environ, **caches}, capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise RuntimeError(f"compiling in a process failed: {done.stderr[-300:]}")
            found[name] = json.loads(done.stdout.splitlines()[-1])["seconds"]
    return found


def first_call(case: Case, device: torch.device, compiler: str) -> float:
    """Seconds of the first call of a compiled core, and of its backward if it trains."""
    target = Core()
    task = target.prepare(case, device)  # uses the device, whose start is not what is measured
    function = target.function(case, task, compiler)
    arguments = list(task.arguments.values())
    _wait(device)
    start = time.perf_counter()
    with torch.set_grad_enabled(case.train):
        out = function(*arguments)
        if case.train:
            torch.autograd.grad(out, arguments, torch.ones_like(out))
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """The process that `compile_times` starts."""
    query_heads, kv_heads, seq_len = (int(argument) for argument in sys.argv[1:4])
    case = CompileCase(query_heads, kv_heads, seq_len, sys.argv[4] == "train")
    seconds = first_call(case.core(), torch.device("cuda"), "inductor")
    print(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main()
