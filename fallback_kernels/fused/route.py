"""Which kernels a call of the core runs, and why.

A route follows from shapes, strides, dtypes, the device, the config and what the host knows of the
documents, never from a tensor's values. The operators of forward and backward and their fake
implementations all ask `route_of`; nothing else decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa_flex.config import NSAConfig
from nsa_flex.fallback_kernels.common.tiles import cdiv, next_power_of_2
from nsa_flex.fallback_kernels.fused import fwd_epilogue
from nsa_flex.fallback_kernels.selected.config import SelectedPlan
from nsa_flex.fallback_kernels.short.config import masked_tiles, plan_of
from nsa_flex.fallback_kernels.short.masks import MAX_BLOCKS

# Up to so many tokens in all rows the host's time counts, of which cuDNN's calls took a quarter.
RANGES_TOKENS = 4096
# Rows so short have few keys a query: cuDNN's passes over queries and gradients take longer.
RANGES_ROW = 8192
LEAST_PAST = 1024  # keys before query 0 that are worth calls of cuDNN of their own
CUDNN_DTYPES = (torch.float16, torch.bfloat16)

Compressed = Literal["cudnn", "ranges"]

MASKED_TIMES = 2  # times the tokens of a selection: the longest document that is masked
# Where masks win in the forward, as measured on an H100. With D 128, or with many tiles of queries
# and long rows of groups of 16, block unions do.
MASKED_TILES = 768
MASKED_DIM = 64
MASKED_DIM_ALONE = 128  # of query heads that share their keys with no other
UNION_GROUP = 16
UNION_TIMES = 1.5  # times the tokens of a selection
MASKED_DIM_BACKWARD = 128


@dataclass(frozen=True)
class BackwardRoute:
    """How the backward of one call runs.

    compressed: as of `Route`.
    kernels: "short": every query selected every block. "masked": documents are attended whole,
        and blocks that were not selected masked. "lists": by the inverted index of the selection.
    longest: tokens of the longest document, as far as the host knows.
    short_documents: packed documents of up to so many tokens are masked, others have "lists"; 0:
        none are.
    """

    compressed: Compressed
    kernels: Literal["short", "masked", "lists"]
    longest: int
    short_documents: int = 0

    def __str__(self) -> str:
        line = f"backward: {self.kernels}"
        if self.short_documents and self.kernels == "lists":
            line += f", documents of up to {self.short_documents} tokens masked"
        return line


@dataclass(frozen=True)
class Route:
    """How one call runs. Where rows are not packed, a document is a row.

    compressed: "cudnn", causal attention on the fold, or "ranges", a Triton kernel that takes a
        range of keys for each query: packed documents, offsets and short calls.
    forward: "short": every query selects every block, nothing is scored. "masked": documents are
        attended whole, and blocks that were not selected masked. "epilogue": partial outputs of
        top-k blocks, then one kernel for the rest of both branches and the gates. "two_kernels":
        the selected branch, then the sliding branch with the gates.
    backward: None where none follows.
    longest: tokens of the longest document, as far as the host knows.
    short_queries: the first so many queries of each packed document, which select every block,
        have the short forward, whose results stand; 0: none have.
    short_documents: as of `BackwardRoute`: what the index leaves out.
    no_epilogue: why the forward is "two_kernels".
    """

    compressed: Compressed
    forward: Literal["short", "masked", "epilogue", "two_kernels"]
    backward: BackwardRoute | None
    longest: int
    short_queries: int = 0
    no_epilogue: str | None = None

    @property
    def needs_index(self) -> bool:
        """Whether the forward keeps an inverted index of the selection for the backward."""
        return self.backward is not None and self.backward.kernels == "lists"

    @property
    def short_documents(self) -> int:
        """As of the backward; 0 without one."""
        return 0 if self.backward is None else self.backward.short_documents

    def __str__(self) -> str:
        line = f"forward: {self.forward}"
        if self.forward != "short":
            line += f", compressed branch by {self.compressed}"
        if self.short_queries:
            line += f", first {self.short_queries} queries of each document short"
        if self.no_epilogue:
            line += f" (no epilogue: {self.no_epilogue})"
        return line if self.backward is None else f"{line}\n{self.backward}"


def route_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: NSAConfig,
    *,
    documents: bool,
    max_document_length: int | None,
    differentiable: bool,
    has_offset: bool = False,
    own_window_keys: bool = False,
) -> Route:
    """The route of queries (B, Hq, S, D), keys (B, Hkv, Sk, D) and values (B, Hkv, Sk, Dv).

    Where more keys than queries are given, the queries are the last tokens of their rows; with
    `has_offset`, they may be any.

    Args:
        documents: whether rows are packed.
        max_document_length: tokens of the longest document, where the host knows.
        differentiable: whether a backward follows.
        has_offset: whether queries begin at a position that the device alone knows.
        own_window_keys: whether the sliding branch has keys and values of its own.
    """
    longest = longest_document(query.shape[2], documents, max_document_length)
    call = (query, key, value, config)
    backward = None
    if differentiable:
        backward = backward_route_of(*call, documents, max_document_length)
    query_offset = 0 if has_offset else past_keys(query, key)
    has_offset = has_offset or query_offset > 0
    if backward is not None:
        compressed = backward.compressed
    elif has_offset:  # the device alone knows it
        compressed = "ranges"
    else:
        compressed = compressed_kernels(*call, documents)
    if not has_offset and is_short(longest, config):
        return Route("ranges", "short", backward, longest)
    masks = compressed == "ranges" and not has_offset and masks_forward(*call, longest)
    short_queries = 0
    are_narrow = max(query.shape[3], value.shape[3]) <= MASKED_DIM
    if documents and not has_offset and not (masks and are_narrow):
        # They need no mask and no compressed branch of other kernels: beside masked ones, with
        # narrow heads, that does not make up for a launch.
        short_queries = config.num_selected_tokens
    if masks:
        return Route(compressed, "masked", backward, longest, short_queries)
    has_index = backward is not None and backward.kernels == "lists"
    why = fwd_epilogue.unsupported_reason(
        plan_selected(*call, documents, has_index, has_offset),
        *(query, key, value, config.window_size),
        save=differentiable,
        own_window_keys=own_window_keys,
        query_offset=query_offset,
    )
    forward: Literal["epilogue", "two_kernels"] = "epilogue" if why is None else "two_kernels"
    return Route(compressed, forward, backward, longest, short_queries, why)


def backward_route_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: NSAConfig,
    documents: bool,
    max_document_length: int | None,
) -> BackwardRoute:
    """The route of the backward; arguments as of `route_of`."""
    longest = longest_document(query.shape[2], documents, max_document_length)
    compressed = compressed_kernels(query, key, value, config, documents)
    if past_keys(query, key) > 0:
        return BackwardRoute(compressed, "lists", longest)
    if is_short(longest, config):
        return BackwardRoute("ranges", "short", longest)
    if masks_backward(query, key, value, config, longest):
        return BackwardRoute(compressed, "masked", longest)
    most = min(MASKED_TIMES * config.num_selected_tokens, MAX_BLOCKS * config.select_block_size)
    if not documents or not masks_backward(query, key, value, config, most):
        most = 0
    return BackwardRoute(compressed, "lists", longest, most)


def rounded_length(max_document_length: int, config: NSAConfig) -> int:
    """Rounded up, so that packs of other longest documents have the same launch plans."""
    short = config.num_selected_tokens
    return (max_document_length + short - 1) // short * short


def longest_document(tokens: int, documents: bool, max_document_length: int | None) -> int:
    """Tokens of the longest document of rows of `tokens`, as far as the host knows."""
    if not documents or max_document_length is None:
        return tokens
    return min(max_document_length, tokens)


def is_short(longest: int, config: NSAConfig) -> bool:
    """Whether every query of documents of up to `longest` tokens selects every block."""
    return longest <= config.num_selected_tokens


def past_keys(query: Tensor, key: Tensor) -> int:
    """Keys before query 0, where the queries are the last tokens of their rows."""
    return key.shape[2] - query.shape[2]


def offsets_of(query: Tensor, key: Tensor) -> Tensor | None:
    """int32 (B, Hkv): key index of query 0, where the queries are the last tokens; None: 0."""
    past = past_keys(query, key)
    if past == 0:
        return None
    return torch.full(key.shape[:2], past, dtype=torch.int32, device=query.device)


def starts_by_position(document_start: Tensor | None, past: int) -> Tensor | None:
    """int32 (B, Sk) from (B, S): by position, 0 of the `past` keys before query 0."""
    if document_start is None or past == 0:
        return document_start
    return F.pad(document_start, (past, 0))


def compressed_kernels(
    query: Tensor, key: Tensor, value: Tensor, config: NSAConfig, documents: bool
) -> Compressed:
    """`Route.compressed` where the queries are all tokens of their rows, or the last ones."""
    batch, _, tokens, _ = query.shape
    past = past_keys(query, key)
    is_ranged = documents or tokens <= RANGES_ROW or is_host_bound(batch * tokens)
    if is_ranged or (past > 0 and not cudnn_takes_past(query, value, config, past)):
        return "ranges"
    return "cudnn"


def cudnn_takes_past(query: Tensor, value: Tensor, config: NSAConfig, past: int) -> bool:
    """Whether cuDNN takes dtype and head dims on every device, and so few keys before query 0."""
    least = max(LEAST_PAST, config.compress_block_size)
    dims = (query.shape[3], value.shape[3])
    return query.dtype in CUDNN_DTYPES and max(dims) <= 128 and past >= least


def is_host_bound(num_tokens: int) -> bool:
    """Whether the host's time counts in calls of so many tokens in all rows."""
    return num_tokens <= RANGES_TOKENS


