"""InfLLM-V2 attention against NumPy: forward, gradients, documents, decode, the dense switch."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from nsa_flex import (
    InfLLMV2Config,
    align_packed,
    infllm_v2_attention,
    selected_attention,
    topk_blocks,
)
from reference import infllm_v2 as reference
from reference.modes import no_synchronization

CONFIG = InfLLMV2Config(8, 4, 16, window_size=32, topk=3, dense_len=0)


def sizes_of(config: InfLLMV2Config) -> reference.Sizes:
    kept = {field.name for field in dataclasses.fields(reference.Sizes)} - {"coarse"}
    values = {name: value for name, value in vars(config).items() if name in kept}
    return reference.Sizes(**values, coarse=1 if config.exact_lse else 4)


def tensors(group: int, queries: int, keys: int, batch: int = 1) -> list[Tensor]:
    sizes = ((2 * group, queries, 16), (2, keys, 16), (2, keys, 24))
    return [torch.randn(batch, *size, dtype=torch.float64).requires_grad_() for size in sizes]


def numpy(*given: Tensor) -> list[Any]:
    """Of the first batch row."""
    return [x.detach()[0].numpy() for x in given]


def check(config: InfLLMV2Config, group: int, queries: int, keys: int, **options: Any) -> None:
    inputs = tensors(group, queries, keys)
    out = infllm_v2_attention(*inputs, config=config, **options)
    want, backward = reference.attention(*numpy(*inputs), sizes_of(config))
    torch.testing.assert_close(out[0], torch.from_numpy(want), rtol=0, atol=1e-12)
    grad = torch.randn_like(out)
    out.backward(grad)
    for given, gradient in zip(inputs, backward(numpy(grad)[0]), strict=True):
        expected = torch.from_numpy(gradient)
        torch.testing.assert_close(given.grad[0], expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("group", [1, 2, 3, 16])
@pytest.mark.parametrize("exact_lse", [False, True])
def test_rows_and_gradients(group, exact_lse):
    check(replace(CONFIG, exact_lse=exact_lse), group, 150, 150)


@pytest.mark.parametrize(
    "change",
    [
        {"window_size": 0, "topk": 2},
        {"init_blocks": 2, "topk": 4},
        {"init_blocks": 0},
        {"kernel_size": 16, "kernel_stride": 8},
        {"dense_len": 150},
    ],
    ids=str,
)
def test_other_sizes(change):
    check(replace(CONFIG, **change), 2, 150, 150)


@pytest.mark.parametrize(("queries", "keys"), [(1, 150), (7, 150), (1, 20), (3, 400)])
@pytest.mark.parametrize("dense_len", [0, 151])
def test_later_queries(queries, keys, dense_len):
    check(replace(CONFIG, dense_len=dense_len), 3, queries, keys)


def test_the_switch_is_at_dense_len():
    inputs = tensors(2, 150, 150)
    outputs = {
        length: infllm_v2_attention(*inputs, config=replace(CONFIG, dense_len=length))
        for length in (0, 150, 151)
    }
    assert torch.equal(outputs[0], outputs[150])
    causal = torch.nn.functional.scaled_dot_product_attention(
        *inputs, is_causal=True, enable_gqa=True
    )
    assert torch.equal(outputs[151], causal)
    assert not torch.allclose(outputs[150], causal)


@pytest.mark.parametrize("longest", [149, 150])
@pytest.mark.parametrize("on_device", [False, True])
def test_longest_decides(longest, on_device):
    """A length that the device alone knows: blocks are replaced, and nobody waits for it."""
    config = replace(CONFIG, dense_len=150)
    inputs = tensors(2, 160, 160)
    given = torch.tensor([longest]) if on_device else longest
    out = infllm_v2_attention(*inputs, config=config, longest=given)
    want, backward = reference.attention(*numpy(*inputs), sizes_of(config), length=longest)
    known = slice(0, 150)  # every block is of a length below dense_len
    torch.testing.assert_close(
        out[0, :, known], torch.from_numpy(want[:, known]), rtol=0, atol=1e-12
    )
    grad = torch.randn_like(out)
    grad[:, :, 150:] = 0
    out.backward(grad)
    for each, gradient in zip(inputs, backward(numpy(grad)[0]), strict=True):
        torch.testing.assert_close(each.grad[0], torch.from_numpy(gradient), rtol=0, atol=1e-11)


@pytest.mark.parametrize("dense_len", [0, 100, 200, 300])
@pytest.mark.parametrize("size", [180, 1000])
def test_offsets_of_the_device(dense_len, size):
    """The buffer of a static cache: what lies behind a row's tokens has no say.

    The longest row decides for both. In the longer buffer keys are gathered.
    """
    config = replace(CONFIG, dense_len=dense_len)
    query, key, value = tensors(2, 3, size, batch=2)
    offset = torch.tensor([150, 61])
    out = infllm_v2_attention(query, key, value, config=config, query_offset=offset)
    for row, first in enumerate(offset.tolist()):
        each, end = slice(row, row + 1), first + 3
        alone = numpy(query[each], key[each, :, :end], value[each, :, :end])
        want, _ = reference.attention(*alone, sizes_of(config), length=153)
        torch.testing.assert_close(out[row], torch.from_numpy(want), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dense_len", [0, 110, 150, 1000])
def test_packed_documents_are_alone(dense_len):
    """The longest, of 120 tokens, decides for all."""
    config = replace(CONFIG, dense_len=dense_len)
    lengths = (37, 120, 1, 50)
    total = sum(lengths)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    layout = align_packed(ends, total, config.selection)
    inputs = tensors(3, total, total)
    aligned = [layout.align(x) for x in inputs]
    out = layout.restore(infllm_v2_attention(*aligned, config=config, document_start=layout.start))
    grad = torch.randn_like(out)
    out.backward(grad)
    for first, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        part = slice(first, end)
        alone = [x[:, part] for x in numpy(*inputs)]
        want, backward = reference.attention(*alone, sizes_of(config), length=120)
        torch.testing.assert_close(out[0, :, part], torch.from_numpy(want), rtol=0, atol=1e-12)
        for given, gradient in zip(inputs, backward(numpy(grad)[0][:, part]), strict=True):
            expected = torch.from_numpy(gradient)
            torch.testing.assert_close(given.grad[0, :, part], expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("dense_len", [0, 100])
def test_a_prefill_and_steps_are_one_call(dense_len):
    """From dense_len on: a prefill in chunks, then tokens one by one."""
    config = replace(CONFIG, dense_len=dense_len)
    query, key, value = (x.detach() for x in tensors(2, 170, 170))
    whole = infllm_v2_attention(query, key, value, config=config)
    for first, end in ((0, 100), (100, 165), *((t, t + 1) for t in range(165, 170))):
        part = infllm_v2_attention(
            query[:, :, first:end], key[:, :, :end], value[:, :, :end], config=config
        )
        torch.testing.assert_close(part, whole[:, :, first:end], rtol=0, atol=1e-12)


def test_tokens_after_a_query_change_nothing():
    inputs = [x.detach() for x in tensors(2, 160, 160)]
    out = infllm_v2_attention(*inputs, config=CONFIG)
    for t in (40, 95, 127):
        changed = [x.clone() for x in inputs]
        for x in changed:
            x[:, :, t + 1 :] = torch.randn_like(x[:, :, t + 1 :]) * 50
        again = infllm_v2_attention(*changed, config=CONFIG)
        assert torch.equal(again[:, :, : t + 1], out[:, :, : t + 1])


def test_scored_by_other_tensors():
    config = replace(CONFIG, use_nope=True)
    query, key, value = tensors(2, 150, 150)
    scored_by = tuple(x.detach() for x in tensors(2, 150, 150)[:2])
    out = infllm_v2_attention(query, key, value, config=config, scored_by=scored_by)
    blocks = reference.selected_blocks(*numpy(*scored_by), sizes_of(config))
    place = np.arange(150)
    mask = np.stack(
        [
            [np.isin(place // 16, list(chosen)) & (place <= t) for t, chosen in enumerate(of_head)]
            for of_head in blocks
        ]
    )
    want, backward = reference.masked_attention(*numpy(query, key, value), mask)
    torch.testing.assert_close(out[0], torch.from_numpy(want), rtol=0, atol=1e-12)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, (query, key, value), grad)
    for mine, gradient in zip(found, backward(numpy(grad)[0]), strict=True):
        torch.testing.assert_close(mine[0], torch.from_numpy(gradient), rtol=0, atol=1e-11)
    with pytest.raises(ValueError, match="use_nope is True and scored_by is None"):
        infllm_v2_attention(query, key, value, config=config)


def test_blocks_are_scored_by_given_means():
    query, key, value = tensors(2, 1, 150)
    other = torch.randn_like(key)
    means = torch.from_numpy(reference.window_means(*numpy(other), 8, 4))[None]
    out = infllm_v2_attention(query, key, value, config=CONFIG, compressed_key=means)
    scored_by = (query.detach(), other)
    want = infllm_v2_attention(query, key, value, config=CONFIG, scored_by=scored_by)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="compressed_key has shape"):
        infllm_v2_attention(query, key, value, config=CONFIG, compressed_key=means[:, :, 1:])


def test_it_compiles_whole_for_any_length():
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(infllm_v2_attention, fullgraph=True, dynamic=True, backend=counter)
    for length in (140, 190, 191):
        inputs = tensors(2, length, length)
        expected = infllm_v2_attention(*inputs, config=CONFIG)
        assert torch.equal(compiled(*inputs, config=CONFIG), expected)
    assert counter.frame_count == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dense_len", [0, 7001])
@pytest.mark.parametrize("group", [1, 4, 16])
def test_on_kernels(group, dense_len):
    """96 or 128 slots in bfloat16: at most twice the error of PyTorch operations, and no sync."""
    config = InfLLMV2Config(dense_len=dense_len)
    shapes = ((2 * group, 500), (2, 7000), (2, 7000))
    inputs = [
        torch.randn(1, heads, tokens, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for heads, tokens in shapes
    ]
    offset = torch.tensor([6500], device="cuda")
    grad = torch.randn_like(inputs[0])
    with no_synchronization():
        out = infllm_v2_attention(*inputs, config=config, query_offset=offset)
        found = [out, *torch.autograd.grad(out, inputs, grad)]
    blocks = topk_blocks(*inputs[:2], config=config.selection, coarse=4, query_offset=offset)
    by_operations = topk_blocks(
        *(x.cpu() for x in inputs[:2]), config=config.selection, coarse=4, query_offset=6500
    )
    # The same rounded means; the order of float32 sums may swap blocks that score alike.
    assert (blocks.cpu() == by_operations).all(-1).double().mean() > 0.99
    on_cpu = [x.detach().cpu().double().requires_grad_() for x in inputs]
    if dense_len:
        blocks = torch.arange(110, device="cuda").expand(1, 2, 500, 110)
    options: dict[str, Any] = {"config": config.selection, "query_offset": 6500}
    wanted = selected_attention(*on_cpu, blocks.cpu(), **options)
    want = [wanted, *torch.autograd.grad(wanted, on_cpu, grad.cpu().double())]
    eager = selected_attention(*inputs, blocks, backend="dense", **options)
    plain = [eager, *torch.autograd.grad(eager, inputs, grad)]
    for ours, theirs, expected in zip(found, plain, want, strict=True):
        errors = [(x.cpu().double() - expected).norm() for x in (ours, theirs)]
        assert errors[0] <= 2 * errors[1]


def test_published_config():
    published = {
        "kernel_size": 32,
        "kernel_stride": 16,
        "init_blocks": 1,
        "block_size": 64,
        "window_size": 2048,
        "topk": 64,
        "use_nope": False,
        "dense_len": 8192,
    }
    config = InfLLMV2Config.from_dict(published)
    assert config == InfLLMV2Config()
    assert (config.num_blocks, config.num_dense_blocks) == (96, 128)
    selection = config.selection
    assert (selection.num_initial_blocks, selection.num_local_blocks) == (1, 33)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"topk": 64.0}, TypeError, "topk must be of type int, got float 64.0"),
        ({"use_nope": 1}, TypeError, "use_nope must be of type bool, got int 1"),
        ({"block_size": 0}, ValueError, "block_size=0 must be at least 1"),
        ({"window_size": 100}, ValueError, "block_size=64 must divide window_size=100"),
        ({"topk": 1}, ValueError, r"topk=1 must be at least init_blocks \+ 1 = 2"),
        ({"kernel_stride": 24}, ValueError, "kernel_stride=24 must divide kernel_size=32"),
        ({"kernel_size": 128}, ValueError, "kernel_size=128 must be at most block_size=64"),
        ({"sparsity": 1}, ValueError, r"unknown fields of sparse_config \['sparsity'\]"),
    ],
)
def test_refused_sizes(change, error, message):
    with pytest.raises(error, match=message):
        InfLLMV2Config.from_dict(change)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"config": None}, TypeError, "config must be an InfLLMV2Config, got NoneType"),
        ({"value": torch.randn(1, 2, 79, 16)}, ValueError, "value has shape"),
        ({"key": torch.randn(1, 2, 80, 8)}, ValueError, "key has shape"),
        ({"scale": -1.0}, ValueError, "scale is -1.0"),
        ({"query_offset": 30}, ValueError, "query_offset=30"),
        (
            {"scored_by": (torch.randn(1, 4, 80, 16), torch.randn(1, 2, 80, 8))},
            ValueError,
            r"scored_by\[1\] has shape",
        ),
    ],
)
def test_refused(change, error, message):
    query, key, value = (torch.randn(1, heads, 80, 16) for heads in (4, 2, 2))
    call: dict[str, Any] = {"query": query, "key": key, "value": value, "config": CONFIG, **change}
    with pytest.raises(error, match=message):
        infllm_v2_attention(**call)
