"""Cold and warm compilation of the attention core, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

from nsa_flex.bench.cases.case import Case


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
    command = [sys.executable, "-m", "nsa_flex.bench.cases.compile_process", *arguments]
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
