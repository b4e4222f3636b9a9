"""The attention that transformers' models are timed on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch._functorch.config as functorch_config
from torch.nn.attention import SDPBackend, sdpa_kernel

NO_CUDNN = "sdpa-no-cudnn"
_REST = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def dense_attentions(asked: list[str] | None) -> list[str]:
    """As asked, else SDPA with cuDNN and without it, and FA-2 where it is installed.

    `eager` is not among them: it stores the scores of all pairs of a prompt's tokens, 69 GB for
    one of 32k in bfloat16.
    """
    from transformers.utils import is_flash_attn_2_available

    fa2 = ["flash_attention_2"] if is_flash_attn_2_available() else []
    return asked or ["sdpa", NO_CUDNN, *fa2]


@contextmanager
def attending(model: Any, attention: str) -> Iterator[None]:
    """The model on this implementation, one of transformers' or `NO_CUDNN`.

    cuDNN makes a plan for each length of the keys, so with a growing cache one for each token.
    """
    before = model.config._attn_implementation
    model.set_attn_implementation("sdpa" if attention == NO_CUDNN else attention)
    try:
        with without_cudnn() if attention == NO_CUDNN else nullcontext():
            yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def without_cudnn() -> Iterator[None]:
    """PyTorch's SDPA on its other backends, in compiled code too.

    AOTAutograd's cache does not know which backends were allowed when a graph was made, so that
    it is left alone.
    """
    with sdpa_kernel(_REST), functorch_config.patch(enable_autograd_cache=False):
        yield
