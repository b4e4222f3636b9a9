"""Decoders of multimodal models: positions have an axis for each part of a rotary embedding."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

import nsa_flex
from patching.tiny_models import NSA, SIZES, relative_error, tokens

IMAGE, VIDEO, START, END = 90, 91, 92, 93


def qwen_vl() -> nn.Module:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**SIZES, "rope_parameters": rope},
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 32,
            "patch_size": 4,
            "window_size": 8,
            "fullatt_block_indexes": [0],
        },
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    model = transformers.Qwen2_5_VLForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.model.language_model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    return model


def patched(model: nn.Module, init: str = "paper") -> nn.Module:
    return nsa_flex.patch(model, NSA, init=init, filter_fn=lambda _, name: "language" in name)


def image_inputs() -> dict[str, torch.Tensor]:
    """One image of 4 x 4 patches, merged to 4 tokens, between words."""
    words = tokens(1, 20) % 80 + 2
    words[0, 5] = START
    words[0, 6:10] = IMAGE
    words[0, 10] = END
    return {
        "input_ids": words,
        "mm_token_type_ids": (words == IMAGE).long(),
        "pixel_values": torch.randn(16, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }


def test_logits_with_an_image_are_dense_at_the_start() -> None:
    model, inputs = qwen_vl(), image_inputs()
    with torch.no_grad():
        expected = model(**inputs).logits
        found = patched(model, init="dense")(**inputs).logits
    assert relative_error(found, expected) < 1e-5


@pytest.mark.parametrize("padding", [0, 4])
def test_generation_from_words(padding: int) -> None:
    model = patched(qwen_vl())
    ids = tokens(2, 14) % 80 + 2
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    how = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    how["suppress_tokens"] = [IMAGE, VIDEO, START, END]
    expected = model.generate(ids, use_cache=False, **how)
    assert torch.equal(model.generate(ids, **how), expected)


def test_generation_from_an_image() -> None:
    model, inputs = patched(qwen_vl()), image_inputs()
    mask = torch.ones_like(inputs["input_ids"])
    how = {**inputs, "attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    how["suppress_tokens"] = [IMAGE, VIDEO, START, END]  # which would ask for more images
    found = model.generate(**how)
    model.model.rope_deltas = None
    assert torch.equal(found, model.generate(**how, use_cache=False))


def test_packed_documents_by_the_positions_of_the_text() -> None:
    model = patched(qwen_vl()).model.language_model
    ids = tokens(1, 30) % 80 + 2
    positions = torch.cat((torch.arange(13), torch.arange(17)))[None]
    with torch.no_grad():
        found = model(ids, position_ids=positions.expand(4, 1, 30), use_cache=False)[0]
        expected = [model(part, use_cache=False)[0] for part in (ids[:, :13], ids[:, 13:])]
    assert relative_error(found, torch.cat(expected, 1)) < 1e-5
