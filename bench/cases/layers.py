"""A Llama layer, patched, on documents: as rows of a batch, or packed into one row.

One decoder layer (attention, MLP, norms and residuals) of `head_dim` · Hq features and an MLP 3.5
times as wide, as in Llama 3, with random weights. With it goes what a decoder does once a call,
whatever its depth: the layout of the documents and the angles of the rotary embedding. That is
compiled as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch import Tensor, nn

import nsa_flex
from nsa_flex.bench.cases.case import Case
from nsa_flex.bench.cases.models import ModelSize, llama_config
from nsa_flex.bench.measure.gate import GateError
from nsa_flex.bench.measure.timing import Mark, measure, peak_of, reset_peak
from nsa_flex.config import NSAConfig

ROWS = "nsa"
PACKED = ("nsa-position-ids", "nsa-cu-seqlens")
IMPLEMENTATIONS = (ROWS, *PACKED)

# Norm of the difference over the norm of what the layer adds to its input. Two bfloat16 runs
# select other blocks where scores are nearly equal; mixed documents differ several times as much.
# Compiled code is checked where it rounds as eager code does: left to itself it rounds elsewhere,
# which alone is 0.05 at 64/4 heads with random weights, and 0.00005 where it does not.
ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 5e-2}

Layer = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LayerCase:
    """Forward and backward of one layer.

    Args:
        implementation: "nsa", documents as rows of a batch; "nsa-position-ids" and
            "nsa-cu-seqlens", packed, and told by the one or the other.
        batch, seq_len: number of the documents, and tokens of each.
    """

    implementation: str
    batch: int
    seq_len: int
    query_heads: int
    kv_heads: int
    head_dim: int = 128
    config: NSAConfig = field(default_factory=NSAConfig)
    target = "layer"
    train = True

    @property
    def key(self) -> str:
        """Names the case in rows."""
        heads = f"{self.query_heads}/{self.kv_heads}"
        return f"layer/{self.implementation} {self.batch}x{self.seq_len} {heads} D{self.head_dim}"

    @property
    def hidden_size(self) -> int:
        """E."""
        return self.query_heads * self.head_dim

    def fields(self) -> dict[str, Any]:
        """The columns of a row that say what was measured."""
        attention = Case(
            *("core", self.implementation, self.train, self.seq_len, self.batch),
            *(self.query_heads, self.kv_heads, self.head_dim, self.head_dim),
            config=self.config,
        )
        own = {"case": self.key, "target": self.target, "hidden_size": self.hidden_size}
        return {**attention.fields(), **own}


def layer_columns(
    case: LayerCase, device: torch.device, compiler: str, budget_ms: float
) -> dict[str, dict[str, Any]]:
    """Columns of forward + backward, and of the backward.

    Raises:
        GateError: it does not give what the rows of a batch give, each by itself.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    decoder = _decoder(case, device, dtype)
    shape = (case.batch, case.seq_len, case.hidden_size)
    x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    grad = torch.randn_like(x)

    def compiled() -> Layer:
        torch.compiler.reset()
        options: dict[str, Any] = {"fullgraph": True, "dynamic": False, "backend": compiler}
        return _layer(case, torch.compile(decoder, **options))

    with inductor_config.patch(emulate_precision_casts=True):
        check_layer(compiled(), _rows(decoder), x, grad)
    layer = compiled()
    _added(layer, x, grad)  # which compiles it
    leaves = [x, *decoder.parameters()]
    leaves = [each for each in leaves if each.requires_grad]
    reset_peak(device)

    def step(mark: Mark) -> None:
        out = layer(x)
        mark()
        torch.autograd.grad(out, leaves, grad, allow_unused=True)

    times = measure(step, device, budget_ms, hide_host=True)
    shared = {"peak_bytes": peak_of(device), "compiler": compiler}
    named = {"forward_backward": times["whole"], "backward": times["second"]}
    return {which: each.columns() | shared for which, each in named.items()}


def check_layer(layer: Layer, expected: Layer, x: Tensor, grad: Tensor) -> None:
    """What a layer adds to its input, and its gradient, are those of `expected`.

    Raises:
        GateError: they differ by more than `ALLOWED`.
    """
    ours, theirs = _added(layer, x, grad), _added(expected, x, grad)
    for name, found, wanted in zip(("output", "gradient"), ours, theirs, strict=True):
        error = float((found - wanted).norm() / wanted.norm())
        if not error <= ALLOWED[x.dtype]:
            raise GateError(f"the {name} of the layer is off by {error:.2g} of its norm")


def _added(layer: Layer, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    out = layer(x)
    (x_grad,) = torch.autograd.grad(out, x, grad)
    return (out - x).detach().float(), (x_grad - grad).float()


def _decoder(case: LayerCase, device: torch.device, dtype: torch.dtype) -> Any:
    from transformers import LlamaModel

    sizes = (case.hidden_size, 7 * case.hidden_size // 2, 1, case.query_heads, case.kv_heads)
    config = llama_config(
        ModelSize(*sizes, case.head_dim, 1, case.config), case.batch * case.seq_len
    )
    with device:
        decoder: Any = LlamaModel(config).to(dtype).train()
    decoder.norm = nn.Identity()  # the output is the layer's
    return nsa_flex.patch(decoder, case.config)


def _rows(decoder: Any) -> Layer:
    return lambda x: decoder(inputs_embeds=x, use_cache=False).last_hidden_state


def _layer(case: LayerCase, decoder: Any) -> Layer:
    """(B, S, E) to (B, S, E), the documents packed on the way if the case says so."""
    if case.implementation == ROWS:
        return _rows(decoder)

    def packed(x: Tensor) -> Tensor:
        out = decoder(
            inputs_embeds=x.flatten(0, 1)[None],
            use_cache=False,
            **documents(case, x.device),
        )
        return out.last_hidden_state[0].view_as(x)

    return packed


def documents(case: LayerCase, device: torch.device) -> dict[str, Any]:
    """What tells a decoder of the documents."""
    num_tokens = case.batch * case.seq_len
    if case.implementation == "nsa-position-ids":
        return {"position_ids": (torch.arange(num_tokens, device=device) % case.seq_len)[None]}
    steps = torch.arange(case.batch + 1, device=device, dtype=torch.int32)
    bounds = steps * case.seq_len
    longest = case.seq_len
    return {
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }
