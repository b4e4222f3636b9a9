"""Lets FlexAttention's backward run on Q blocks smaller than 128 rows. Private torch API.

In torch 2.11 to 2.13 Inductor offers the bf16 and fp16 backward on sm_90 only tiles that divide
(128, 128) blocks (mended in 2.14, pytorch issue 176025), so that a BlockMask with one query a Q
block raises NoValidChoicesError. This adds the missing choice, for such masks only.

The method itself is replaced, not the handler of `V.choices`: handlers are held a thread, and
autograd compiles backward graphs in threads of its own.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.torch_version import TorchVersion

MENDED_IN = TorchVersion("2.14")
SMALLEST_STOCK_BLOCK = 128


@torch.compiler.assume_constant_result
def allow_small_block_backward() -> bool:
    """Installs the choice once, also while a graph is traced; whether it was needed."""
    return _install()


@functools.cache
def _install() -> bool:
    if torch.__version__ >= MENDED_IN:
        return False
    from torch._inductor.choices import InductorChoices

    stock = InductorChoices.get_flex_attention_bwd_configs

    @functools.wraps(stock)
    def configs(self: Any, head_dim: int, dtype: torch.dtype, device_type: str | None = "cuda"):
        small = _small_block_config(_lowered_block_size())
        return [small] if small is not None else stock(self, head_dim, dtype, device_type)

    InductorChoices.get_flex_attention_bwd_configs = configs  # type: ignore[method-assign]
    return True


def _lowered_block_size() -> tuple[int, int] | None:
    """(Q, KV) block size of the flex_attention_backward that Inductor is lowering now."""
    from torch._inductor.virtualized import V

    node = getattr(V.graph, "current_node", None)
    if node is None or node.target is not torch.ops.higher_order.flex_attention_backward:
        return None
    block_mask = node.args[9]
    return _size(block_mask[10]), _size(block_mask[11])


def _size(argument: Any) -> int:
    """A size in a graph's arguments: a number, or the node of one that was a symbol at first."""
    return int(argument.meta["val"] if isinstance(argument, torch.fx.Node) else argument)


def _small_block_config(block_size: tuple[int, int] | None) -> Any | None:
    """Tiles for a Q block below 128 rows: dK/dV by (M1, N1), dQ by (M2, N2); None otherwise.

    The kernel wants N1 a multiple of M1 and M2 of N2, each dividing its block.
    """
    if block_size is None or block_size[0] >= SMALLEST_STOCK_BLOCK:
        return None
    from torch._inductor.template_heuristics.triton import FlexBwDConfig

    rows, columns = min(block_size[0], 64), min(block_size[1], 64)
    small = min(rows, columns)
    return FlexBwDConfig(small, columns, rows, small, 3, 4)
