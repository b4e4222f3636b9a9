"""The one description of an NSA layer: block sizes, counts and the window."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

BranchName = Literal["compressed", "selected", "sliding"]
BRANCHES: tuple[BranchName, ...] = get_args(BranchName)
CompressionKind = Literal["mean", "weighted", "linear", "mlp"]
SelectionRule = Literal["top_k", "tiled_top_k", "max_pool"]
RULES: tuple[SelectionRule, ...] = get_args(SelectionRule)
# What kernels compute: those of a decode step and of all branches together, and the top-k's.
SUMMING_RULES: tuple[SelectionRule, ...] = ("top_k", "tiled_top_k")
KERNEL_RULES: tuple[SelectionRule, ...] = (*SUMMING_RULES, "max_pool")
PRODUCTS: tuple[CompressionKind, ...] = ("linear", "mlp")  # matrix products with the weights
_MOST = 2**63 - 1  # of any size: operators take int64


def checked_int(name: str, value: Any) -> int:
    """What is an integer, NumPy's too, as an int.

    Raises:
        TypeError: it is none.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value  # before attributes are asked for, which compiled code cannot
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    return operator.index(value)


@dataclass(frozen=True)
class NSAConfig:
    """Hyperparameters of Native Sparse Attention (arXiv 2502.11089, sections 3 and 4.1).

    Args:
        compress_block_size: l, tokens that one compressed key or value summarises.
        compress_stride: d, tokens between the starts of neighbouring compressed blocks.
        select_block_size: l', tokens of one selectable block.
        num_selected_blocks: n, blocks each query and KV head attends, forced ones included.
        num_initial_blocks: blocks at the start of the document that are always chosen.
        num_local_blocks: blocks ending at the query's own (included) that are always chosen.
        window_size: w, keys the sliding branch sees, the query itself included.
        compression: form of the map from l keys (or values) to one, see `Compression`.
        selection: which blocks the scores choose. "top_k": the best of all. "tiled_top_k", that
            of NSA-1B: a query's own tile of n blocks, counted from its document's start, gives
            its best n/2, and so do the blocks before that tile; in the first tile all are chosen.
            "max_pool", that of InfLLM-V2: the best of all, where a block's score is the highest
            of the compressed blocks that overlap it, not their sum.
        branches: those there are. An absent one has no gate and is not computed; the selected
            branch chooses by compressed keys all the same.

    Raises:
        TypeError: a count is not an int.
        ValueError: d does not divide l or l', l > l', n < initial + local, or a size is < 1; an
            unknown name; no branch; or "tiled_top_k" with an odd n, or forced blocks beside the
            query's own.

    >>> NSAConfig(window_size=256).num_compressed_blocks(100)
    5
    """

    compress_block_size: int = 32
    compress_stride: int = 16
    select_block_size: int = 64
    num_selected_blocks: int = 16
    num_initial_blocks: int = 1
    num_local_blocks: int = 2
    window_size: int = 512
    compression: CompressionKind = "mean"
    selection: SelectionRule = "top_k"
    branches: tuple[BranchName, ...] = BRANCHES

    def __post_init__(self) -> None:
        for name in _COUNTS:
            self._check_count(name)
        for name, known in (("compression", get_args(CompressionKind)), ("selection", RULES)):
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(known)}")
        self._check_branches()
        for name in ("compress_block_size", "select_block_size"):
            if getattr(self, name) % self.compress_stride:
                raise ValueError(
                    f"compress_stride={self.compress_stride} must divide "
                    f"{name}={getattr(self, name)}"
                )
        if self.compress_block_size > self.select_block_size:
            raise ValueError(
                f"compress_block_size={self.compress_block_size} must be at most "
                f"select_block_size={self.select_block_size}"
            )
        if self.num_selected_blocks < self.num_forced_blocks:
            raise ValueError(
                f"num_selected_blocks={self.num_selected_blocks} must be at least "
                f"num_initial_blocks + num_local_blocks = {self.num_forced_blocks}"
            )
        if self.selection == "tiled_top_k":
            self._check_tiles()

    def _check_branches(self) -> None:
        is_several = isinstance(self.branches, Iterable) and not isinstance(self.branches, str)
        given = tuple(self.branches) if is_several else ()
        if not given or not set(given) <= set(BRANCHES):
            raise ValueError(
                f"branches is {self.branches!r}; it must name some of {', '.join(BRANCHES)}"
            )
        ordered = tuple(name for name in BRANCHES if name in given)
        object.__setattr__(self, "branches", ordered)  # JSON has lists

    def _check_tiles(self) -> None:
        if self.num_selected_blocks % 2:
            raise ValueError(
                f"num_selected_blocks={self.num_selected_blocks} must be even: tiled_top_k takes "
                "one half before the query's tile and one inside"
            )
        if (self.num_initial_blocks, self.num_local_blocks) != (0, 1):
            raise ValueError(
                f"num_initial_blocks={self.num_initial_blocks} and "
                f"num_local_blocks={self.num_local_blocks} must be 0 and 1: tiled_top_k forces a "
                "query's own block alone"
            )

    def _check_count(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {type(value).__name__} {value!r}")
        least = 0 if name == "num_initial_blocks" else 1
        if value < least:
            raise ValueError(f"{name}={value} must be at least {least}")
        if value > _MOST:
            raise ValueError(f"{name}={value} must be at most {_MOST}")

    def specialize(self) -> None:
        """Makes a compiled graph treat every count as a constant, guarded by its value.

        Dynamo turns an integer attribute that changed between calls into a symbol; tile sizes,
        slots and strides must not be symbols. Costs nothing outside of tracing.
        """
        for count in self.counts:
            operator.index(count)

    @property
    def counts(self) -> list[int]:
        """What an operator takes in a config's place: the numbers in order.

        Behind them, where one is not the default, the indices of `selection` and `branches` among
        what they may be.
        """
        numbers = [
            self.compress_block_size,
            self.compress_stride,
            self.select_block_size,
            self.num_selected_blocks,
            self.num_initial_blocks,
            self.num_local_blocks,
            self.window_size,
        ]
        if self.selection == "top_k" and self.branches == BRANCHES:
            return numbers
        branches = [BRANCHES.index(name) for name in self.branches]
        return [*numbers, RULES.index(self.selection), *branches]

    @staticmethod
    def of_counts(counts: Sequence[int]) -> NSAConfig:
        """Inverse of `counts`, with the default `compression`."""
        return _of_counts(tuple(counts))

    def has(self, branch: BranchName) -> bool:
        """Whether there is this branch."""
        return branch in self.branches

    @property
    def compresses(self) -> bool:
        """Whether a branch reads compressed keys: the compressed one, or the selected one."""
        return self.has("compressed") or self.has("selected")

    @property
    def num_forced_blocks(self) -> int:
        """Blocks chosen whatever their score: initial plus local."""
        return self.num_initial_blocks + self.num_local_blocks

    @property
    def num_selected_tokens(self) -> int:
        """n * l': in documents of no more tokens, every query selects every block."""
        return self.num_selected_blocks * self.select_block_size

    def selects_every_block(
        self, num_tokens: int, documents: bool, max_document_length: int | None
    ) -> bool:
        """Whether each query has all blocks of its document, as far as the host knows.

        Args:
            num_tokens: of a row, which is one document unless there are `documents`.
            max_document_length: tokens of the longest document; None if nobody knows.
        """
        longest = num_tokens
        if documents and max_document_length is not None:
            longest = min(longest, max_document_length)
        return longest <= self.num_selected_tokens

    def num_compressed_blocks(self, num_tokens: int) -> int:
        """N = max(0, (S - l) // d + 1): only whole blocks exist."""
        return max(0, (num_tokens - self.compress_block_size) // self.compress_stride + 1)

    def num_select_blocks(self, num_tokens: int) -> int:
        """Selectable blocks of a document, the last one perhaps partial: ceil(S / l')."""
        return -(-num_tokens // self.select_block_size)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; `from_dict` is its inverse."""
        return {**dataclasses.asdict(self), "branches": list(self.branches)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> NSAConfig:
        """Inverse of `to_dict`; unknown names raise ValueError and are listed."""
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"unknown NSAConfig fields {unknown}; known are {sorted(known)}")
        return cls(**values)


_COUNTS = tuple(field.name for field in dataclasses.fields(NSAConfig) if field.type == "int")


@lru_cache(maxsize=256)
def _of_counts(counts: tuple[int, ...]) -> NSAConfig:
    """Checked once: operators ask for the same config in every layer and step."""
    size = len(_COUNTS)
    config = NSAConfig(*counts[:size])  # type: ignore[arg-type]  # the other fields come behind
    if len(counts) == size:
        return config
    rule, *branches = counts[size:]
    names = tuple(BRANCHES[each] for each in branches)
    return dataclasses.replace(config, selection=RULES[rule], branches=names)
