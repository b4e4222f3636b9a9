"""A script: runs a config in children that it kills with SIGKILL, until one finishes.

python -m training.kill_and_resume CONFIG KILLS SEED

Every other child dies while a checkpoint is being written, the rest after a random while. The
children are forks of this process, which has imported all that they need and computed nothing.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from nsa_flex.training.config import TrainConfig, read_config
from nsa_flex.training.run import train

LONGEST = 60.0  # seconds that a child may take to get somewhere


def main() -> None:
    config = read_config(sys.argv[1])
    kills, draw = int(sys.argv[2]), random.Random(int(sys.argv[3]))
    where: list[str] = []
    for number in range(kills + 1):
        child = os.fork()
        if child == 0:
            run(config, resume=number > 0)
        if number < kills:
            where.append(wait_to_kill(config, number, draw))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    print("killed", *where, "last status", status)
    sys.exit(os.waitstatus_to_exitcode(status))


def run(config: TrainConfig, *, resume: bool) -> None:
    torch.set_num_threads(1)
    code = 1
    try:
        train(config, resume=resume)
        code = 0
    finally:
        os._exit(code)


def wait_to_kill(config: TrainConfig, number: int, draw: random.Random) -> str:
    """Until the child is in the middle of something; says of what."""
    out = Path(config.out)
    rows, beats = size(out / "training.csv"), size(out / "heartbeat.jsonl")
    begun = time.monotonic()
    while time.monotonic() - begun < LONGEST:
        time.sleep(0.0005)
        if size(out / "heartbeat.jsonl") == beats:  # what an earlier child left is still there
            continue
        if number % 2 == 0 and (out / ".writing").exists():
            return "writing"
        if number % 2 == 1 and size(out / "training.csv") > rows:
            time.sleep(draw.random() * 0.2)
            return "stepping"
    return "too late"


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


if __name__ == "__main__":
    main()
