"""Which kernels run, and which should of a decode step of some branches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from typing import Any

from nsa_flex.config import BRANCHES

SUBSETS = [kept for number in (1, 2) for kept in combinations(BRANCHES, number)]


@contextmanager
def launched() -> Iterator[list[str]]:
    """Names of the kernels that run within, where no plan is replayed."""
    from nsa_flex.fallback_kernels.common.launches import intercepting_launches
    from nsa_flex.fallback_kernels.launch import plans

    names: list[str] = []

    def launch(kernel: Any, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names.append(kernel.fn.__name__)
        kernel.run(*args, grid=grid, warmup=False, **kwargs)

    with plans.without_plans(), intercepting_launches(launch):
        yield names


def decode_kernels_of(branches: tuple[str, ...], *, stores: bool) -> list[str]:
    """Those of a decode step of one new token, which the first kernel stores if `stores`."""
    names = ["decode_append_kernel"] if stores and branches == ("sliding",) else []
    if branches != ("sliding",):
        names.append("decode_compressed_kernel")
    if "selected" in branches:
        names.append("decode_topk_kernel")
    if branches != ("compressed",):
        names.append("decode_selected_sliding_kernel")
    return [*names, "decode_combine_kernel"]
