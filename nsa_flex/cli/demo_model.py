"""The demo's text, and its small Llama with a patched copy: built, compiled, trained, sampled."""

from __future__ import annotations

import contextlib
import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nsa_flex
from nsa_flex.cli.generate_model import be_quiet
from nsa_flex.config import NSAConfig
from nsa_flex.hot_path import ForwardBackward, Report, check, count_graphs
from nsa_flex.training.config import DataSection
from nsa_flex.training.files import find_files
from nsa_flex.training.packing import PackedRows
from nsa_flex.training.tokenization import BYTES

# When held-out losses are measured; more often while they fall fast.
CHECKPOINTS = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0)


_SMALL = NSAConfig(16, 8, 16, 4, window_size=32)


@dataclass(frozen=True)
class Size:
    """Everything about the demo that depends on the machine; by default for a CPU.

    Args:
        hidden_size, num_layers, num_query_heads, num_kv_heads, head_dim: of the Llama.
        config: NSA's sizes. The smallest blocks with which 512 bytes are a long text: NSA reads
            under a third of the keys.
        seq_len: S, bytes of one training row.
        batch_size, steps: rows of one training step, and how many of them.
        learning_rate: peak, after warm-up.
        held_out_rows: rows of S held-out bytes on which the loss is measured.
        new_bytes: how many bytes to generate.
        compiler: backend of torch.compile.
        dtype: of matrix products (autocast); parameters and optimizer are float32.
    """

    hidden_size: int = 128
    num_layers: int = 2
    num_query_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 16
    config: NSAConfig = _SMALL
    seq_len: int = 512
    batch_size: int = 2
    steps: int = 360
    learning_rate: float = 4e-3
    held_out_rows: int = 24
    new_bytes: int = 200
    compiler: str = "inductor"
    dtype: torch.dtype = torch.float32


CPU = Size()
# The paper's blocks.
GPU = Size(
    hidden_size=1024,
    num_layers=6,
    num_query_heads=16,
    num_kv_heads=4,
    head_dim=64,
    config=NSAConfig(),
    seq_len=4096,
    batch_size=4,
    steps=400,
    learning_rate=1e-3,
    held_out_rows=32,
    new_bytes=400,
    dtype=torch.bfloat16,
)
# For tests: seconds. Traced and differentiated ahead of time like the others, but the graphs
# are run operator by operator, since generating code takes most of the demo's time.
QUICK = Size(
    hidden_size=32,
    num_layers=1,
    head_dim=8,
    config=NSAConfig(8, 4, 8, 4, window_size=16),
    seq_len=128,
    steps=30,
    learning_rate=1e-2,
    held_out_rows=4,
    new_bytes=8,
    compiler="aot_eager",
)


def build_models(size: Size, seed: int, device: torch.device) -> tuple[Any, Any]:
    """A patched Llama and its unpatched twin: the same random weights where both have any."""
    be_quiet()
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=size.hidden_size,
        intermediate_size=3 * size.hidden_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_query_heads,
        num_key_value_heads=size.num_kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=2 * size.seq_len,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    twin = LlamaForCausalLM(config).to(device).train()
    return nsa_flex.patch(copy.deepcopy(twin), size.config), twin


class Text(NamedTuple):
    """Bytes of Python's standard library, split by file: no file is in both halves.

    batches: int64 (steps, B, S).
    held_out: int64 (rows, S).
    facts: numbers of files and bytes of both.
    """

    batches: Tensor
    held_out: Tensor
    facts: dict[str, int]


def read_text(size: Size, seed: int) -> Text:
    """Rows packed as `nsa-flex train` packs them: random ones to train on, even ones held out.

    Raises:
        ValueError: this Python ships without its sources, or S is longer than either half.
    """
    files, length = find_files(["stdlib"]), size.seq_len
    section = DataSection(("stdlib",), held_out_share=0.1, seq_len=length, documents="joined")
    counts = {"training": size.steps * size.batch_size, "held_out": size.held_out_rows}
    facts: dict[str, int] = {}
    rows: list[Tensor] = []
    generator = torch.Generator().manual_seed(seed)
    for name, count in counts.items():
        is_held_out = name == "held_out"
        half = PackedRows(files, BYTES, section, seed=seed, held_out=is_held_out, epochs=1)
        sizes = [file.stat().st_size for file in files if half.takes(file, 0)]
        if sum(sizes) < length:
            raise ValueError(f"seq_len={length} is longer than the text, {sum(sizes)} bytes")
        facts |= {f"{name}_files": len(sizes), f"{name}_bytes": sum(sizes)}
        every = torch.from_numpy(np.stack([row.ids for row in half if row.real == length]))
        spread = torch.linspace(0, len(every) - 1, count).long()
        drawn = torch.randint(len(every), (count,), generator=generator)
        rows.append(every[spread if is_held_out else drawn])
    batches = rows[0].unflatten(0, (size.steps, size.batch_size))
    return Text(batches, rows[1], {**facts, "held_out_bytes_measured": rows[1].numel()})


