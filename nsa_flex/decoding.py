"""One decode step over a cache: store, compress what became whole, attend.

Constant shapes and no host sync, whatever the lengths of the rows are: where tokens go and what a
query sees follows from `lengths`, int32 (B,) on the device, the tokens of each row before the new
ones. One operator of Triton kernels where they take the inputs, else PyTorch operations.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_flex.attention import BranchLSE, NSAAux, aux_of_kernels, gated_sum
from nsa_flex.backends.dense import masked_attention
from nsa_flex.compression import Compression
from nsa_flex.config import BRANCHES, PRODUCTS, BranchName, NSAConfig
from nsa_flex.fallback_kernels.launch.direct import is_plain
from nsa_flex.gates import GateLogits
from nsa_flex.installed import HAS_TRITON
from nsa_flex.reasons import explained
from nsa_flex.selection import choose_blocks
from nsa_flex.sharded import is_sharded
from nsa_flex.storing import append, compress_completed, take_slots

# So many new tokens are a decode step (speculative ones included); more are a prefill.
MAX_STEP = 16


class Stored(NamedTuple):
    """The tensors of a layer's cache, whole.

    key: (B, sets · Hkv, C, D), value: (B, sets · Hkv, C, Dv).
    compressed_key: (B, Hkv, Ncap, D), compressed_value: (B, Hkv, Ncap, Dv).
    lengths: int32 (B,), tokens of each row before those of the step.
    """

    key: Tensor
    value: Tensor
    compressed_key: Tensor
    compressed_value: Tensor
    lengths: Tensor

    @property
    def num_sets(self) -> int:
        """3 for keys of the compressed, selected and sliding branch side by side, else 1."""
        return self.key.shape[1] // self.compressed_key.shape[1]

    def branch(self, which: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the compressed (0), selected (1) or sliding (2) branch."""
        sets = self.num_sets
        if sets == 1:
            return self.key, self.value
        return self.key.chunk(sets, 1)[which], self.value.chunk(sets, 1)[which]


class New(NamedTuple):
    """What a step stores.

    key: (B, sets · Hkv, T, D), value: (B, sets · Hkv, T, Dv). phi: of keys and of values.
    may_complete: False where the host knows that no row completes a compressed block.
    """

    key: Tensor
    value: Tensor
    phi: tuple[Compression, Compression]
    may_complete: bool = True


def decode_step(
    query: Tensor,
    new: New | None,
    stored: Stored,
    gates: Tensor | GateLogits,
    *,
    config: NSAConfig,
    scale: float,
    return_aux: bool = False,
) -> tuple[Tensor, NSAAux | None]:
    """Stores T new tokens a row and attends, as `nsa_attention` does for queries at `lengths` ...
    `lengths + T - 1`.

    Reads the compressed keys, the tokens of the chosen blocks and the window; nothing else of the
    cache. What lies behind a query may be anything finite.

    Args:
        query: (B, Hq, T, D), T at most `MAX_STEP`.
        new: None if the tokens are stored.
        gates: (B, Hq, T, C), of the config's branches in its order.
        scale: factor of query . key.
        return_aux: also return the chosen blocks and the log-sum-exps.

    Returns:
        (B, Hq, T, Dv) in the query's dtype, and an `NSAAux` if asked.
    """
    parameters: tuple[list[Tensor], ...] = ([], [])
    if new is not None and (new.may_complete or new.phi[0].kind not in PRODUCTS):
        parameters = _parameters(new.phi)
    if torch.compiler.is_compiling():
        config.specialize()
    elif HAS_TRITON and not return_aux and is_plain(query) and not torch.is_grad_enabled():
        out = _replayed(query, new, parameters, stored, gates, config, scale)
        if out is not None:
            return out, None
    unsupported = unsupported_reason(query, stored.key, stored.value, config, stored.num_sets)
    if new is not None and (
        unsupported or phi_unsupported_reason(new.phi, parameters, stored.key)
    ):
        store(new, stored)
        new = None
    if unsupported is None:
        arguments = (query, new, parameters, stored, gates, config, scale, return_aux)
        return _on_kernels(*arguments)
    gates = gates.gates() if isinstance(gates, GateLogits) else gates
    return step_by_operations(query, stored, gates, config, scale, return_aux=return_aux)


def store(new: New, stored: Stored) -> None:
    """Stores T new tokens a row, and the blocks that they complete.

    By one kernel where it takes them, else by PyTorch operations.
    """
    tokens, blocks = store_by_kernel(new, stored)
    if not tokens:
        append(new.key, new.value, stored.key, stored.value, stored.lengths)
    if new.may_complete and not blocks:
        compressed = (stored.compressed_key, stored.compressed_value)
        num_new = new.key.shape[2]
        compress_completed(*stored.branch(0), *compressed, stored.lengths, num_new, *new.phi)


