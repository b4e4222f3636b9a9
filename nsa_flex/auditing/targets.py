"""What the command line audits: nsa_flex itself, a family of transformers, or a user's factory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import nsa_flex
from nsa_flex.auditing.measuring import MOST_CALLS
from nsa_flex.testing.models import ORDINARY_TOKENS


@dataclass(frozen=True)
class Target:
    """A callable with the batches to audit it on."""

    name: str
    fn: Callable
    inputs: Any
    decode: Any = None


def targets_of(
    name: str,
    *,
    lengths: list[int],
    batch_sizes: list[int],
    patched: bool,
    device: torch.device,
    ranks: dist.ProcessGroup | None = None,
) -> list[Target]:
    """`self` or a part of it, `module:factory`, or a model type of transformers, on `device`.

    Args:
        ranks: that share sequences: batches are this rank's part, those of a factory too.

    Raises:
        ValueError: it is none of these; the message says what would be.
    """
    parts = {"nsa_attention": _attention, "NSAAttention": _layer}
    if ranks is not None and (name in parts or name == "self"):
        raise ValueError(f"{name} is audited in one process: it takes no token ids")
    if name in parts:
        return [parts[name](lengths, batch_sizes, device)]
    if name == "self":
        return _own(lengths, batch_sizes, device)
    if ":" in name:
        return [_made_by_user(name)]
    return [_family(name, lengths, batch_sizes, patched, device, ranks=ranks)]


def _made_by_user(name: str) -> Target:
    """`module:factory`: it returns (model_or_fn, inputs) or (model_or_fn, inputs, decode)."""
    from nsa_flex.testing.models import call_factory

    made = call_factory(name)
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not callable(made[0]):
        raise ValueError(
            f"{name} must return (model_or_fn, inputs) or (model_or_fn, inputs, decode), "
            f"got {type(made).__name__}"
        )
    if isinstance(made[1], list | tuple) and not made[1]:
        raise ValueError(f"{name} returned no inputs: pass at least one batch")
    return Target(name, *made)


def _family(
    model_type: str,
    lengths: list[int],
    batch_sizes: list[int],
    patched: bool,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    ranks: dist.ProcessGroup | None = None,
    **sizes: int,
) -> Target:
    from nsa_flex.testing.models import tiny_decoder

    if ranks is not None:
        torch.manual_seed(0)  # the same model and rows on each
    model = tiny_decoder(model_type, **sizes).to(device, dtype)
    if patched:
        nsa_flex.patch(model, _config(device))
    batches = token_batches(lengths, batch_sizes, device)
    name = f"{model_type}, patched" if patched else model_type
    if ranks is not None:
        if patched:
            nsa_flex.context_parallel(model, ranks)
        own = [
            {**batch, **nsa_flex.shard_batch(batch["input_ids"], ranks, _config(device))}
            for batch in batches
        ]
        return Target(name, logits(model), own)
    return Target(name, logits(model), batches, decoding_batches(model, device))


def _own(lengths: list[int], batch_sizes: list[int], device: torch.device) -> list[Target]:
    """The function, the layer and a patched model, of the same heads, head dim and dtype.

    Kernels that the first has compiled serve all three; on CUDA, where they are many, one layer
    has to do.
    """
    on_cuda: dict[str, Any] = {"hidden_size": 256, "head_dim": 64, "num_hidden_layers": 1}
    sizes = on_cuda if device.type == "cuda" else {}
    return [
        _attention(lengths, batch_sizes, device),
        _layer(lengths, batch_sizes, device),
        _family("llama", lengths, batch_sizes, True, device, _dtype(device), **sizes),
    ]


def _attention(lengths: list[int], batch_sizes: list[int], device: torch.device) -> Target:
    config = _config(device)
    compress = nsa_flex.Compression(config, 2, 64, "mean")

    def attention(query: Any, key: Any, value: Any, gates: Any) -> Any:
        return nsa_flex.nsa_attention(
            query, key, value, compress(key), compress(value), gates, config=config
        )

    def batch(size: int, length: int) -> tuple[torch.Tensor, ...]:
        shapes = [(size, 4, length, 64), *[(size, 2, length, 64)] * 2, (size, 4, length, 3)]
        kind = {"device": device, "dtype": _dtype(device), "requires_grad": True}
        return tuple(torch.randn(shape, **kind) for shape in shapes)  # type: ignore[call-overload]

    inputs = [batch(size, length) for size in batch_sizes for length in lengths]
    return Target("nsa_attention", attention, inputs)


def _layer(lengths: list[int], batch_sizes: list[int], device: torch.device) -> Target:
    layer = nsa_flex.NSAAttention(
        256, 4, 2, config=_config(device), device=device, dtype=_dtype(device)
    )
    inputs = [
        (torch.randn(size, length, 256, device=device, dtype=_dtype(device)),)
        for size in batch_sizes
        for length in lengths
    ]
    return Target("NSAAttention", layer, inputs)


def _config(device: torch.device) -> nsa_flex.NSAConfig:
    """The paper's on CUDA, for which kernels are tuned; small elsewhere."""
    if device.type == "cuda":
        return nsa_flex.NSAConfig()
    return nsa_flex.NSAConfig(
        compress_block_size=8,
        compress_stride=4,
        select_block_size=16,
        num_selected_blocks=4,
        window_size=24,
    )


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


CACHED_TOKENS = 40
STEPS = 3

# The ten whose audit is in the documentation.
FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3_text",
    "phi3",
    "olmo2",
    "granite",
    "smollm3",
)


def token_batches(
    lengths: list[int], batch_sizes: list[int], device: torch.device | str = "cpu"
) -> list[dict[str, Any]]:
    """Keyword arguments of causal language models, without a cache: every length and batch size.

    The first batch is the first of each; later ones vary the length before the batch size.
    """
    return [
        {"input_ids": _tokens(batch, length, device), "use_cache": False}
        for batch in batch_sizes
        for length in lengths
    ]


def decoding_batches(
    model: Any, device: torch.device | str = "cpu"
) -> list[Callable[[], dict[str, Any]]]:
    """Makers of single steps against static caches that hold more tokens each time.

    Every call makes a cache of its own and fills it, so that a step may be run again.
    """
    from transformers import StaticCache

    from nsa_flex.patching.hf_versions import CACHE

    def step(cached: int) -> dict[str, Any]:
        cache = StaticCache(config=model.config, max_cache_len=CACHED_TOKENS + STEPS + MOST_CALLS)
        with torch.no_grad():
            model(_tokens(1, cached, device), use_cache=True, **{CACHE: cache})
        return {"input_ids": _tokens(1, 1, device), CACHE: cache, "use_cache": True}

    return [lambda cached=CACHED_TOKENS + i: step(cached) for i in range(STEPS)]  # type: ignore[misc]


def logits(model: nn.Module) -> Callable[..., torch.Tensor]:
    """The model as a function that returns its logits alone."""

    def forward(**inputs: Any) -> torch.Tensor:
        return model(**inputs).logits

    return forward


def _tokens(batch: int, length: int, device: torch.device | str) -> torch.Tensor:
    return torch.randint(*ORDINARY_TOKENS, (batch, length), device=device)
