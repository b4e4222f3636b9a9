"""Random calls of `nsa_attention` that together take every route, the same on every machine."""

from __future__ import annotations

import random
from dataclasses import dataclass

from nsa_flex import NSAConfig

# What stands there twice is drawn twice as often.
DIMS = ((64, 64), (128, 128), (128, 128), (192, 128), (32, 48), (80, 80), (256, 256))
GROUPS = (1, 2, 3, 4, 4, 6, 7, 8, 16, 16, 24)
LENGTHS = (1, 31, 64, 200, 700, 1024, 1290, 1500, 2048, 2101, 4096, 5003, 8192, 8210, 12001)
CONFIGS = (
    NSAConfig(),
    NSAConfig(),
    NSAConfig(window_size=129),
    NSAConfig(16, 16, 16, 16, 0, 1, 128),
    NSAConfig(32, 16, 128, 8),
    NSAConfig(num_selected_blocks=32, num_local_blocks=1),
)
DTYPES = ("bfloat16", "bfloat16", "bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Call:
    """One call of `nsa_attention`. Lengths in tokens; documents: where each begins, or None."""

    batch: int
    num_kv_heads: int
    group: int
    num_tokens: int
    head_dim: int
    value_head_dim: int
    dtype: str
    config: int
    documents: tuple[int, ...] | None
    tells_longest: bool
    offset: int | None
    needs_grad: bool
    own_window_keys: bool


def random_call(seed: int) -> Call:
    """The call of a seed, the same on every machine."""
    draw = random.Random(seed)
    group = draw.choice(GROUPS)
    head_dim, value_head_dim = draw.choice(DIMS)
    dtype = draw.choice(DTYPES)
    length = draw.choice(LENGTHS)
    if dtype == "float32" or head_dim > 192:  # some branches of these form all scores
        length = min(length, 2101)
    kind = draw.choice(("row", "row", "documents", "documents", "offset"))
    config = draw.randrange(len(CONFIGS))
    documents = None
    if kind == "documents":
        size = CONFIGS[config].select_block_size
        longest = draw.choice((3 * size, 1024, 2048, 1 << 20))
        documents = _starts(draw, length, size, longest)
    return Call(
        batch=draw.choice((1, 1, 1, 2, 3)) if length < 5000 else 1,
        num_kv_heads=draw.choice((1, 2)),
        group=group,
        num_tokens=length,
        head_dim=head_dim,
        value_head_dim=value_head_dim,
        dtype=dtype,
        config=config,
        documents=documents,
        tells_longest=draw.random() < 0.5,
        offset=draw.choice((0, 5, 777, 3000)) if kind == "offset" else None,
        needs_grad=draw.random() < 0.75,
        own_window_keys=draw.random() < 0.2,
    )


def _starts(draw: random.Random, length: int, size: int, longest: int) -> tuple[int, ...]:
    """Multiples of `size`, at most `longest` apart."""
    starts = [0]
    while starts[-1] < length:
        starts.append(starts[-1] + size * draw.randint(1, max(1, min(longest, length) // size)))
    return tuple(starts[:-1]) or (0,)


def longest_document(call: Call) -> int:
    """Tokens of the longest document of packed rows."""
    assert call.documents is not None
    ends = [*call.documents[1:], call.num_tokens]
    return max(end - start for start, end in zip(call.documents, ends, strict=True))
