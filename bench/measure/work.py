"""Useful FLOPs and bytes of a case: what any implementation has to do, by sizes alone.

FLOPs of attention are those of `nsa_flex.flops`; compression by means has no matrix products.

Bytes: every input read once, every output written once, at the size of its dtype; the backward
reads the inputs and the incoming gradient and writes a gradient of each input. The floor is
max(FLOPs / matrix rate, bytes / memory rate) with both rates measured in the same run. It ignores
caches, launches and softmax, so that no implementation reaches it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nsa_flex.bench.cases.case import Case
from nsa_flex.flops import CORE, attention_flops

# What a layer's attention consists of where it is sparse. Without an indexer's own scores, or the
# log-sum-exp that scores are taken by.
LAYERS = {"core": CORE, "infllm-v2": ("choice", "selected"), "minimax-m3": ("selected",)}


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


def parts_of(case: Case) -> tuple[str, ...]:
    """The attentions that a case consists of."""
    if case.target not in LAYERS:
        return (case.target,)
    nsa = case.implementation.startswith("nsa")
    return LAYERS[case.target] if nsa else ("dense",)


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
    sizes = (case.seq_len, case.head_dim, case.value_dim)
    return case.batch * case.query_heads * attention_flops(part, which, *sizes, case.config)


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
    if case.target not in ("choice", "selected"):  # elsewhere nobody has to write them
        return 0
    return 4 * case.batch * case.kv_heads * case.seq_len * case.config.num_selected_blocks
