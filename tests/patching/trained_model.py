"""A small patched Llama that has learned a text, so that its logits are decided."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

import nsa_flex
from patching.tiny_models import NSA, tiny_model


def lines(length: int) -> Tensor:
    """Four phrases over ten letters again and again: what follows takes a look further back."""
    generator = torch.Generator().manual_seed(7)
    phrases = [torch.randint(2, 12, (n,), generator=generator) for n in (17, 20, 23, 26)]
    text = torch.cat(phrases)
    return text.repeat(-(-length // len(text)))[:length]


@functools.cache
def trained_model() -> nn.Module:
    """In float64, where rounding moves no logit past another. Do not change it."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        model = nsa_flex.patch(tiny_model(max_position_embeddings=1024).train(), NSA)
        optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3)
        for _ in range(60):
            ids = lines(400)[torch.randint(300, (4, 1)) + torch.arange(72)]
            loss = model(ids, labels=ids, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert loss < 0.7, loss
    return model.double().eval().requires_grad_(False)