def is_one_operator(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: NSAConfig,
    documents: bool,
    max_document_length: int | None,
) -> bool:
    """Whether the backward is one operator: of short calls, and in most graphs of any length.

    `is_of_any_length` goes first. Two of them free the outputs of branches in between. Kernels of
    short and of masked rows need these to the end, and each operator takes the host's time.
    """
    batch, _, tokens, _ = query.shape
    if not isinstance(batch, int) or not isinstance(tokens, int) or is_host_bound(batch * tokens):
        return True
    longest = longest_document(tokens, documents, max_document_length)
    return is_short(longest, config) or masks_backward(query, key, value, config, longest)


def is_of_any_length(query: Tensor, value: Tensor, config: NSAConfig, documents: bool) -> bool:
    """Whether two operators run the backward that take any length, short ones with copies.

    In graphs of any length that were traced at one where memory counts. Nothing here is a guard.
    """
    batch, _, tokens, dim = query.shape
    rows, length = _length_traced(batch), _length_traced(tokens)
    is_known = rows is batch and length is tokens
    is_long = length > MASKED_TIMES * config.num_selected_tokens
    is_taken = not documents and dim == value.shape[3]
    return not is_known and is_taken and is_long and not is_host_bound(rows * length)


def rows_kept(tokens: int, config: NSAConfig) -> int:
    """`tokens`, up to those of the longest rows in which kernels other than "lists" may run."""
    return torch.sym_min(tokens, MASKED_TIMES * config.num_selected_tokens)


