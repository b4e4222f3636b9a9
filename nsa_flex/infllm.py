"""InfLLM-V2 attention (MiniCPM4): blocks by max-pooled scores, and one softmax over them."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa_flex.backends.branch import is_whole, known_offset, query_positions
from nsa_flex.backends.gathered import gathered_attention
from nsa_flex.block_topk import topk_blocks
from nsa_flex.config import NSAConfig
from nsa_flex.dispatch import FEW_QUERIES, BackendName
from nsa_flex.fallback_kernels.common.every_block import every_block
from nsa_flex.inputs import (
    check_positions,
    check_scale,
    check_shapes,
    check_tensors,
)
from nsa_flex.selected import attend_selected, check_block_size

if TYPE_CHECKING:
    from jaxtyping import Float, Int

COARSE = 4  # kernels of the log-sum-exp are so many times as long and as far apart


@dataclass(frozen=True)
class InfLLMV2Config:
    """Hyperparameters of InfLLM-V2 by the names of `sparse_config` in a MiniCPM4 config.json.

    Args:
        kernel_size: tokens that a mean of keys is over.
        kernel_stride: tokens between the starts of neighbouring means.
        block_size: tokens of a selectable block.
        init_blocks: blocks at the start of a document that are always selected.
        window_size: tokens of the blocks before a query's own that are always selected.
        topk: blocks selected besides those of the window, initial ones and the own among them.
        dense_len: where no row or document of a call has so many tokens, attention is dense.
        use_nope: the model scores blocks by queries and keys before the rotary embedding.
        exact_lse: scores take the log-sum-exp over the means themselves. By default that over
            means four times as long and as far apart, with which the checkpoints were trained.

    Raises:
        TypeError: a size is not an int.
        ValueError: a size out of range; kernel_stride does not divide kernel_size and block_size;
            block_size does not divide window_size; kernel_size > block_size; or topk has no room
            for the initial blocks and the query's own.

    Source: arXiv 2506.07900, section 2.2, and the modelling code of MiniCPM4-8B.

    >>> InfLLMV2Config().num_blocks
    96
    """

    kernel_size: int = 32
    kernel_stride: int = 16
    block_size: int = 64
    init_blocks: int = 1
    window_size: int = 2048
    topk: int = 64
    dense_len: int = 8192
    use_nope: bool = False
    exact_lse: bool = False
    # The same sizes as of NSA, for `topk_blocks` and `selected_attention`; made once.
    selection: NSAConfig = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for field in _given_fields():
            value = getattr(self, field.name)
            kind = bool if field.type == "bool" else int
            if type(value) is not kind:
                wanted, got = kind.__name__, f"{type(value).__name__} {value!r}"
                raise TypeError(f"{field.name} must be of type {wanted}, got {got}")
            least = 0 if field.name in ("init_blocks", "window_size", "dense_len") else 1
            if kind is int and value < least:
                raise ValueError(f"{field.name}={value} must be at least {least}")
        if self.window_size % self.block_size:
            raise ValueError(
                f"block_size={self.block_size} must divide window_size={self.window_size}"
            )
        if self.topk < self.init_blocks + 1:
            raise ValueError(
                f"topk={self.topk} must be at least init_blocks + 1 = {self.init_blocks + 1}: it "
                "counts the initial blocks and the query's own"
            )
        for name in ("kernel_size", "block_size"):
            if getattr(self, name) % self.kernel_stride:
                got = f"{name}={getattr(self, name)}"
                raise ValueError(f"kernel_stride={self.kernel_stride} must divide {got}")
        if self.kernel_size > self.block_size:
            raise ValueError(
                f"kernel_size={self.kernel_size} must be at most block_size={self.block_size}"
            )
        object.__setattr__(self, "selection", self._as_of_nsa())

    @property
    def num_blocks(self) -> int:
        """Blocks of a query, forced ones among them."""
        return self.topk + self.window_size // self.block_size

    @property
    def num_dense_blocks(self) -> int:
        """Slots that hold every block of a document below `dense_len`."""
        return -(-max(1, self.dense_len - 1) // self.block_size)

    def _as_of_nsa(self) -> NSAConfig:
        return NSAConfig(
            compress_block_size=self.kernel_size,
            compress_stride=self.kernel_stride,
            select_block_size=self.block_size,
            num_selected_blocks=self.num_blocks,
            num_initial_blocks=self.init_blocks,
            num_local_blocks=self.window_size // self.block_size + 1,
            compression="mean",
            selection="max_pool",
            branches=("selected",),
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> InfLLMV2Config:
        """Of a `sparse_config`; unknown names raise ValueError and are listed."""
        known = {field.name for field in _given_fields()}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(
                f"unknown fields of sparse_config {unknown}; known are {sorted(known)}"
            )
        return cls(**values)


def _given_fields() -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(InfLLMV2Config) if field.init]


def infllm_v2_attention(
    query: Float[Tensor, "B Hq Sq D"],
    key: Float[Tensor, "B Hkv Sk D"],
    value: Float[Tensor, "B Hkv Sk Dv"],
    *,
    config: InfLLMV2Config,
    scale: float | None = None,
    query_offset: int | Int[Tensor, " B"] | None = None,
    document_start: Int[Tensor, "B Sq"] | None = None,
    longest: int | Int[Tensor, ""] | None = None,
    scored_by: tuple[Tensor, Tensor] | None = None,
    compressed_key: Float[Tensor, "B Hkv N D"] | None = None,
    backend: BackendName = "auto",
) -> Float[Tensor, "B Hq Sq Dv"]:
    """softmax(scale * q k^T) v over tokens up to a query in its initial, local and best blocks.

    Blocks are those of `topk_blocks` with pooling "max", and attention is `selected_attention`:
    gradients go to query, key and value, none through the choice. For any number of query heads
    a KV head. Where the longest row or document of the call has fewer than `config.dense_len`
    tokens, attention is dense and causal for all of it, as the checkpoints were trained. If the
    host knows that length, by SDPA or, for documents, with every block selected. If only the
    device does, it replaces the blocks by every block, and the host never waits.

    Args:
        query: (B, Hq, Sq, D); key: (B, Hkv, Sk, D), value: (B, Hkv, Sk, Dv), in the same dtype.
        config: sizes, as a checkpoint's `sparse_config` has them.
        scale: factor of query . key, positive, by default 1 / sqrt(D).
        query_offset: key index of query 0, an int or int (B,); by default Sk - Sq.
        document_start: int (B, Sq), key index of the first token of each query's document, a
            multiple of the block size; see `nsa_flex.align_packed`.
        longest: tokens of the longest row or document, which decides between dense and sparse: an
            int, or an int tensor of one element. By default what the queries' positions say.
        scored_by: query and key that blocks are scored by, of the same shapes: those before the
            rotary embedding where `config.use_nope`. By default `query` and `key`.
        compressed_key: (B, Hkv, N, D), means of the windows of the keys that blocks are scored
            by, where they are known; by default they are made, which reads all keys.
        backend: as of `selected_attention`.

    Returns:
        (B, Hq, Sq, Dv) in the query's dtype.

    Raises:
        ValueError: shapes, head counts, dtypes or devices that do not fit together; or
            `config.use_nope` without `scored_by`.
        TypeError: an argument of another type.

    Source: arXiv 2506.07900, section 2.2.

    >>> q, k, v = (torch.randn(1, heads, 256, 16) for heads in (4, 2, 2))
    >>> config = InfLLMV2Config(8, 4, 16, window_size=32, topk=3, dense_len=128)
    >>> infllm_v2_attention(q, k, v, config=config).shape
    torch.Size([1, 4, 256, 16])
    """
    _check(query, key, value, config, scored_by)
    check_positions(query, key, query_offset, document_start)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    check_scale(scale)
    _, positions = query_positions(query, key, query_offset)
    length = _length(longest, query, key, query_offset, document_start, positions)
    dense = _known_below(length, key.shape[2], config.dense_len)
    if dense and document_start is None:
        whole = is_whole(query, key, query_offset)
        return _causal(query, key, value, None if whole else positions, scale)
    start = None if document_start is None else document_start.to(torch.int32)
    blocks = []
    if not dense:
        blocks.append(
            topk_blocks(
                *((query, key) if scored_by is None else scored_by),
                config=config.selection,
                compressed_key=compressed_key,
                coarse=1 if config.exact_lse else COARSE,
                scale=scale,
                query_offset=query_offset,
                document_start=start,
            )
        )
    if dense or isinstance(length, Tensor):
        slots = min(config.num_dense_blocks, -(-key.shape[2] // config.block_size))
        shape = (query.shape[0], key.shape[1], query.shape[2], slots)
        blocks.append(every_block(positions, start, shape, config.block_size))
    attended = _one_of(blocks, length, config)
    if backend == "auto" and start is None and _are_few(query, key, attended, config):
        return gathered_attention(query, key, value, attended, positions, config.block_size, scale)
    out, _ = attend_selected(
        *(query, key, value, attended),
        config=config.selection,
        scale=scale,
        query_offset=query_offset,
        document_start=start,
        backend=backend,
    )
    return out


def _are_few(query: Tensor, key: Tensor, blocks: Tensor, config: InfLLMV2Config) -> bool:
    """Whether to gather the keys of blocks, of a step over a long cache."""
    few = query.shape[2] <= FEW_QUERIES
    return few and query.shape[2] * blocks.shape[3] * config.block_size < key.shape[2]


def _one_of(blocks: list[Tensor], length: int | Tensor, config: InfLLMV2Config) -> Tensor:
    """The only blocks there are; or of the best and all, those that the length asks for."""
    if len(blocks) == 1:
        return blocks[0]
    slots = max(x.shape[3] for x in blocks)
    best, every = (F.pad(x, (0, slots - x.shape[3]), value=-1) for x in blocks)
    assert isinstance(length, Tensor)
    return torch.where(length < config.dense_len, every, best)


def _length(
    longest: int | Tensor | None,
    query: Tensor,
    key: Tensor,
    query_offset: int | Tensor | None,
    document_start: Tensor | None,
    positions: Tensor,
) -> int | Tensor:
    """Tokens of the longest row or document: an int where the host knows it."""
    if longest is not None:
        return longest.reshape(()) if isinstance(longest, Tensor) else longest
    known = known_offset(query, key, query_offset)
    if document_start is None and known is not None:
        return known + query.shape[2]
    first = 0 if document_start is None else document_start
    return (positions - first).amax() + 1


def _known_below(length: int | Tensor, num_keys: int, dense_len: int) -> bool:
    """Whether the host knows that the longest row, of `num_keys` at most, is below `dense_len`."""
    return (num_keys if isinstance(length, Tensor) else length) < dense_len


def _causal(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor | None, scale: float
) -> Tensor:
    """Dense, by SDPA; `positions` (1 or B, Sq) of the queries where they are not all tokens."""
    if positions is None:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=True
        )
    place = torch.arange(key.shape[2], device=key.device)
    mask = (place <= positions[..., None])[:, None]  # [1 or B, 1, Sq, Sk]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=True
    )


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: InfLLMV2Config,
    scored_by: tuple[Tensor, Tensor] | None,
) -> None:
    """Raises ValueError or TypeError naming the first thing that does not fit. Reads no values."""
    if not isinstance(config, InfLLMV2Config):
        raise TypeError(f"config must be an InfLLMV2Config, got {type(config).__name__}")
    check_block_size("config.block_size", config.block_size)
    for size in (config.dense_len, config.num_blocks):
        operator.index(size)  # constants of a compiled graph
    if config.use_nope and scored_by is None:
        raise ValueError(
            "config.use_nope is True and scored_by is None: pass the query and key before the "
            "rotary embedding"
        )
    tensors = {"query": query, "key": key, "value": value}
    if scored_by is not None:
        tensors |= {"scored_by[0]": scored_by[0], "scored_by[1]": scored_by[1]}
    check_tensors(tensors, own_dtype="")
    batch, kv_heads, kv_len, _ = key.shape
    expected = {
        "key": (query.shape[0], kv_heads, kv_len, query.shape[3]),
        "value": (batch, kv_heads, kv_len, value.shape[3]),
    }
    if scored_by is not None:
        dim = query.shape[3]
        expected["scored_by[0]"] = (batch, query.shape[1], query.shape[2], dim)
        expected["scored_by[1]"] = (batch, kv_heads, kv_len, dim)
    check_shapes(tensors, expected)