def frequency_loss(training: Tensor, windows: Tensor) -> float:
    """Nats a byte of `windows` under the byte frequencies of `training`: knowing no context.

    Args:
        training: uint8 (bytes,).
        windows: int64 (count, length); the first byte of each is given, as it is to a model.
    """
    counts = torch.bincount(training.int(), minlength=256).double() + 1  # No byte is impossible.
    log_frequency = (counts / counts.sum()).log()
    return -log_frequency[windows[:, 1:]].mean().item()


def as_text(tokens: Tensor) -> str:
    """Bytes as text: UTF-8, with what is no text replaced."""
    return bytes(tokens.tolist()).decode(errors="replace").replace("\0", "\n")


class KeysRead(NamedTuple):
    """Keys that one query attends in each branch, in a document of S tokens.

    compressed, selected, sliding: keys that the last query reads.
    fraction_last: of the S keys that the last query would read in dense attention, the share that
        NSA reads, counted once in each branch.
    fraction_mean: likewise, over all S queries together.
    """

    compressed: int
    selected: int
    sliding: int
    fraction_last: float
    fraction_mean: float


def keys_read(config: NSAConfig, seq_len: int) -> KeysRead:
    """How sparse NSA is; follows from sizes alone, whatever is selected.

    >>> keys_read(NSAConfig(), 65536)
    KeysRead(compressed=4095, selected=1024, sliding=512, fraction_last=0.0859..., ...)
    """
    rows, size = [], config.select_block_size
    for position in range(seq_len):
        own, place = divmod(position, size)
        selected = min(config.num_selected_blocks - 1, own) * size + place + 1
        sliding = min(config.window_size, position + 1)
        rows.append((config.num_compressed_blocks(position + 1), selected, sliding))
    dense = seq_len * (seq_len + 1) // 2
    return KeysRead(*rows[-1], sum(rows[-1]) / seq_len, sum(map(sum, rows)) / dense)


class Trainee:
    """A Llama with its optimizer; once `compile` has run its decoder layers run compiled.

    Each layer is compiled by itself: they share one piece of code, which then is generated once
    for all of them.
    """

    def __init__(self, name: str, model: Any, size: Size) -> None:
        self.name, self.model, self.size = name, model, size
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=size.learning_rate, betas=(0.9, 0.95), weight_decay=0.01
        )
        warm_up = max(1, round(0.1 * size.steps))  # then linear down to a tenth
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min((step + 1) / warm_up, 1.0 - 0.9 * step / size.steps)
        )
        self.losses: list[Tensor] = []
        self.held_out: dict[int, float] = {}

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean nats a byte of each byte given those before it: tokens int64 (B, S) -> ()."""
        with self._autocast():
            logits = self.model(input_ids=tokens, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())

    def compile(self, tokens: Tensor) -> float:
        """Compile forward and backward for the shape of `tokens`; returns seconds."""
        for layer in self.model.model.layers:
            layer.compile(fullgraph=True, dynamic=False, backend=self.size.compiler)
        return self._seconds(tokens)

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

    def seconds(self, tokens: Tensor) -> float:
        """Median time of five times forward and backward, after one that warms up."""
        return statistics.median([self._seconds(tokens) for _ in range(6)][1:])

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
        with self._autocast(), eager():
            tokens = self.model.generate(
                prompt[None],
                attention_mask=torch.ones_like(prompt)[None],
                max_new_tokens=self.size.new_bytes,
                do_sample=True,
                temperature=0.8,
                top_k=40,
            )
        written = tokens[0, len(prompt) :].cpu()
        self.model.train()
        return written, time.perf_counter() - start

    def _autocast(self) -> contextlib.AbstractContextManager:
        half = self.size.dtype != torch.float32
        return torch.autocast("cuda", self.size.dtype) if half else contextlib.nullcontext()

    def _seconds(self, tokens: Tensor) -> float:
        start = time.perf_counter()
        self.loss(tokens).backward()
        self.optimizer.zero_grad()
        if tokens.is_cuda:
            torch.cuda.synchronize(tokens.device)
        return time.perf_counter() - start


def eager() -> Any:
    """Within, compiled layers run as they were."""
    return torch.compiler.set_stance("force_eager")


def train(
    trainees: list[Trainee],
    batches: Tensor,
    held_out: Tensor,
    tell: Callable[[list[Trainee]], None],
) -> None:
    """Train all on the same batches, one step each in turn, with their compiled layers.

    Held-out losses are measured at `CHECKPOINTS`. A compilation on the way raises RuntimeError:
    every shape was compiled before.

    Args:
        batches: int64 (steps, B, S).
        held_out: int64 (rows, S).
        tell: called after each step.
    """
    steps = len(batches)
    checkpoints = {round(share * steps) for share in CHECKPOINTS}
    with torch.compiler.set_stance("fail_on_recompile"):
        for step in range(steps + 1):
            if step in checkpoints:
                for trainee in trainees:
                    trainee.held_out[step] = trainee.held_out_loss(held_out)
            if step < steps:
                for trainee in trainees:
                    trainee.step(batches[step])
                tell(trainees)
