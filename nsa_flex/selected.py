"""`selected_attention`: attention to given blocks, however they were selected."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from nsa_flex.backends.branch import Branch, Inputs, known_offset, query_positions
from nsa_flex.config import NSAConfig, checked_int
from nsa_flex.dispatch import IMPLEMENTATIONS, BackendName, Facts, choose_backends
from nsa_flex.inputs import check_positions, check_scale, check_shapes, check_tensors
from nsa_flex.masks.selected import visible_blocks

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@overload
def selected_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Tensor,
    *,
    config: NSAConfig | None = ...,
    block_size: int | None = ...,
    num_initial_blocks: int | None = ...,
    num_local_blocks: int | None = ...,
    scale: float | None = ...,
    query_offset: int | Tensor | None = ...,
    document_start: Tensor | None = ...,
    backend: BackendName = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...


@overload
def selected_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Tensor,
    *,
    config: NSAConfig | None = ...,
    block_size: int | None = ...,
    num_initial_blocks: int | None = ...,
    num_local_blocks: int | None = ...,
    scale: float | None = ...,
    query_offset: int | Tensor | None = ...,
    document_start: Tensor | None = ...,
    backend: BackendName = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def selected_attention(
    query: Float[Tensor, "B Hq Sq D"],
    key: Float[Tensor, "B Hkv Sk D"],
    value: Float[Tensor, "B Hkv Sk Dv"],
    blocks: Int[Tensor, "B Hkv Sq n"],
    *,
    config: NSAConfig | None = None,
    block_size: int | None = None,
    num_initial_blocks: int | None = None,
    num_local_blocks: int | None = None,
    scale: float | None = None,
    query_offset: int | Int[Tensor, " B"] | None = None,
    document_start: Int[Tensor, "B Sq"] | None = None,
    backend: BackendName = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`softmax(scale * q_t K^T) V` over the keys up to t inside the blocks given for t.

    The selected branch alone, for blocks that are not selected as NSA does: one selection per
    query and KV head, shared by the query heads of the group. Softmax and sums are float32 or
    better.
    All tensors take any strides; memory ordered (B, S, H, D) is best.

    Args:
        query: (B, Hq, Sq, D); Hq is a multiple of Hkv. float32, bfloat16, float16 or float64.
        key: (B, Hkv, Sk, D), value: (B, Hkv, Sk, Dv), in the query's dtype.
        blocks: integers (B, Hkv, Sq, n), in any order; block j is the keys
            [j * block_size, (j + 1) * block_size) of the row. Not attended, as if absent: -1, a
            block after the query's own, and the repetitions of a block. They carry no gradient.
        config: gives the block size and the counts below; the rest of it is not used.
        block_size: instead of `config`: keys in a block, a power of two, at least 16. Triton
            kernels take up to 128.
        num_initial_blocks: blocks at the start that almost every query selects, 0 by default.
        num_local_blocks: blocks ending at the query's own (included) that almost every query
            selects, 1 by default. Both are hints to the kernels: wrong ones cost time and change
            no result.
        scale: factor of query . key, positive, by default 1 / sqrt(D).
        query_offset: key index of query 0, an int or int (B,); by default Sk - Sq.
        document_start: int (B, Sq), key index of the first token of each query's document, a
            multiple of the block size; see `nsa_flex.align_packed`. Blocks are counted from the
            start of the row all the same. A block that begins before the document is not
            attended, so that no key of another document ever is.
        backend: "auto", "dense", "flex" or "triton", as the selected branch of `nsa_attention`.
        return_lse: also return the log-sum-exp.

    Returns:
        (B, Hq, Sq, Dv) in the query's dtype, and, if asked, the natural log-sum-exp float32
        (B, Hq, Sq), without gradient. A query without blocks gets 0 and -inf, and zero gradients.

    Raises:
        ValueError: shapes, head counts, dtypes or devices that do not fit together, a block size
            or scale that cannot be, or a backend that cannot compute what was asked of it.
        TypeError: an argument of another type.

    Source: arXiv 2502.11089, section 3.3.2, without the top-k selection.

    >>> q, k, v = (torch.randn(1, heads, 128, 16) for heads in (4, 2, 2))
    >>> own = (torch.arange(128) // 32).expand(1, 2, 128)
    >>> blocks = torch.stack([own, torch.zeros_like(own)], dim=-1)  # its own block and the first
    >>> selected_attention(q, k, v, blocks, block_size=32).shape
    torch.Size([1, 4, 128, 16])
    """
    config = _config(config, block_size, num_initial_blocks, num_local_blocks)
    _check(query, key, value, blocks, query_offset, document_start)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    check_scale(scale)
    positions = query_positions(query, key, query_offset)[1]
    out, lse = attend_selected(
        *(query, key, value),
        visible_blocks(config, blocks, positions, key.shape[2], document_start),
        config=config,
        scale=scale,
        query_offset=query_offset,
        document_start=document_start,
        backend=backend,
        return_lse=return_lse,
    )
    if not return_lse:
        return out
    assert lse is not None
    return out, lse.detach()


