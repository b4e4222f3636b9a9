"""The models that `generate` and the serving engine are timed with: one patched, one as it was."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import nsa_flex
from nsa_flex.bench.cases.models import MODELS, ModelSize, build

FULL, TINY = "llama-3.1-8b, 4 layers", "tiny"
# Kinds of weights, and torchao's config of each.
QUANTIZED = {
    "int8wo": "Int8WeightOnlyConfig",
    "int8dyn": "Int8DynamicActivationInt8WeightConfig",
    "float8wo": "Float8WeightOnlyConfig",
    "float8dyn": "Float8DynamicActivationFloat8WeightConfig",
}
WEIGHTS_ALONE = ("int8wo", "float8wo")
NO_CUDNN = "sdpa-no-cudnn"
WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
INT_MM_ROWS = 16  # torch._int_mm on CUDA wants more: "self.size(0) needs to be greater than 16"


@dataclass(frozen=True)
class Pair:
    """Two models with the same weights.

    Attributes:
        name: in `MODELS`.
        dense: of transformers, with the attention that its config names.
        nsa: its copy, patched with the defaults; the weights they share are the same tensors.
        exact: the pair before its weights were quantized, if they are.
    """

    name: str
    dense: Any
    nsa: Any
    exact: Pair | None = None

    @property
    def size(self) -> ModelSize:
        """The models' sizes."""
        return MODELS[self.name]

    def fields(self, who: str) -> dict[str, Any]:
        """The columns of a row that say which model it is; `who` is "nsa" or "dense"."""
        size, model = self.size, self.of(who)
        config = size.config
        return {
            "implementation": who,
            "attention": model.config._attn_implementation,
            "model": self.name,
            "layers": size.num_layers,
            "hidden_size": size.hidden_size,
            "vocab_size": size.vocab_size,
            "dtype": str(model.dtype).removeprefix("torch."),
            "heads": f"{size.query_heads}/{size.kv_heads}",
            "head_dim": size.head_dim,
            "value_dim": size.head_dim,
            "compression": config.compression if who == "nsa" else None,
        }

    def of(self, who: str) -> Any:
        """The model called "nsa" or "dense"."""
        return self.nsa if who == "nsa" else self.dense


def make_pair(
    name: str, max_length: int, device: torch.device, dtype: torch.dtype | None = None
) -> Pair:
    """Random weights of a fixed seed for so many positions; bfloat16, float32 on a CPU."""
    torch.manual_seed(0)
    if dtype is None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    dense = build(MODELS[name], max_length, device, patched=False).eval().to(dtype)
    dense.requires_grad_(False)
    nsa = nsa_flex.patch(_twin(dense), MODELS[name].config).requires_grad_(False)
    return Pair(name, dense, nsa)


def quantized(pair: Pair, kind: str) -> Pair:
    """The pair with its linear maps quantized by torchao, but for the gates.

    Raises:
        ValueError: `kind` is not in `QUANTIZED`.
    """
    if kind not in QUANTIZED:
        raise ValueError(f"quantize={kind!r}: expected one of {', '.join(QUANTIZED)}")
    import torchao.quantization as torchao

    dense, nsa = _twin(pair.dense), _twin(pair.nsa)
    for model in (dense, nsa):
        torchao.quantize_(model, quantization(kind), filter_fn=nsa_flex.quantization_filter)
    return Pair(pair.name, dense, nsa, exact=pair)


def quantization(kind: str) -> Any:
    """torchao's config of a kind; Inductor's settings stay as they are: see `compiled_for`.

    float8 activations have a scale a token. One scale for all tokens of a call, torchao's default,
    rounds a token of a step otherwise than the same token of a prompt. Those of int8 have one a
    token by default.
    """
    import torchao.quantization as torchao

    options = {"granularity": torchao.PerRow()} if kind == "float8dyn" else {}
    return getattr(torchao, QUANTIZED[kind])(set_inductor_config=False, **options)


def unsupported_reason(kind: str | None, batch: int, device: torch.device) -> str | None:
    """Why steps of so many prompts cannot be timed with such weights; None if they can."""
    if kind == "int8dyn" and device.type == "cuda" and batch <= INT_MM_ROWS:
        return (
            f"torch._int_mm multiplies more than {INT_MM_ROWS} rows on CUDA, and a step has one "
            f"a prompt: {batch}"
        )
    return None


def inductor_settings(kind: str | None) -> dict[str, Any]:
    """Inductor's settings for a kind of weights, None for those that are not quantized.

    Where weights alone are quantized, coordinate descent, which torchao's `quantize_` turns on for
    the whole process: only with it is a product with one row a reduction, which reads weights as
    they are stored. It tunes every kernel, one compilation after another. The search in all
    directions around the result is left out: up to 27 more compilations of one reduction.

    Where activations are quantized too, products read weights as they are stored anyway, and
    coordinate descent does not reach them. Inductor would tune Triton's templates for each shape
    instead, float8's by the hundred; cuBLAS takes them without.
    """
    if kind is None:
        return {}
    if kind in WEIGHTS_ALONE:
        return {"coordinate_descent_tuning": True}
    return {"max_autotune_gemm_backends": "ATEN"}


@contextmanager
def compiled_for(kind: str | None) -> Iterator[None]:
    """`inductor_settings` of this kind hold within."""
    with torch._inductor.config.patch(inductor_settings(kind)):
        yield


def dense_attentions(asked: list[str] | None) -> list[str]:
    """As asked, else SDPA with cuDNN and without it, and FA-2 where it is installed.

    `eager` is not among them: it stores the scores of all pairs of a prompt's tokens, 69 GB for
    one of 32k in bfloat16.
    """
    from transformers.utils import is_flash_attn_2_available

    fa2 = ["flash_attention_2"] if is_flash_attn_2_available() else []
    return asked or ["sdpa", NO_CUDNN, *fa2]


@contextmanager
def attending(model: Any, attention: str) -> Iterator[None]:
    """The model on this implementation, one of transformers' or `NO_CUDNN`.

    cuDNN makes a plan for each length of the keys, so with a growing cache one for each token.
    AOTAutograd's cache does not know which backends were allowed when a graph was made, so that
    it is left alone.
    """
    before, without = model.config._attn_implementation, attention == NO_CUDNN
    model.set_attn_implementation("sdpa" if without else attention)
    try:
        with (
            sdpa_kernel(WITHOUT_CUDNN) if without else nullcontext(),
            functorch_config.patch(enable_autograd_cache=False) if without else nullcontext(),
        ):
            yield
    finally:
        model.set_attn_implementation(before)


def _twin(model: nn.Module) -> Any:
    """A copy of the modules with the same parameters."""
    return copy.deepcopy(model, {id(x): x for x in model.parameters()})


def forget(*models: Any) -> None:
    """Leave the models as a new process finds them: nothing compiled, no cache length kept."""
    for model in models:
        for name in ("_compiled_call", "_last_compile_config", "_previous_max_cache_length"):
            vars(model).pop(name, None)
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
