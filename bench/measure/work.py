"""Useful FLOPs and bytes of a case: what any implementation has to do, by sizes alone.

FLOPs of attention over P visible pairs of a query head and a key: a multiplication and an addition
for each of D (scores) and Dv (values),

    forward   P * (2 D + 2 Dv)
    backward  P * (6 D + 4 Dv)      scores again, dQ, dK; dP, dV

summed over the parts: compressed, selected, sliding, and the choice of blocks, which computes the
scores of all visible compressed blocks a second time, P * 2 D, forward only. Softmax, Eq. 9, gates
and compression by means are left out: they are no matrix products.

Bytes: every input read once, every output written once, at the size of its dtype; the backward
reads the inputs and the incoming gradient and writes a gradient of each input. The floor is
max(FLOPs / matrix rate, bytes / memory rate) with both rates measured in the same run. It ignores
caches, launches and softmax, so that no implementation reaches it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nsa_flex.bench.cases.case import Case
from nsa_flex.config import NSAConfig


@dataclass(frozen=True)
class Work:
    """FLOPs of matrix products and bytes of memory."""

    flops: float
    bytes: float

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def floor_ms(self, flops_per_second: float, bytes_per_second: float) -> float:
        """The least time at these rates."""
        return 1e3 * max(self.flops / flops_per_second, self.bytes / bytes_per_second)

    def columns(self, ceilings: Mapping[str, float], median_ms: float) -> dict[str, float]:
        """What a row says of the work that took `median_ms` on a machine of these rates."""
        floor = self.floor_ms(ceilings["matrix_tflops"] * 1e12, ceilings["memory_gb_per_s"] * 1e9)
        return {
            "flops": self.flops,
            "bytes": self.bytes,
            "floor_ms": round(floor, 4),
            "over_floor": round(median_ms / floor, 2),
        }


def keys_seen(part: str, length: int, config: NSAConfig) -> int:
    """Sum over the S queries of the keys that each sees in `part`.

    part: dense, compressed, selected or sliding.

    >>> keys_seen("dense", 4, NSAConfig()), keys_seen("sliding", 4, NSAConfig(window_size=2))
    (10, 7)
    """
    if part == "dense":
        return _up_to(length)
    if part == "compressed":
        blocks, rest = divmod(
            max(0, length - config.compress_block_size + 1), config.compress_stride
        )
        return config.compress_stride * _up_to(blocks) + rest * (blocks + 1)
    if part == "selected":
        size, most = config.select_block_size, config.num_selected_blocks - 1
        own, rest = divmod(length, size)
        earlier = size * _capped(own, most) + rest * min(own, most)
        return size * earlier + own * _up_to(size) + _up_to(rest)
    return _capped(length + 1, config.window_size)


def _up_to(n: int) -> int:
    """1 + ... + n."""
    return n * (n + 1) // 2


def _capped(n: int, most: int) -> int:
    """The sum of min(i, most) over i < n."""
    return _up_to(min(n - 1, most)) + max(0, n - 1 - most) * most


def parts_of(case: Case) -> tuple[str, ...]:
    """The attentions that a case consists of."""
    if case.target != "core":
        return (case.target,)
    nsa = case.implementation.startswith("nsa")
    return ("compressed", "choice", "selected", "sliding") if nsa else ("dense",)


def work_of(case: Case, which: str) -> Work:
    """Work of one pass: forward, backward or forward_backward."""
    if which == "forward_backward":
        return work_of(case, "forward") + work_of(case, "backward")
    flops = sum(_flops(part, case, which) for part in parts_of(case))
    inputs, outputs = _elements(case)
    size = case.torch_dtype.itemsize
    moved = inputs + outputs if which == "forward" else 2 * inputs + outputs
    return Work(flops, moved * size + _index_bytes(case))


def _flops(part: str, case: Case, which: str) -> float:
    if part == "merge":
        return 0.0
    if part == "compression":
        return _compression_flops(case) * (1 if which == "forward" else 2)
    heads = case.batch * case.query_heads
    if part == "choice":
        pairs = heads * keys_seen("compressed", case.seq_len, case.config)
        return pairs * 2.0 * case.head_dim if which == "forward" else 0.0
    pairs = heads * keys_seen(part, case.seq_len, case.config)
    if which == "forward":
        return pairs * (2.0 * case.head_dim + 2.0 * case.value_dim)
    return pairs * (6.0 * case.head_dim + 4.0 * case.value_dim)


def _compression_flops(case: Case) -> float:
    """Matrix products of φ, D x D: linear one a token of a block, mlp two, and two a block."""
    config, dim = case.config, case.head_dim
    blocks = case.batch * case.kv_heads * config.num_compressed_blocks(case.seq_len)
    per_token = {"linear": 1, "mlp": 2}.get(config.compression, 0)
    last = 2 if config.compression == "mlp" else 0
    return blocks * 2.0 * dim * dim * (per_token * config.compress_block_size + last)


def _elements(case: Case) -> tuple[int, int]:
    """Elements of the inputs that carry gradients, and of the output."""
    tokens = case.batch * case.seq_len
    blocks = case.batch * case.config.num_compressed_blocks(case.seq_len)
    query, key = case.query_heads * case.head_dim, case.kv_heads * case.head_dim
    value, out = case.kv_heads * case.value_dim, tokens * case.query_heads * case.value_dim
    gates = 3 * tokens * case.query_heads
    if case.target == "compression":
        return tokens * key, blocks * key
    if case.target == "merge":
        return 3 * out + gates, out
    if case.target == "choice":
        return tokens * query + blocks * key, 0
    if case.target == "compressed":
        return tokens * query + blocks * (key + value), out
    if case.target == "core" and case.implementation.startswith("nsa"):
        return tokens * (query + key + value) + gates, out
    return tokens * (query + key + value), out


def _index_bytes(case: Case) -> int:
    """int32 block indices that the choice writes and the selected branch reads."""
    if case.target not in ("choice", "selected"):
        return 0
    return 4 * case.batch * case.kv_heads * case.seq_len * case.config.num_selected_blocks