def attend_selected(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Tensor,
    *,
    config: NSAConfig,
    scale: float,
    query_offset: int | Tensor | None,
    document_start: Tensor | None,
    backend: BackendName,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`selected_attention` of a checked call for blocks in the form of `visible_blocks`."""
    config.specialize()
    inputs = Inputs(query, key, value, key, value, key, value, gates=query)
    facts = inputs.facts(config, query_offset, document_start)
    facts = replace(facts, num_selected_blocks=blocks.shape[3])
    chosen_backend = _backend(facts, backend)
    task = Branch(
        *(query, key, value, config, scale),
        offset=query_positions(query, key, query_offset)[0],
        known_offset=known_offset(query, key, query_offset),
        document_start=document_start,
        blocks=blocks,
        need_lse=return_lse,
    )
    return IMPLEMENTATIONS[chosen_backend, "selected"](task)


def _config(
    config: NSAConfig | None, block_size: int | None, initial: int | None, local: int | None
) -> NSAConfig:
    """The config given, or one of that block size and counts; the compressed branch has no say."""
    own = {
        "block_size": block_size,
        "num_initial_blocks": initial,
        "num_local_blocks": local,
    }
    if config is not None:
        if not isinstance(config, NSAConfig):
            raise TypeError(f"config must be an NSAConfig, got {type(config).__name__}")
        twice = ", ".join(name for name, value in own.items() if value is not None)
        if twice:
            raise ValueError(f"config is given and {twice} too: leave out one or the other")
        check_block_size("config.select_block_size", config.select_block_size)
    else:
        if block_size is None:
            raise ValueError("neither config nor block_size is given: give one of them")
        check_block_size("block_size", block_size)
        initial = checked_int("num_initial_blocks", 0 if initial is None else initial)
        local = checked_int("num_local_blocks", 1 if local is None else local)
        config = NSAConfig(
            compress_block_size=block_size,
            compress_stride=block_size,
            select_block_size=block_size,
            num_selected_blocks=max(1, initial + local),
            num_initial_blocks=initial,
            num_local_blocks=local,
        )
    return config


def check_block_size(name: str, size: int) -> None:
    """Raises TypeError or ValueError naming a block size that no backend computes."""
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"{name} must be an int, got {type(size).__name__} {size!r}")
    if size < 16 or size & (size - 1):
        raise ValueError(f"{name}={size} must be a power of two, at least 16")


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Tensor,
    query_offset: int | Tensor | None,
    document_start: Tensor | None,
) -> None:
    """Raises ValueError or TypeError naming the first thing that does not fit. Reads no values."""
    tensors = {"query": query, "key": key, "value": value, "blocks": blocks}
    check_tensors(tensors, own_dtype="blocks")
    batch, _, q_len, dim = query.shape
    kv_heads, kv_len = key.shape[1:3]
    expected = {
        "key": (batch, kv_heads, kv_len, dim),
        "value": (batch, kv_heads, kv_len, value.shape[3]),
        "blocks": (batch, kv_heads, q_len, max(1, blocks.shape[3])),
    }
    check_shapes(tensors, expected)
    if value.shape[3] == 0:
        raise ValueError(f"value {tuple(value.shape)} must not be empty")
    if blocks.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"blocks is {blocks.dtype}; it must be torch.int32 or torch.int64")
    check_positions(query, key, query_offset, document_start)


def _backend(facts: Facts, backend: BackendName) -> str:
    """The backend of the selected branch; one that does not offer it is refused, not replaced."""
    if not isinstance(backend, str):
        raise TypeError(f"backend must be a name, got {type(backend).__name__} {backend!r}")
    return choose_backends(facts, {"selected": backend})["selected"].backend
