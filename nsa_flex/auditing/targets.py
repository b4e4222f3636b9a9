"""What the command line audits: nsa_flex itself, a family of transformers, or a user's factory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import nsa_flex


@dataclass(frozen=True)
class Target:
    """A callable with the batches to audit it on."""

    name: str
    fn: Callable
    inputs: Any
    decode: Any = None
    max_graphs: int | None = None


def targets_of(
    name: str,
    *,
    lengths: list[int],
    batch_sizes: list[int],
    patched: bool,
    device: torch.device,
) -> list[Target]:
    """`self` or a part of it, `module:factory`, or a model type of transformers, on `device`.

    Raises:
        ValueError: it is none of these; the message says what would be.
    """
    parts = {"nsa_attention": _attention, "NSAAttention": _layer}
    if name in parts:
        return [parts[name](lengths, batch_sizes, device)]
    if name == "self":
        return _own(lengths, batch_sizes, device)
    if ":" in name:
        return [_made_by_user(name)]
    return [_family(name, lengths, batch_sizes, patched, device)]


def _made_by_user(name: str) -> Target:
    """`module:factory`: it returns (model_or_fn, inputs) or (model_or_fn, inputs, decode)."""
    from nsa_flex.testing.named_models import call_factory

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
    **sizes: int,
) -> Target:
    from nsa_flex.auditing.tiny_decoders import decoding_batches, logits, token_batches
    from nsa_flex.testing.tiny_decoders import tiny_decoder

    model = tiny_decoder(model_type, **sizes).to(device, dtype)
    if patched:
        nsa_flex.patch(model, _config(device))
    batches = token_batches(lengths, batch_sizes, device)
    name = f"{model_type}, patched" if patched else model_type
    return Target(name, logits(model), batches, decoding_batches(model, device))


def _own(lengths: list[int], batch_sizes: list[int], device: torch.device) -> list[Target]:
    """The function, the layer and a patched model, of the same heads, head dim and dtype.

    Kernels that the first has compiled serve all three; on CUDA, where they are many, one layer
    has to do.
    """
    on_cuda = {"hidden_size": 256, "head_dim": 64, "num_hidden_layers": 1}
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