def store_by_kernel(new: New, stored: Stored) -> tuple[bool, bool]:
    """What one kernel does of `store`: whether it stored the tokens, and whether the blocks.

    It leaves the products of φ linear and mlp to others.
    """
    if store_unsupported_reason(new, stored) is not None:
        return False, False
    from nsa_flex.fallback_kernels.decode import store_tokens as kernel

    config = new.phi[0].config
    parameters = _parameters(new.phi)
    compresses = (
        config.compresses
        and new.phi[0].kind in ("mean", "weighted")
        and phi_unsupported_reason(new.phi, parameters, stored.key) is None
        and not _takes_gradients(parameters)
    )
    logits = parameters[0] + parameters[1] if compresses else []
    kernel.store(new.key, new.value, *stored, logits, compresses, config.counts)
    return True, compresses


@explained
def store_unsupported_reason(new: New, stored: Stored) -> str | None:
    """Why no kernel stores such tokens; None if one does."""
    if stored.key.device.type != "cuda":
        return f"the kernel that stores needs a CUDA device, got {stored.key.device.type}"
    if not HAS_TRITON:
        return "triton is not installed"
    from nsa_flex.fallback_kernels.decode import store_tokens as kernel

    return kernel.unsupported_reason(new.key, new.value, stored.key)


def _takes_gradients(parameters: tuple[list[Tensor], ...]) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for each in parameters for x in each)


@explained
def unsupported_reason(
    query: Tensor, key: Tensor, value: Tensor, config: NSAConfig, num_sets: int = 1
) -> str | None:
    """Why the Triton kernels do not take a step of such shapes and dtypes; None if they do."""
    if query.device.type != "cuda":
        return f"the decode kernels need a CUDA device, got {query.device.type}"
    if not HAS_TRITON:
        return "triton is not installed"
    from nsa_flex.fallback_kernels.decode import interface as decode

    return decode.unsupported_reason(query, key, value, config, num_sets)


@explained
def phi_unsupported_reason(
    phi: tuple[Compression, Compression], parameters: tuple[list[Tensor], ...], key: Tensor
) -> str | None:
    """Why the kernels of a step do not compress with such φ; None if they do."""
    kinds = tuple([each.kind for each in phi])
    if kinds[0] != kinds[1]:
        return f"a step compresses keys and values alike, got {kinds[0]} and {kinds[1]}"
    device = key.device
    for x in parameters[0] + parameters[1]:
        if x.device != device or is_sharded(x) or not x.is_contiguous():
            return f"parameters of φ must be whole and contiguous on {device}, got {x.device}"
    return None


def _parameters(phi: tuple[Compression, Compression]) -> tuple[list[Tensor], ...]:
    """In their order; read as attributes, which hold what a parametrization or a wrapper put."""
    if torch.compiler.is_compiling() or phi[0].is_split:
        return tuple([list(each.own_parameters().values()) for each in phi])
    found: tuple[list[Tensor], ...] = ([], [])
    for parameters, each in zip(found, phi, strict=True):
        held: dict[str, Any] = each._parameters  # where nn.Module looks last, and slowly
        for name in each.parameter_names:
            parameters.append(held[name] if name in held else getattr(each, name))
    return found


def _replayed(
    query: Tensor,
    new: New | None,
    parameters: tuple[list[Tensor], ...],
    stored: Stored,
    gates: Tensor | GateLogits,
    config: NSAConfig,
    scale: float,
) -> Tensor | None:
    """The step where the kernels ran another of its kind, which was checked; else None.

    Arguments as of `_on_kernels`.
    """
    kind, may_complete = "mean", True
    if new is not None:
        (of_keys, of_values), may_complete = new.phi, new.may_complete
        kind = of_keys.kind
        if of_values.kind != kind:
            return None
    gating = gates if isinstance(gates, GateLogits) else (gates, None, None)
    both = parameters[0] + parameters[1]
    options = (kind, may_complete, stored.num_sets, scale)
    tokens = None if new is None else new[:2]
    return _kernels().replay(query, tokens, stored, gating, both, options, config)


@functools.cache
def _kernels() -> Any:
    """Their interface, which needs triton: imported once, not at each step."""
    from nsa_flex.fallback_kernels.decode import interface

    return interface


