"""Process groups on gloo with one thread each.

Its threads, two by default, write the name of the last collective without a lock, each after the
caller was told that its collective is done. In torch 2.13 collectives that follow one another at
once, as those of one rank do, may crash the process.
"""

from __future__ import annotations

import datetime
from typing import Any

from torch.distributed.distributed_c10d import ProcessGroupGloo

_init = ProcessGroupGloo.__init__


def install() -> None:
    """From now on; a forked process has it too."""
    ProcessGroupGloo.__init__ = _init_with_one_thread


def _init_with_one_thread(
    self: ProcessGroupGloo, store: Any, rank: int, size: int, timeout: datetime.timedelta
) -> None:
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_default_device()]
    options._threads, options._timeout = 1, timeout
    _init(self, store, rank, size, options)
