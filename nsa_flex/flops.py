"""FLOPs of attention by sizes alone, from the pairs of a query and a key that it sees.

A pair of one query head takes a multiplication and an addition for each of D (scores) and
Dv (values):

    forward   2 D + 2 Dv
    backward  6 D + 4 Dv      scores again, dQ, dK; dP, dV

The choice of blocks computes the scores of all visible compressed blocks a second time, 2 D,
forward only; without a compressed branch, whose log-sum-exp it takes, both times. Softmax, Eq. 9
and gates are left out: they are no matrix products.
"""

from __future__ import annotations

from nsa_flex.config import NSAConfig

CORE = ("compressed", "choice", "selected", "sliding")


def core_parts(config: NSAConfig) -> tuple[str, ...]:
    """What a call computes: the parts of `CORE` that the branches of the config need."""
    return tuple(p for p in CORE if config.has("selected" if p == "choice" else p))  # type: ignore[arg-type]


def attention_flops(
    part: str, which: str, length: int, head_dim: int, value_dim: int, config: NSAConfig
) -> float:
    """FLOPs of one query head over a row of `length` tokens.

    part: dense, compressed, choice, selected or sliding. which: forward or backward.
    """
    if part == "choice":
        seen = keys_seen("compressed", length, config)
        passes = 1.0 if config.has("compressed") else 2.0
        return seen * passes * 2.0 * head_dim if which == "forward" else 0.0
    seen = keys_seen(part, length, config)
    if which == "forward":
        return seen * (2.0 * head_dim + 2.0 * value_dim)
    return seen * (6.0 * head_dim + 4.0 * value_dim)


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
