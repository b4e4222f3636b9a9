"""Training steps of whole models: forward, loss, backward and fused AdamW, in tokens a second.

Llamas of transformers with random weights, patched or not. Weights and optimizer are float32,
matrix products bfloat16 by autocast (float32 on a CPU). Compiled means every decoder layer by
itself (they share their code, which is generated once) and the head with its cross entropy.
"-whole" is the decoder as one graph, as `torch.compile(model)` makes it, and the head.
transformers (5.23) makes its causal mask inside that graph: before torch 2.14 it cannot leave it
out there, as it does outside, and SDPA with a mask computes the hidden scores too.
"-graph" is compiled and captured: the whole step, AdamW included, replayed as one CUDA graph.
The unpatched model's layers are called one by one for that: transformers reads a value on the
host to find out whether rows are packed, which a capture does not allow.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import nsa_flex
from nsa_flex.bench.cases.case import Case
from nsa_flex.bench.measure.timing import measure, peak_of, reset_peak
from nsa_flex.bench.measure.work import Work, work_of
from nsa_flex.config import NSAConfig

IMPLEMENTATIONS = (
    *(f"{who}{how}" for who in ("nsa", "dense") for how in ("", "-graph", "-eager")),
    "transformers-sdpa",
)
WHOLE = ("nsa-whole", "transformers-sdpa-whole")
CAPTURE_WARM_UP = 3  # steps before a capture: what is allocated or compiled lazily must be there


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a Llama; `head_dim` D, `mlp_size` of the SwiGLU, embeddings not tied."""

    hidden_size: int
    mlp_size: int
    num_layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    config: NSAConfig


MODELS = {
    "125m": ModelSize(768, 2048, 12, 12, 2, 64, 32000, NSAConfig()),
    "125m, bytes": ModelSize(768, 2048, 12, 12, 2, 64, 256, NSAConfig()),
    # Layers of Llama-3.1-8B, four of its 32, and a smaller vocabulary, so that attention shows.
    "llama-3.1-8b, 4 layers": ModelSize(4096, 14336, 4, 32, 8, 128, 32000, NSAConfig()),
    "tiny": ModelSize(32, 64, 2, 4, 2, 8, 64, NSAConfig(8, 4, 8, 4, window_size=16)),
}


@dataclass(frozen=True)
class ModelCase:
    """A training step to measure.

    Args:
        model: a name in `MODELS`.
        implementation: one of `IMPLEMENTATIONS` or `WHOLE`: nsa or dense, compiled unless it ends
            in "-eager". Dense attention is SDPA, on cuDNN where it takes the inputs, else what
            torch chooses. "transformers-sdpa" is the model as transformers gives it, compiled:
            torch chooses.
        batch, seq_len: B, S.
    """

    model: str
    implementation: str
    batch: int
    seq_len: int
    target = "model"
    train = True

    @property
    def key(self) -> str:
        """Names the case in rows."""
        return f"model/{self.implementation} {self.model} {self.batch}x{self.seq_len}"

    @property
    def patched(self) -> bool:
        """Whether its attention is NSA."""
        return self.implementation.startswith("nsa")

    @property
    def size(self) -> ModelSize:
        """The model's sizes."""
        return MODELS[self.model]

    def fields(self) -> dict[str, Any]:
        """The columns of a row that say what was measured."""
        size = self.size
        return {
            "case": self.key,
            "target": "model",
            "implementation": self.implementation,
            "model": self.model,
            "layers": size.num_layers,
            "hidden_size": size.hidden_size,
            "vocab_size": size.vocab_size,
            "dtype": "float32 weights, bfloat16 autocast",
            "batch": self.batch,
            "heads": f"{size.query_heads}/{size.kv_heads}",
            "head_dim": size.head_dim,
            "seq_len": self.seq_len,
            "blocks": self.attention_case.blocks,
            "compression": size.config.compression,
        }

    @property
    def attention_case(self) -> Case:
        """The attention core of one layer."""
        size = self.size
        return Case(
            "core",
            "nsa" if self.patched else "sdpa-cudnn",
            train=True,
            seq_len=self.seq_len,
            batch=self.batch,
            query_heads=size.query_heads,
            kv_heads=size.kv_heads,
            head_dim=size.head_dim,
            value_dim=size.head_dim,
            config=size.config,
        )


