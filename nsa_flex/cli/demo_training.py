"""Training, measuring and sampling of one model of the demo, compiled or not."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsa_flex.cli.demo_model import Size
from nsa_flex.hot_path import ForwardBackward, Report, check, count_graphs

WARM_UP_SHARE = 0.1
# When held-out losses are measured; more often while they fall fast.
CHECKPOINTS = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0)


class Trainee:
    """A Llama with its optimizer and, once `compile` has run, its compiled decoder layers.

    Each layer is compiled by itself: they share one piece of code, which then is generated once
    for all of them. Outside `compiled_layers` the model runs eagerly.
    """

    def __init__(self, name: str, model: Any, size: Size) -> None:
        self.name = name
        self.model = model
        self.device = model.device
        self.size = size
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=size.learning_rate, betas=(0.9, 0.95), weight_decay=0.01
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: _ramp(step, size.steps)
        )
        self.losses: list[Tensor] = []
        self.held_out: dict[int, float] = {}
        self._compiled: nn.ModuleList | None = None

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean nats a byte of each byte given those before it: tokens int64 (B, S) -> ()."""
        with self.autocast():
            logits = self.model(input_ids=tokens, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())

    def autocast(self) -> contextlib.AbstractContextManager:
        """Half precision where the size asks for it."""
        if self.size.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast("cuda", dtype=self.size.dtype)

    def compile(self, tokens: Tensor) -> float:
        """Compile forward and backward for the shape of `tokens`; returns seconds."""
        compiled: list[Any] = [
            torch.compile(layer, fullgraph=True, dynamic=False, backend=self.size.compiler)
            for layer in self.model.model.layers
        ]
        self._compiled = nn.ModuleList(compiled)
        start = time.perf_counter()
        with self.compiled_layers():
            self._forward_backward(tokens)
        self._synchronize()
        return time.perf_counter() - start

    @contextlib.contextmanager
    def compiled_layers(self) -> Iterator[None]:
        """Inside, the model runs its compiled layers instead of its own."""
        eager = self.model.model.layers
        self.model.model.layers = self._compiled
        try:
            yield
        finally:
            self.model.model.layers = eager

    def step(self, tokens: Tensor) -> None:
        """One training step."""
        loss = self.loss(tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())

    def held_out_loss(self, rows: Tensor) -> float:
        """Mean loss of int64 (rows, S), in batches of the training shape.

        Gradients stay on though none is taken: without, the layers would be compiled once more.
        """
        batches = rows.split(self.size.batch_size)
        return torch.stack([self.loss(batch).detach() for batch in batches]).mean().item()

    def seconds(self, tokens: Tensor, repeats: int) -> float:
        """Median time of a forward and backward."""
        times = []
        for _ in range(repeats + 1):  # The first one warms up.
            start = time.perf_counter()
            self._forward_backward(tokens)
            self._synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])

    def audit(self, tokens: Tensor) -> Report:
        """All detectors on an eager forward and backward, and the graphs that four lengths need.

        torch.compile makes one graph for the first length that it meets and one for all others;
        recompilations beyond that second graph are findings. Graphs that break are not counted.
        """
        findings = check(ForwardBackward(self.loss), tokens).findings
        self.optimizer.zero_grad()
        if any(finding.kind == "graph-break" for finding in findings):
            return Report(findings)
        lengths = [tokens.shape[1] - shorter for shorter in (0, 1, 31, 32)]
        sweep = count_graphs(self.loss, [(tokens[:, :n].contiguous(),) for n in lengths])
        if (sweep.graphs or 0) > 2:
            findings += sweep.findings
        return Report(findings, sweep.graphs)

    def generate(self, prompt: Tensor, seed: int) -> tuple[Tensor, float]:
        """Sampled continuation of int64 (S,), and seconds; runs eagerly with a cache."""
        torch.manual_seed(seed)
        self.model.eval()
        start = time.perf_counter()
        with self.autocast():
            tokens = self.model.generate(
                prompt[None],
                attention_mask=torch.ones_like(prompt)[None],
                max_new_tokens=self.size.new_bytes,
                do_sample=True,
                temperature=0.8,
                top_k=40,
            )
        self._synchronize()
        self.model.train()
        return tokens[0, len(prompt) :], time.perf_counter() - start

    def _forward_backward(self, tokens: Tensor) -> None:
        self.loss(tokens).backward()
        self.optimizer.zero_grad()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _ramp(step: int, steps: int) -> float:
    """Factor of the learning rate: linear up, then linear down to a tenth."""
    warm_up = max(1, round(WARM_UP_SHARE * steps))
    return min((step + 1) / warm_up, 1.0 - 0.9 * step / steps)


def train(
    trainees: list[Trainee],
    batches: Tensor,
    held_out: Tensor,
    tell: Callable[[list[Trainee]], None],
) -> None:
    """Train all on the same batches, one step each in turn, with compiled layers.

    Held-out losses are measured at `CHECKPOINTS`. A compilation on the way raises RuntimeError:
    every shape was compiled before.

    Args:
        batches: int64 (steps, B, S).
        held_out: int64 (rows, S).
        tell: called after each step.
    """
    steps = len(batches)
    checkpoints = {round(share * steps) for share in CHECKPOINTS}
    with contextlib.ExitStack() as stack:
        for trainee in trainees:
            stack.enter_context(trainee.compiled_layers())
        stack.enter_context(torch.compiler.set_stance("fail_on_recompile"))
        for step in range(steps + 1):
            if step in checkpoints:
                for trainee in trainees:
                    trainee.held_out[step] = trainee.held_out_loss(held_out)
            if step < steps:
                for trainee in trainees:
                    trainee.step(batches[step])
                tell(trainees)
