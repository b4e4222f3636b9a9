"""The limit on how long a row takes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from nsa_flex.bench.measure import timing as limits
from nsa_flex.bench.measure.timing import time_limit


def test_it_ends_code_and_leaves_no_alarm() -> None:
    before = signal.getsignal(signal.SIGALRM)
    begin = time.perf_counter()
    with pytest.raises(TimeoutError, match=r"not done after 0\.1 s"), time_limit(0.1):
        time.sleep(30)
    assert time.perf_counter() - begin < 20
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    assert signal.getsignal(signal.SIGALRM) is before


def test_it_comes_again_where_code_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "AGAIN", 2.0)
    swallowed = 0

    def stubborn() -> None:
        nonlocal swallowed
        try:
            time.sleep(30)
        except Exception:
            swallowed += 1
        time.sleep(30)

    with pytest.raises(TimeoutError), time_limit(0.1):
        stubborn()
    assert swallowed == 1


def test_the_process_ends_where_no_signal_gets_in() -> None:
    """Every stack is printed."""
    code = """if True:
        import signal, time
        from nsa_flex.bench.measure import timing as limits
        limits.GRACE = 0.2
        with limits.time_limit(0.1):
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
            time.sleep(400)
    """
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300
    )
    assert done.returncode != 0
    assert "Timeout" in done.stderr
    assert "most recent call first" in done.stderr
