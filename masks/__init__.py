"""Mask functions and analytic BlockMasks of the three branches, and pictures of them.

Every mask is a FlexAttention `mask_mod` (a function of batch, head, query row and key index) that
encodes the branch completely, and a `BlockMask` whose tables are computed from shapes and chosen
block indices alone. Nothing but `materialize` evaluates a mask over queries x keys; `show` uses it
to draw.
"""

from nsa_flex.masks.block_mask import materialize
from nsa_flex.masks.compressed import (
    compressed_block_mask,
    compressed_mask_mod,
    folded_block_mask,
    folded_mask_mod,
)
from nsa_flex.masks.selected import selected_block_mask, selected_mask_mod
from nsa_flex.masks.show import show
from nsa_flex.masks.sliding import sliding_block_mask, sliding_mask_mod

__all__ = [
    "compressed_block_mask",
    "compressed_mask_mod",
    "folded_block_mask",
    "folded_mask_mod",
    "materialize",
    "selected_block_mask",
    "selected_mask_mod",
    "show",
    "sliding_block_mask",
    "sliding_mask_mod",
]
