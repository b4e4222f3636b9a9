"""Captured and compiled decode steps of whole batches, which no gap of the host separates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import Tensor

pytest.importorskip("triton")
pytest.importorskip("transformers")

import nsa_flex
from nsa_flex import NSACache
from nsa_flex.bench.cases.decode_inputs import Inputs, Shape, make_inputs, step
from nsa_flex.bench.cases.models import MODELS, ModelSize, build
from reference.accuracy import limit
from reference.interpreter import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="graphs hold compiled kernels")

HEADS, KV_HEADS, DIM = 32, 8, 128
REPLAYS = 20


@pytest.mark.gpu
@pytest.mark.parametrize("length", [32768, 32849])  # the step completes a block, or does not
@pytest.mark.parametrize("batch", [1, 8])
@torch.no_grad()
def test_captured_steps_give_the_bits_of_eager_ones(batch: int, length: int) -> None:
    """Kernels of a step are launched before those ahead of them end: in a graph they overlap."""
    layers = [make_inputs(Shape(batch, HEADS, KV_HEADS, length), "mlp") for _ in range(3)]
    weight = torch.randn(HEADS * DIM, 64, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):  # kernels compile, plans are recorded
        run(layers, weight)
    expected = [x.clone() for x in run(layers, weight)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(layers, weight)
    for _ in range(REPLAYS):
        graph.replay()
        for x, y in zip(found, expected, strict=True):
            assert torch.equal(x, y)


def run(layers: list[Inputs], weight: Tensor) -> list[Tensor]:
    """A step of each layer, and a product between them, as a model has it."""
    outputs = []
    for inputs in layers:
        outputs.append(step(*inputs.arguments()))
        outputs[-1].transpose(1, 2).flatten(1) @ weight
    return outputs


ON_GPU = replace(MODELS["llama-3.1-8b, 4 layers"], hidden_size=1024, mlp_size=2048, num_layers=2)
CASES = [
    pytest.param("cpu", MODELS["tiny"], 3, 100, "aot_eager"),
    pytest.param("cuda", ON_GPU, 8, 32768, "inductor", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("name", "size", "batch", "prompt", "backend"), CASES)
@torch.no_grad()
def test_compiled_steps_of_a_batch_give_what_eager_ones_do(
    name: str, size: ModelSize, batch: int, prompt: int, backend: str
) -> None:
    """Every row, behind a prompt that a static cache holds.

    Inductor rounds fewer results to bfloat16 than eager code; then blocks whose scores are nearly
    equal change places, and the logits differ by a tenth. So it rounds as eager code does here.
    Its sums still have another order: after one of five prompts, a row is off by some thousandths,
    the same row whenever that prompt is run. So each row must agree after one of several prompts,
    and the same steps must give the same bits.
    """
    device, num_new = torch.device(name), 34
    dtype = torch.bfloat16 if name == "cuda" else torch.float32
    model = build(size, prompt + num_new, device, patched=False).eval().to(dtype)
    model = nsa_flex.patch(model, size.config).requires_grad_(False)
    shape = (3 if name == "cuda" else 1, batch, prompt + num_new)
    prompts = torch.randint(size.vocab_size, shape, device=device)
    torch._dynamo.reset()
    mode = "reduce-overhead" if name == "cuda" else None
    compiled = torch.compile(model, fullgraph=True, backend=backend, mode=mode)
    with inductor_config.patch(emulate_precision_casts=True):
        found, again, want = (
            torch.stack([last_logits(each, model, ids, num_new) for ids in prompts])
            for each in (compiled, compiled, model)
        )
    torch._dynamo.reset()
    assert torch.equal(found, again)
    errors = (found - want).float().norm(dim=-1) / want.float().norm(dim=-1)
    assert errors.amin(0).max().item() <= limit(0.0, dtype), errors
    assert errors.median().item() <= limit(0.0, dtype), errors


def last_logits(steps: Any, model: Any, ids: Tensor, num_new: int) -> Tensor:
    """(B, V) of the last token, the last `num_new` one by one through `steps`."""
    prompt = ids.shape[1] - num_new
    cache = NSACache(model, max_length=ids.shape[1])
    model(ids[:, :prompt], past_key_values=cache, logits_to_keep=1)
    position = torch.full((1, 1), prompt, device=ids.device)
    for token in ids[:, prompt:].split(1, 1):
        torch.compiler.cudagraph_mark_step_begin()
        logits = steps(token, past_key_values=cache, position_ids=position).logits[:, -1].clone()
        position += 1
    return logits
