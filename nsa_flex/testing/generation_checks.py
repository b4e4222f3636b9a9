"""Checks of `generate`: cached decoding gives what full passes give."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nsa_flex.testing.subject import Subject, WrongNumbers, device_of, expect_equal

NEW_TOKENS = 9


def dynamic_cache(model: nn.Module, subject: Subject) -> None:
    """Greedy generation with a growing cache, of a batch padded on the left."""
    _generation(model, subject)


def static_cache(model: nn.Module, subject: Subject) -> None:
    """Greedy generation with a static cache, of a batch padded on the left."""
    _generation(model, subject, cache_implementation="static")


def _generation(model: Any, subject: Subject, **cached: Any) -> None:
    ids = subject.ids(2, subject.length, device_of(model))
    mask = torch.ones_like(ids)
    mask[0, : subject.length // 3] = 0
    how = {
        "attention_mask": mask,
        "do_sample": False,
        "max_new_tokens": NEW_TOKENS,
        "min_new_tokens": NEW_TOKENS,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    expected = model.generate(ids * mask, use_cache=False, **how)
    attributes = set(vars(model))
    try:
        found = model.generate(ids * mask, use_cache=True, **how, **cached)
    finally:
        for name in set(vars(model)) - attributes:  # generate notes a static cache's length
            delattr(model, name)
    for step, (one, other) in enumerate(zip(found.logits, expected.logits, strict=True)):
        expect_equal(one, other, f"logits of generated token {step}, cached and in full passes,")
    if not torch.equal(found.sequences, expected.sequences):
        raise WrongNumbers("the logits agree and the greedy tokens do not")
