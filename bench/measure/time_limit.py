"""A limit on how long a row takes, which ends it wherever it is."""

from __future__ import annotations

import faulthandler
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Seconds until the signal comes again, and until the process ends: no signal gets into a C call.
AGAIN, GRACE = 5.0, 30.0


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """TimeoutError in the code inside once it has run so long, compilation or not.

    It comes again where that code goes on in spite of it. If nothing helps, every stack is printed
    and the process exits: what was measured is on disk. Call it in the main thread.

    >>> with time_limit(60):
    ...     pass
    """

    def stop(*_: Any) -> None:
        raise TimeoutError(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    faulthandler.dump_traceback_later(seconds + GRACE, exit=True, file=2)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)