def _length_traced(length: Any) -> int:
    """What a length was when its graph was traced; 0 where that is not known."""
    return length if isinstance(length, int) else getattr(length.node, "hint", None) or 0


def masks_forward(
    query: Tensor, key: Tensor, value: Tensor, config: NSAConfig, longest: int
) -> bool:
    """Whether the forward of documents of up to `longest` tokens masks what was not selected."""
    batch, heads, tokens, _ = query.shape
    tiles = masked_tiles(query, key, value)
    group = heads // key.shape[1]
    beats_unions = (
        batch * heads * cdiv(tokens, tiles.block_m) <= MASKED_TILES
        or longest <= UNION_TIMES * config.num_selected_tokens
        or group < UNION_GROUP
        or group != next_power_of_2(group)
    )
    most_dim = MASKED_DIM_ALONE if group == 1 else MASKED_DIM
    return beats_unions and _masks_fit(query, value, config, tiles.block_n, most_dim, longest)


def masks_backward(
    query: Tensor, key: Tensor, value: Tensor, config: NSAConfig, longest: int
) -> bool:
    """As `masks_forward`, of the backward."""
    plan = plan_of(query, key, value)
    block_n = max(plan.bwd_dq.block_n, plan.bwd_dkdv.block_n)
    return _masks_fit(query, value, config, block_n, MASKED_DIM_BACKWARD, longest)


def _masks_fit(
    query: Tensor, value: Tensor, config: NSAConfig, block_n: int, most_dim: int, longest: int
) -> bool:
    """Each tile of keys lies in one block, and the words of a mask hold all blocks."""
    size = config.select_block_size
    return (
        max(query.shape[3], value.shape[3]) <= most_dim
        and longest <= MASKED_TIMES * config.num_selected_tokens
        and longest <= MAX_BLOCKS * size
        and size % block_n == 0
    )


def plan_selected(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: NSAConfig,
    documents: bool,
    differentiable: bool,
    has_offset: bool = False,
) -> SelectedPlan:
    """Sizes of the selected branch's kernels.

    A document's first blocks are top-k blocks there: initial blocks are counted from the start of
    the row, where only the first document begins.
    """
    return SelectedPlan.of(
        query,
        key,
        value,
        config.num_selected_blocks,
        config.select_block_size,
        0 if documents else config.num_initial_blocks,
        config.num_local_blocks,
        0,
        differentiable=differentiable,
        offset_tensor=has_offset,
    )
