"""Times the first call of the compiled attention core, in this process.

    python -m nsa_flex.bench.cases.compile_process 64 4 8192 train

prints the seconds, kernels built; caches are where the environment says.
"""

from __future__ import annotations

import json
import sys
import time

import torch

from nsa_flex.bench.cases.case import Case
from nsa_flex.bench.cases.compile_time import CompileCase
from nsa_flex.bench.cases.registry import TARGETS


def first_call(case: Case, device: torch.device, compiler: str) -> float:
    """Seconds of the first call of a compiled core, and of its backward if it trains."""
    target = TARGETS[case.target]
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
    """The process that `compile_time.compile_times` starts."""
    query_heads, kv_heads, seq_len = (int(argument) for argument in sys.argv[1:4])
    case = CompileCase(query_heads, kv_heads, seq_len, sys.argv[4] == "train")
    seconds = first_call(case.core(), torch.device("cuda"), "inductor")
    print(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main()
