"""A line every few seconds from a thread, so that a stalled run is visible from outside."""

from __future__ import annotations

import resource
import sys
import threading
import time
from typing import Any

import torch

from nsa_flex.training.telemetry.rows import RowFile


class Heartbeat:
    """Appends what the host knows to heartbeat.jsonl; it never waits for the device.

    Args:
        file: heartbeat.jsonl.
        session: number of the run's start.
        seconds: between lines.
    """

    def __init__(self, file: RowFile, session: int, seconds: float) -> None:
        self.file, self.session, self.seconds = file, session, seconds
        self.phase, self.step = "starting", 0
        self.loss: float | None = None
        self.tokens_per_second: float | None = None
        self.backends: dict[str, str] = {}
        self._last_step = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="nsa_flex heartbeat", daemon=True)

    def start(self) -> None:
        """Write the first line and start the thread."""
        self.write()
        self._thread.start()

    def stepped(self, step: int) -> None:
        """A step ended: cheap, called every step."""
        self.phase, self.step, self._last_step = "training", step, time.monotonic()

    def stop(self, phase: str) -> None:
        """End the thread and write the last line."""
        self._stop.set()
        self._thread.join()
        self.phase = phase
        self.write()

    def write(self) -> None:
        """One line, now."""
        cuda = torch.cuda.is_initialized()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        line: dict[str, Any] = {
            "time": time.time(),
            "session": self.session,
            "phase": self.phase,
            "step": self.step,
            "step_age": time.monotonic() - self._last_step,
            "loss": self.loss,
            "tokens_per_second": self.tokens_per_second,
            "host_bytes": peak * (1 if sys.platform == "darwin" else 1024),
            "device_bytes": torch.cuda.memory_allocated() if cuda else None,
            "device_peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
            "backends": self.backends,
        }
        self.file.append(line)

    def _beat(self) -> None:
        while not self._stop.wait(self.seconds):
            try:
                self.write()
            except OSError:  # A full disk: whoever writes a checkpoint or a row will say so.
                continue