class Trainee:
    """A model with its optimizer and one batch of random tokens."""

    def __init__(self, case: ModelCase, device: torch.device, compiler: str) -> None:
        self.case, self.device = case, device
        self.model = build(case.size, case.seq_len, device, patched=case.patched)
        self.parameters = list(self.model.parameters())
        self.captured = case.implementation.endswith("-graph")
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=1e-4, fused=True, capturable=self.captured
        )
        shape = (case.batch, case.seq_len + 1)
        tokens = torch.randint(case.size.vocab_size, shape, device=device)
        self.tokens, self.targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self.head_loss = head_loss
        if not case.implementation.endswith("-eager"):
            self._compile({"fullgraph": True, "dynamic": False, "backend": compiler})

    def _compile(self, options: dict[str, Any]) -> None:
        if self.case.implementation in WHOLE:
            self.model.model = torch.compile(self.model.model, **options)
        else:
            layers: list[Any] = [
                torch.compile(layer, **options) for layer in self.model.model.layers
            ]
            self.model.model.layers = nn.ModuleList(layers)
        self.head_loss = torch.compile(head_loss, **options)

    def loss(self) -> Tensor:
        """Mean nats a token, ()."""
        with self._precision():
            return self.head_loss(self._hidden(), self.model.lm_head.weight, self.targets)

    def _hidden(self) -> Tensor:
        """(B, S, E) behind the last norm."""
        decoder = self.model.model
        if self.case.patched or not self.captured:
            return decoder(input_ids=self.tokens, use_cache=False).last_hidden_state
        hidden = decoder.embed_tokens(self.tokens)
        positions = torch.arange(self.case.seq_len, device=self.device)[None]
        turns = decoder.rotary_emb(hidden, position_ids=positions)
        for layer in decoder.layers:  # without a mask SDPA is causal
            hidden = layer(
                hidden, attention_mask=None, position_embeddings=turns, position_ids=positions
            )
        return decoder.norm(hidden)

    def step(self) -> Tensor:
        """One training step; returns the loss before it, still on the device."""
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def capture(self) -> Callable[[], Tensor]:
        """The step as one CUDA graph; what it returns is overwritten by the next."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(CAPTURE_WARM_UP):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            # Gradients start as None, so that every replay writes and none adds.
            loss = self.loss()
            loss.backward()
            self.optimizer.step()

        def replay() -> Tensor:
            graph.replay()
            return loss.detach()

        return replay

    def _precision(self) -> contextlib.AbstractContextManager:
        if self.device.type == "cuda":
            # A capture must not keep weights that were cast in another.
            cached = not self.captured
            return torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=cached)
        return contextlib.nullcontext()


def head_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of the language model's head, in float32: (B, S, E) -> ()."""
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def build(size: ModelSize, seq_len: int, device: torch.device, *, patched: bool) -> Any:
    """A Llama in training mode, patched with `size.config` if asked."""
    from transformers import LlamaForCausalLM

    with device:
        model = LlamaForCausalLM(llama_config(size, seq_len))
    model = model.train()
    return nsa_flex.patch(model, size.config) if patched else model


def llama_config(size: ModelSize, seq_len: int) -> Any:
    """Of transformers, for rows of so many tokens; no token is special."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=size.vocab_size,
        hidden_size=size.hidden_size,
        intermediate_size=size.mlp_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.query_heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=seq_len,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


@contextlib.contextmanager
def best_dense() -> Iterator[None]:
    """Inside, SDPA prefers cuDNN."""
    order = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    with sdpa_kernel(order, set_priority=True):
        yield


def training_columns(
    case: ModelCase,
    ceilings: dict[str, Any],
    device: torch.device,
    compiler: str,
    budget_ms: float,
) -> dict[str, Any]:
    """What a training step took, and whether it trains.

    Raises:
        RuntimeError: the first loss is not that of a guess among the vocabulary, or the timed
            steps on one batch did not bring it down.
    """
    dense = case.implementation.startswith("dense")
    with best_dense() if dense else contextlib.nullcontext():
        trainee = Trainee(case, device, compiler)
        start = time.perf_counter()
        first = trainee.step().item()
        first_step_s = time.perf_counter() - start
        reset_peak(device)
        step = trainee.capture() if trainee.captured else trainee.step
        times = measure(lambda mark: step(), device, budget_ms)["whole"]
        last = step().item()
    _check_losses(first, last, case.size.vocab_size)
    return {
        **times.columns(),
        "tokens_per_s": round(1e3 * case.batch * case.seq_len / times.median_ms),
        "parameters": sum(parameter.numel() for parameter in trainee.parameters),
        "peak_bytes": peak_of(device),
        **training_work(case, trainee.model).columns(ceilings, times.median_ms),
        "first_step_s": round(first_step_s, 2),
        "first_loss": round(first, 4),
        "last_loss": round(last, 4),
    }


def _check_losses(first: float, last: float, vocab_size: int) -> None:
    guess = math.log(vocab_size)
    if not abs(first - guess) < 0.1 * guess:
        raise RuntimeError(f"the first loss is {first:.3f}, that of a guess {guess:.3f}")
    if not last < first:
        raise RuntimeError(f"the loss on one batch went from {first:.3f} to {last:.3f}")


def training_work(case: ModelCase, model: nn.Module) -> Work:
    """6 FLOPs a token and weight of a matrix, attention besides; AdamW's traffic of 28 bytes.

    AdamW reads weight, gradient and two moments and writes three of them, float32.
    """
    everything = sum(parameter.numel() for parameter in model.parameters())
    matrices = everything - case.size.vocab_size * case.size.hidden_size  # the embedding is read
    attention = work_of(case.attention_case, "forward_backward")
    flops = 6.0 * matrices * case.batch * case.seq_len + case.size.num_layers * attention.flops
    return Work(flops, 28.0 * everything)
