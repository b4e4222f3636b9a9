"""How it is measured: the correctness gate, timers, the machine, the runner."""
