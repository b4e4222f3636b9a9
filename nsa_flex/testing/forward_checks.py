"""Checks of forwards and of generate: causality, the dense start, padding, packing, caches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nsa_flex.patching import patch
from nsa_flex.testing.subject import (
    Subject,
    WrongNumbers,
    device_of,
    expect_equal,
    logits,
    takes,
    twin_of,
)


def causality(model: nn.Module, subject: Subject) -> None:
    """Other tokens after t leave the logits up to t as they were."""
    device = device_of(model)
    ids = subject.ids(2, subject.length, device)
    others = subject.ids(2, subject.length, device, salt=1)
    mask = torch.ones_like(ids)
    for inputs in ({}, {"attention_mask": mask}):
        before = logits(model, ids, **inputs)
        for last in (0, subject.length // 2, subject.length - 2):
            changed = torch.cat((ids[:, : last + 1], others[:, last + 1 :]), 1)
            after = logits(model, changed, **inputs)
            expect_equal(
                after[:, : last + 1],
                before[:, : last + 1],
                f"logits up to token {last} under other tokens after it",
            )


def dense_start(model: nn.Module, subject: Subject) -> None:
    """With init="dense" and S <= n·l', the logits of the unpatched `model`."""
    ids = subject.ids(2, subject.dense_length, device_of(model))
    expected = logits(model, ids)
    sparse = patch(twin_of(model, own_configs=True), subject.config, init="dense")
    expect_equal(logits(sparse, ids), expected, "logits of the dense start and of the model")


def left_padding(model: nn.Module, subject: Subject) -> None:
    """Each row of a batch padded on the left, as `generate` passes it, as if alone."""
    _padding(model, subject, "left")


def right_padding(model: nn.Module, subject: Subject) -> None:
    """Each row of a batch padded on the right, with a mask alone, as if alone."""
    _padding(model, subject, "right")


def _padding(model: nn.Module, subject: Subject, side: str) -> None:
    lengths = (subject.length, subject.length * 2 // 3, 5)
    ids = subject.ids(3, subject.length, device_of(model))
    mask = torch.zeros_like(ids)
    for row, length in zip(mask, lengths, strict=True):
        row[slice(-length, None) if side == "left" else slice(length)] = 1
    inputs: dict[str, Any] = {"attention_mask": mask}
    if side == "left" and takes(model, "position_ids"):
        inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    found = logits(model, ids * mask, **inputs)
    for row, keep in enumerate(mask.bool()):
        alone = logits(model, ids[row][keep][None])[0]
        expect_equal(found[row][keep], alone, f"logits of row {row}, in the batch and alone,")


def packed_by_positions(model: nn.Module, subject: Subject) -> None:
    """Documents in one row, told apart by `position_ids` that restart, each as if alone."""
    documents = _documents(model, subject)
    positions = [torch.arange(d.shape[1], device=d.device) for d in documents]
    _packed(model, documents, position_ids=torch.cat(positions)[None])


def packed_by_lengths(model: nn.Module, subject: Subject) -> None:
    """Documents in one row, told apart by `cu_seq_lens_q`, each as if alone."""
    documents = _documents(model, subject)
    lengths = [document.shape[1] for document in documents]
    offsets = torch.tensor([0, *lengths], device=documents[0].device).cumsum(0).int()
    _packed(
        model,
        documents,
        cu_seq_lens_q=offsets,
        cu_seq_lens_k=offsets,
        max_length_q=max(lengths),
        max_length_k=max(lengths),
    )


def _documents(model: nn.Module, subject: Subject) -> list[Tensor]:
    lengths = (subject.length // 2, subject.length, 3)
    return [subject.ids(1, n, device_of(model), salt=i) for i, n in enumerate(lengths)]


def _packed(model: nn.Module, documents: list[Tensor], **inputs: Any) -> None:
    found = logits(model, torch.cat(documents, 1), use_cache=False, **inputs)
    start = 0
    for number, document in enumerate(documents):
        stop = start + document.shape[1]
        alone = logits(model, document, use_cache=False)
        expect_equal(
            found[:, start:stop], alone, f"logits of document {number}, packed and alone,"
        )
        start = stop


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