def _on_kernels(
    query: Tensor,
    new: New | None,
    parameters: tuple[list[Tensor], ...],
    stored: Stored,
    gates: Tensor | GateLogits,
    config: NSAConfig,
    scale: float,
    return_aux: bool,
) -> tuple[Tensor, NSAAux | None]:
    """`parameters` are those of φ in `new`, for keys and for values."""
    from nsa_flex.fallback_kernels.decode import interface as decode

    options: dict[str, Any] = {"num_sets": stored.num_sets, "return_aux": return_aux}
    if isinstance(gates, GateLogits):
        gates, options["gate_offset"], options["gate_bias"] = gates
    new_key = new_value = None
    if new is not None:
        new_key, new_value = new.key, new.value
        options["phi"] = decode.Phi(new.phi[0].kind, *map(tuple, parameters))
        options["may_complete"] = new.may_complete
    result: Any = decode.step(
        query, new_key, new_value, *stored[:4], gates, stored.lengths,
        config=config, scale=scale, **options,
    )  # fmt: skip
    if not return_aux:
        return result, None
    out, aux = result
    return out, aux_of_kernels(aux.blocks, aux.lse, config)


def step_by_operations(
    query: Tensor,
    stored: Stored,
    gates: Tensor,
    config: NSAConfig,
    scale: float,
    *,
    return_aux: bool = False,
) -> tuple[Tensor, NSAAux | None]:
    """`decode_step` without kernels; the new tokens are stored."""
    new = torch.arange(query.shape[2], device=query.device)
    positions = stored.lengths[:, None] + new  # [B, T]
    compressed_key, compressed_value = stored.compressed_key, stored.compressed_value
    found: dict[BranchName, tuple[Tensor, Tensor]] = {}
    if config.has("compressed"):
        found["compressed"] = _compressed(
            query, compressed_key, compressed_value, positions, config, scale
        )
    blocks = None
    if config.has("selected"):
        blocks = choose_blocks(
            query,
            compressed_key,
            config=config,
            scale=scale,
            num_blocks=config.num_select_blocks(stored.key.shape[2]),
            positions=positions,
        )
        found["selected"] = _selected(query, *stored.branch(1), blocks, positions, config, scale)
    if config.has("sliding"):
        found["sliding"] = _sliding(query, *stored.branch(2), positions, config, scale)
    out = gated_sum([out for out, _ in found.values()], gates)
    if not return_aux:
        return out, None
    lse = BranchLSE(*(found[name][1] if name in found else None for name in BRANCHES))
    return out, NSAAux(blocks, lse)


def _compressed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    config: NSAConfig,
    scale: float,
) -> tuple[Tensor, Tensor]:
    start = torch.arange(key.shape[2], device=key.device) * config.compress_stride
    visible = start + config.compress_block_size - 1 <= positions[..., None]  # [B, T, Ncap]
    return masked_attention(query, key, value, visible[:, None], scale)


def _selected(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Tensor,
    positions: Tensor,
    config: NSAConfig,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention to the gathered tokens of the chosen blocks, each query with keys of its own."""
    batch, kv_heads, num_queries, _ = blocks.shape
    size = config.select_block_size
    tokens = blocks[..., None] * size + torch.arange(size, device=key.device)
    visible = (blocks >= 0)[..., None] & (tokens <= positions[:, None, :, None, None])
    tokens = tokens.clamp(0, key.shape[2] - 1).flatten(2)  # [B, Hkv, T * n * l']
    row = torch.arange(batch, device=key.device)[:, None, None]
    head = torch.arange(kv_heads, device=key.device)[:, None]
    chosen_key, chosen_value = (
        x[row, head, tokens].unflatten(2, (num_queries, -1)).flatten(1, 2) for x in (key, value)
    )  # [B, Hkv * T, n * l', D]
    alone = query.unflatten(1, (kv_heads, -1)).transpose(2, 3).flatten(1, 3)[:, :, None]
    mask = visible.flatten(3).flatten(1, 2)[:, :, None]  # [B, Hkv * T, 1, n * l']
    out, lse = masked_attention(alone, chosen_key, chosen_value, mask, scale)
    out = out[:, :, 0].unflatten(1, (kv_heads, num_queries, -1)).transpose(2, 3).flatten(1, 2)
    lse = lse[:, :, 0].unflatten(1, (kv_heads, num_queries, -1)).transpose(2, 3).flatten(1, 2)
    return out, lse


def _sliding(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    config: NSAConfig,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention to the gathered tokens of all queries' windows."""
    capacity, window = key.shape[2], config.window_size
    width = window + query.shape[2] - 1
    if width >= capacity:
        tokens = torch.arange(capacity, device=key.device)[None]
    else:
        first = positions[:, :1] - window + 1
        tokens = first + torch.arange(width, device=key.device)
        inside = tokens.clamp(0, capacity - 1)
        key, value = take_slots(key, inside), take_slots(value, inside)
    now = positions[..., None]
    visible = (tokens[:, None] <= now) & (tokens[:, None] > now - window) & (tokens[:, None] >= 0)
    return masked_attention(query, key, value, visible[:, None], scale)
