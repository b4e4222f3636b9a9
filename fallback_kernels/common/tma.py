"""Descriptors of tensors for TMA, Hopper's copies of whole tiles."""

from __future__ import annotations

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa_flex.fallback_kernels.common.arch import supports_tma
from nsa_flex.fallback_kernels.common.tiles import tile_width


def descriptor(tensor: Tensor, tokens: int) -> TensorDescriptor | None:
    """TMA descriptor of tiles (1, 1, tokens, BLOCK_D) of a (B, H, S, D) tensor.

    None where the device has no TMA, or where TMA cannot take the tensor's strides: bytes in
    multiples of 16, none zero. The kernel then loads by pointers.
    """
    if not supports_tma(tensor.device):
        return None
    width, element = tensor.shape[3], tensor.element_size()
    # The stride of a dimension of size 1 is never used, yet it is checked.
    unused = tile_width(width)
    steps = [
        unused if size == 1 else step
        for size, step in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
    ]
    if element != 2 or tensor.data_ptr() % 16 or any(s <= 0 or s * element % 16 for s in steps):
        return None
    block = [1, 1, tokens, tile_width(width)]
    return TensorDescriptor(tensor, list(tensor.shape), [*steps, 1], block)
