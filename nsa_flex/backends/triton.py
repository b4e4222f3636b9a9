"""The selected and the sliding branch on hand-tuned Triton kernels."""

from __future__ import annotations

from torch import Tensor

from nsa_flex.backends.branch import Branch


def selected(branch: Branch) -> tuple[Tensor, Tensor]:
    """Branch 2, key blocks outermost, whatever blocks are chosen."""
    from nsa_flex.fallback_kernels.selected.interface import selected_attention

    assert branch.blocks is not None
    config = branch.config
    return selected_attention(
        branch.query,
        branch.key,
        branch.value,
        branch.blocks,
        block_size=config.select_block_size,
        num_initial_blocks=config.num_initial_blocks,
        num_local_blocks=config.num_local_blocks,
        scale=branch.scale,
    )


def sliding(branch: Branch) -> tuple[Tensor, Tensor]:
    """Branch 3, tiles of tokens times the heads of a group."""
    from nsa_flex.fallback_kernels.sliding.interface import sliding_attention

    return sliding_attention(
        branch.query,
        branch.key,
        branch.value,
        window_size=branch.config.window_size,
        scale=branch.scale,
    )
