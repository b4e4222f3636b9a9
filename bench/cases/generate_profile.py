"""What a token of `generate` is made of: kernels, operators and Python of the host."""

from __future__ import annotations

import cProfile
import io
import pstats
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from nsa_flex.bench.cases.generate_case import GenerateCase, prompts_of
from nsa_flex.bench.cases.generate_clock import WARM_UP, TokenClock
from nsa_flex.bench.cases.generate_models import FULL, TINY, forget, make_pair

SHOWN = 25


def profile(case: GenerateCase, options: Any) -> None:
    """Print both models' tables of one case, per token, over the tokens that a row times."""
    device = torch.device(options.device)
    pair = make_pair(TINY if options.tiny else FULL, case.prompt + case.num_new, device)
    for who in ("nsa", "dense"):
        print(f"== {who} {case.cache} {case.batch}x{case.prompt}: a token")
        model = pair.of(who)
        ids = prompts_of(case, pair.size.vocab_size, device)
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        tracer = torch_profile(activities=activities)
        _run(model, ids, case, tracer.start, tracer.stop)
        _print_kernels(tracer, case.steps)
        _print_operators(tracer, case.steps)
        if case.cache == "dynamic":
            python = cProfile.Profile()
            _run(model, ids, case, python.enable, python.disable)
            _print_python(python, case.steps)
        forget(model)


@torch.no_grad()
def _run(
    model: Any,
    ids: torch.Tensor,
    case: GenerateCase,
    start: Callable[[], object],
    stop: Callable[[], object],
) -> None:
    """`generate` with `start` and `stop` around the tokens that count."""
    forget(model)
    clock = TokenClock(ids.device, {1 + WARM_UP: start, case.num_new: stop})
    model.generate(ids, logits_processor=[clock], **case.options())
    times = clock.milliseconds()[-case.steps :]
    print(f"{sum(times) / len(times):.3f} ms a token while profiled")


def _print_kernels(tracer: Any, steps: int) -> None:
    on_device = [x for x in tracer.key_averages() if x.device_type == DeviceType.CUDA]
    on_device.sort(key=lambda x: -x.self_device_time_total)
    total = sum(x.self_device_time_total for x in on_device) / steps
    count = sum(x.count for x in on_device) / steps
    print(f"device: {total:.1f} us in {count:.1f} kernels; us, count, kernel")
    for x in on_device[:SHOWN]:
        print(f"{x.self_device_time_total / steps:9.2f} {x.count / steps:6.2f} {x.key[:90]}")


def _print_operators(tracer: Any, steps: int) -> None:
    on_host = [x for x in tracer.key_averages() if x.device_type == DeviceType.CPU]
    on_host.sort(key=lambda x: -x.self_cpu_time_total)
    total = sum(x.self_cpu_time_total for x in on_host) / steps
    print(f"host: {total:.1f} us in operators; us of their own, count, operator")
    for x in on_host[:SHOWN]:
        print(f"{x.self_cpu_time_total / steps:9.2f} {x.count / steps:6.2f} {x.key[:90]}")


def _print_python(python: cProfile.Profile, steps: int) -> None:
    out = io.StringIO()
    stats = pstats.Stats(python, stream=out)
    print(f"Python: over {steps} tokens, by time of their own")
    stats.sort_stats("tottime").print_stats(SHOWN)
    lines = [line for line in out.getvalue().splitlines() if line.strip()]
    print("\n".join(line[-150:] for line in lines[2:]))
