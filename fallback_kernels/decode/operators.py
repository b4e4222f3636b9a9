"""The custom operator of a decode step and its fake implementation.

Its body checks the call. A replayed plan does not: it is kept by all that is checked, but for the
devices, which `interface` compares. `mutates_args` tells functionalisation which buffers of the
cache a step writes in place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa_flex.config import NSAConfig
from nsa_flex.fallback_kernels.common.strides import rows_contiguous
from nsa_flex.fallback_kernels.decode import checks
from nsa_flex.fallback_kernels.decode.compress_launch import launch_compress
from nsa_flex.fallback_kernels.decode.config import DecodePlan
from nsa_flex.fallback_kernels.decode.launch import (
    Cache,
    Gating,
    Phi,
    fake_results,
    launch_append,
    run,
)
from nsa_flex.fallback_kernels.launch.plans import planned

CACHE = ("key", "value", "compressed_key", "compressed_value")


@torch.library.custom_op("nsa_flex::decode_step", mutates_args=CACHE)
@planned
def step(
    query: Tensor,
    new_key: Tensor | None,
    new_value: Tensor | None,
    key: Tensor,
    value: Tensor,
    compressed_key: Tensor,
    compressed_value: Tensor,
    gates: Tensor,
    gate_offset: Tensor | None,
    gate_bias: Tensor | None,
    lengths: Tensor,
    phi: list[Tensor],
    kind: str,
    may_complete: bool,
    num_sets: int,
    scale: float,
    counts: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Under `interface.step`.

    phi: parameters of keys, then those of values; none of a product that is not computed.
    counts: those of an `NSAConfig`.
    """
    config = NSAConfig.of_counts(counts)
    half, cache = len(phi) // 2, (key, value, compressed_key, compressed_value)
    mapping = Phi(kind, tuple(phi[:half]), tuple(phi[half:]))
    checks.check_step(
        query, new_key, new_value, cache, gates, (gate_offset, gate_bias), lengths, config,
        num_sets, kind, (mapping.key, mapping.value), may_complete,
    )  # fmt: skip
    # Kernels write values beside keys: to one row where no branch reads them.
    compressed_value = compressed_value.expand(-1, -1, compressed_key.shape[2], -1)
    keys, values = _branches(key, num_sets), _branches(value, num_sets)
    rest = (compressed_key, compressed_value, lengths)
    compressed, selected, sliding = (Cache(k, v, *rest) for k, v in zip(keys, values, strict=True))
    new = None
    query = rows_contiguous(query)  # no kernel may come between those of φ and attention
    if new_key is not None and new_value is not None:
        new = (rows_contiguous(new_key.to(key.dtype)), rows_contiguous(new_value.to(key.dtype)))
    # One token of one set is left to the kernel of the compressed keys, with φ that is no product.
    waits = new is not None and num_sets == 1 and query.shape[2] == 1 and config.compresses
    multiplies = config.compresses and mapping.is_product
    if new is not None and not waits:
        compresses = config.compresses and not multiplies
        launch_append(new, Cache(key, value, *rest), mapping if compresses else None, config)
    behind_phi = new is not None and multiplies and may_complete
    if behind_phi:
        launch_compress(compressed, query.shape[2], new if waits else None, mapping, config)
    plan = DecodePlan.of(query, selected.key, selected.value, compressed_key, config)
    return run(
        plan,
        query,
        selected,
        Gating(gates, gate_offset, gate_bias),
        scale,
        (sliding.key, sliding.value),
        new if waits else None,
        None if mapping.is_product or not waits else mapping,
        behind_phi=behind_phi,
    )


@planned
def output(*args: Any) -> Tensor:
    """The first result of `step` alone, (B, Hq, T, Dv): the others need no memory of their own."""
    out: Tensor = step._init_fn.__wrapped__(*args)[0]  # type: ignore[attr-defined]
    return out.transpose(1, 2)


def _branches(x: Tensor, num_sets: int) -> tuple[Tensor, ...]:
    """Heads of the compressed, selected and sliding branch."""
    return (x, x, x) if num_sets == 1 else x.chunk(3, 1)


@step.register_fake
def _(
    query: Tensor, new_key: Any, new_value: Any, key: Tensor, value: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *_, num_sets, _, counts = others
    kv_heads, config = key.shape[1] // num_sets, NSAConfig.of_counts(counts)
    return fake_results(query, kv_heads, value.shape[3], config)
