"""Continuous batching of patched models: the tokens of `generate`, whatever the engine does."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

import nsa_flex
from nsa_flex.fallback_kernels.decode import pages
from patching.tiny_models import NSA, SIZES, moved, tiny_model, tokens

_ENGINE = "transformers.generation.continuous_batching"
allocators: Any = pytest.importorskip(f"{_ENGINE}.cache_allocators")
hf_generation = importlib.import_module("nsa_flex.patching.hf_generation")
hf_engine = importlib.import_module("nsa_flex.patching.hf_engine")
input_outputs = importlib.import_module(f"{_ENGINE}.input_outputs")
model_runner = importlib.import_module(f"{_ENGINE}.model_runner")
offloading = importlib.import_module(f"{_ENGINE}.offloading_manager")

NUM_NEW = 12


def patched(family: str = "llama", **changes: Any) -> Any:
    model: Any = tiny_model(family, **{"max_position_embeddings": 512, **changes}).double()
    return nsa_flex.patch(model, NSA)


def batching(**options: Any) -> ContinuousBatchingConfig:
    """Chunked prefill and several pages a request, in little memory."""
    small = {"page_size": 16, "num_blocks": 64, "max_batch_tokens": 48, "max_memory_percent": 0.5}
    return ContinuousBatchingConfig(**{**small, **options})


def prompts(*lengths: int) -> list[list[int]]:
    return [tokens(1, length)[0].tolist() for length in lengths]


def alone(model: Any, inputs: list[list[int]], num_new: int = NUM_NEW) -> list[list[int]]:
    """What `generate` gives each prompt by itself."""
    greedy = {"max_new_tokens": num_new, "do_sample": False}
    rows = [torch.tensor([ids], device=model.device) for ids in inputs]
    outputs = [model.generate(row, **greedy)[0] for row in rows]
    return [out[len(ids) :].tolist() for out, ids in zip(outputs, inputs, strict=True)]


def batched(
    model: Any,
    inputs: list[list[int]],
    num_new: int = NUM_NEW,
    warmup: bool = True,
    **options: Any,
) -> Any:
    outputs = model.generate_batch(
        inputs,
        warmup=warmup,
        generation_config=GenerationConfig(max_new_tokens=num_new, do_sample=False),
        continuous_batching_config=batching(**options),
    )
    assert [output.error for output in outputs.values()] == [None] * len(inputs)
    return [output.generated_tokens for output in outputs.values()]


@contextmanager
def running(model: Any, **options: Any) -> Iterator[Any]:
    """A manager that runs, with greedy generation."""
    manager = model.init_continuous_batching(
        GenerationConfig(max_new_tokens=NUM_NEW, do_sample=False), batching(**options)
    )
    manager.start()
    try:
        yield manager
    finally:
        manager.stop(hard_stop=True, timeout=30)


def result_of(manager: Any, request_id: str) -> Any:
    for result in manager.request_id_iter(request_id):
        if result.is_finished():
            return result
    raise AssertionError("the engine stopped")


# A head count that GPT-2 does not read, and the engine does.
FAMILIES = {"llama": {}, "gpt2": {"num_key_value_heads": 4}, "stablelm": {}, "phi3": {}}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_are_those_of_generate(family: str) -> None:
    model = patched(family, **FAMILIES[family])
    inputs = prompts(5, 33, 70, 130, 1)  # 70 and 130 come in chunks
    assert batched(model, inputs) == alone(model, inputs)


@pytest.mark.parametrize("width", [0, 4])
def test_the_tokens_are_the_same_without_a_table_wide_enough(width: int) -> None:
    model = patched()
    inputs = prompts(5, 70, 50, 130)
    assert batched(model, inputs, max_blocks_per_request=width) == alone(model, inputs)


@pytest.mark.kept(lambda width: width == 4)
@pytest.mark.parametrize("width", [0, 4, 20])
def test_the_tokens_are_the_same_with_tables_of_one_width(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA: a table is as wide as in any other pass, if no request needs more."""
    wide = hf_generation.table_width
    widths = set()

    def as_on_cuda(lengths: Any, pages: Any, usual: int, device: torch.device) -> int:
        widths.add(wide(lengths, pages, usual, torch.device("cuda")))
        return max(widths)

    monkeypatch.setattr(hf_generation, "table_width", as_on_cuda)
    model = patched()
    inputs = prompts(5, 70, 50, 130)
    expected = alone(model, inputs)
    assert batched(model, inputs, max_blocks_per_request=width) == expected
    assert (len(widths) == 1) == (width == 20)  # 142 tokens need 9 pages of 16


@pytest.mark.parametrize("width", [0, 16])
def test_the_tokens_are_the_same_in_padded_batches(width: int) -> None:
    """As CUDA graphs pad them, which there are none of on a CPU."""
    model = patched()
    inputs = prompts(5, 70, 33)
    generation = GenerationConfig(max_new_tokens=NUM_NEW, do_sample=False)
    manager = model.init_continuous_batching(
        generation, batching(max_blocks_per_request=width, q_padding_interval_size=32)
    )
    manager.batch_processor = manager._create_batch_processor()
    manager.batch_processor.model_runner.pad_inputs = True
    manager.start()
    names = manager.add_requests(inputs)
    found = {}
    while len(found) < len(names):
        result = manager.get_result(timeout=60)
        assert result is not None
        if result.is_finished():
            found[result.request_id] = result.generated_tokens
    manager.stop(timeout=30)
    assert [found[name] for name in names] == alone(model, inputs)


def test_in_float32_with_pages_that_cut_selectable_blocks() -> None:
    model = patched().float()
    inputs = prompts(100, 20, 61)
    assert batched(model, inputs, page_size=12) == alone(model, inputs)


def on_cuda() -> Any:
    """A model in float32 for the kernels."""
    wide = {"hidden_size": 512, "num_attention_heads": 16, "num_key_value_heads": 4}
    model: Any = tiny_model("llama", **wide, head_dim=32, max_position_embeddings=4096)
    return nsa_flex.patch(model, nsa_flex.NSAConfig(compression="mlp")).cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("use_cuda_graph", [False, (False, True)])
def test_the_tokens_on_cuda_are_those_of_generate(
    use_cuda_graph: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, whose rounding changes no token, on the kernels that read pages."""
    calls, attend = [], pages.attend
    monkeypatch.setattr(pages, "attend", lambda *x, **y: calls.append(1) or attend(*x, **y))
    model = on_cuda()
    inputs = prompts(5, 33, 700, 2500, 1, 1000)
    options = {"page_size": 256, "max_batch_tokens": 1024, "use_cuda_graph": use_cuda_graph}
    assert batched(model, inputs, **options) == alone(model, inputs)
    assert calls


@pytest.mark.gpu
@pytest.mark.parametrize("use_cuda_graph", [False, (False, True)])
def test_a_batch_is_computed_after_its_inputs_are_written(
    use_cuda_graph: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream that writes the inputs is late, as it may be on a busy device."""
    prepare = input_outputs.ContinuousBatchingIOs.prepare_batch_tensors

    def late(self: Any, *args: Any, **kwargs: Any) -> None:
        torch.cuda._sleep(20_000_000)  # about 10 ms
        prepare(self, *args, **kwargs)

    monkeypatch.setattr(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors", late)
    model = on_cuda()
    inputs = prompts(5, 700, 33)
    options = {"page_size": 256, "max_batch_tokens": 512, "use_cuda_graph": use_cuda_graph}
    options["use_async_batching"] = False
    assert batched(model, inputs, **options) == alone(model, inputs)


@pytest.mark.gpu
def test_inputs_are_cleared_before_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream that clears them is late, and the one that computes is later."""
    inputs_of, runner = input_outputs.ContinuousBatchingIOs, model_runner.ModelRunner
    clear, compute = inputs_of._reset_static_tensors, runner.compute_batch

    def late(self: Any, full_reset: bool = False) -> None:
        if full_reset and self.device.type == "cuda":
            torch.cuda._sleep(40_000_000)  # about 20 ms
        clear(self, full_reset)

    def later(self: Any, *args: Any) -> None:
        with torch.cuda.stream(self.inputs_and_outputs.compute_stream):
            torch.cuda._sleep(60_000_000)
        compute(self, *args)

    monkeypatch.setattr(inputs_of, "_reset_static_tensors", late)
    monkeypatch.setattr(runner, "compute_batch", later)
    model = on_cuda()
    inputs = prompts(5, 700, 33)
    options = {"page_size": 256, "max_batch_tokens": 512, "use_cuda_graph": (False, True)}
    assert batched(model, inputs, warmup=False, **options) == alone(model, inputs)


def test_many_prompts_at_once() -> None:
    model = patched()
    inputs = prompts(*range(2, 40, 3))
    assert batched(model, inputs, max_batch_tokens=512) == alone(model, inputs)


def test_a_shared_prefix_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = patched()
    prefix, *ends = prompts(64, 5, 30, 1)
    inputs = [prefix + end for end in ends]
    matches = []
    match = hf_engine.NSAPages.match_prefix_blocks

    def spy(self: Any, prompt_ids: list[int]) -> list[int]:
        matches.append(match(self, prompt_ids))
        return matches[-1]

    monkeypatch.setattr(hf_engine.NSAPages, "match_prefix_blocks", spy)
    with running(model) as manager:
        found = []
        for ids in inputs:  # one after another, so that the prefix is there
            found.append(result_of(manager, manager.add_request(ids)).generated_tokens)
    assert found == alone(model, inputs)
    assert [len(blocks) for blocks in matches] == [0, 4, 4]


def test_forks_go_on_from_copies_of_the_last_page(monkeypatch: pytest.MonkeyPatch) -> None:
    model = patched()
    (ids,) = prompts(70)
    copied = []
    copy_blocks = hf_engine.NSAPages.copy_blocks

    def spy(self: Any, source: list[int], dest: list[int]) -> None:
        copied.extend(source)
        copy_blocks(self, source, dest)

    monkeypatch.setattr(hf_engine.NSAPages, "copy_blocks", spy)
    outputs = model.generate_batch(
        [ids],
        generation_config=GenerationConfig(
            max_new_tokens=NUM_NEW, do_sample=True, top_k=1, num_return_sequences=3
        ),
        continuous_batching_config=batching(),
    )
    expected = alone(model, [ids])[0]
    assert [output.generated_tokens for output in outputs.values()] == [expected] * 3
    assert copied


def test_requests_that_were_thrown_out_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = patched()
    inputs = prompts(40, 41, 42, 43)
    offloads = []
    offload = offloading.OffloadingManager.offload_requests

    def spy(self: Any) -> bool:
        offloads.append(len(self.scheduler.starved_requests))
        return offload(self)

    monkeypatch.setattr(offloading.OffloadingManager, "offload_requests", spy)
    found = batched(model, inputs, 40, num_blocks=12, safety_margin=0.0)
    assert found == alone(model, inputs, 40)
    assert any(offloads)


def test_a_cancelled_request_leaves_the_others_alone() -> None:
    model = patched()
    inputs = prompts(60, 61)
    with running(model) as manager:
        gone = manager.add_request(inputs[0], max_new_tokens=400, streaming=True)
        next(manager.request_id_iter(gone))
        manager.cancel_request(gone)
        found = result_of(manager, manager.add_request(inputs[1])).generated_tokens
        pool = manager.batch_processor.cache.pool
        assert gone not in manager.batch_processor.scheduler.active_requests
    assert found == alone(model, inputs[1:])[0]
    assert pool is not None


def test_a_prompt_too_long_fails_by_itself() -> None:
    model = patched()
    long, short = prompts(400, 20)
    with running(model, num_blocks=16) as manager:
        failed = result_of(manager, manager.add_request(long))
        found = result_of(manager, manager.add_request(short)).generated_tokens
    assert "a prompt of 400 tokens with max_new_tokens=12 does not fit into" in failed.error
    assert found == alone(model, [short])[0]


def test_positions_end_where_the_model_ends() -> None:
    model = patched("gpt2", max_position_embeddings=64, num_key_value_heads=4)
    long, short = prompts(60, 20)
    with running(model) as manager:
        failed = result_of(manager, manager.add_request(long))
        found = result_of(manager, manager.add_request(short)).generated_tokens
    assert "does not fit into 64 tokens (max_position_embeddings)" in failed.error
    assert found == alone(model, [short])[0]


def test_the_engine_plans_for_compressed_rows() -> None:
    with running(patched()) as manager:
        cache = manager.batch_processor.cache
        (pages,) = cache.cache_allocators.values()
        tokens_of_page = 16
        rows_of_page = 2 * (tokens_of_page + tokens_of_page // NSA.compress_stride)
        head_dim = SIZES["hidden_size"] // SIZES["num_attention_heads"]
        row = SIZES["num_key_value_heads"] * head_dim * torch.float64.itemsize
        assert pages.bytes_per_page == rows_of_page * row
        assert cache.bytes_per_sector % (pages.bytes_per_page * SIZES["num_hidden_layers"]) == 0
        assert cache.cache_tensor.numel() == (cache.num_sectors + 2) * cache.bytes_per_sector
        assert manager.batch_processor.inputs_and_outputs.attention_mask is None


def test_generate_goes_on_beside_a_manager_and_after_it() -> None:
    model = patched()
    inputs = prompts(50)
    expected = alone(model, inputs)
    with running(model):
        assert alone(model, inputs) == expected
    assert model.config._attn_implementation == "nsa_flex"
    assert alone(model, inputs) == expected


def test_a_manager_that_is_kept_serves_the_next_batch() -> None:
    model = patched()
    first, second = prompts(40, 50)
    generation = GenerationConfig(max_new_tokens=NUM_NEW, do_sample=False)
    options = {"continuous_batching_config": batching(), "persistent_manager": True}
    for ids in (first, second):
        outputs = model.generate_batch([ids], generation_config=generation, **options)
        assert [x.generated_tokens for x in outputs.values()] == alone(model, [ids])
    nsa_flex.unpatch(model)
    assert not hasattr(model, "_cached_continuous_batching_manager")


def test_a_switched_model_is_batched_by_the_attention_in_force() -> None:
    model, inputs, kept = patched(), prompts(70, 130), {"persistent_manager": True}
    found = {}
    for implementation in ("nsa_flex", "sdpa", "nsa_flex"):
        model.set_attn_implementation(implementation)
        outputs = model.generate_batch(
            inputs,
            generation_config=GenerationConfig(max_new_tokens=NUM_NEW, do_sample=False),
            continuous_batching_config=batching(),
            **kept,
        )
        assert model.config._attn_implementation == implementation
        found[implementation] = [each.generated_tokens for each in outputs.values()]
        assert found[implementation] == alone(model, inputs)
    assert found["nsa_flex"] != found["sdpa"]


def test_a_manager_that_cannot_be_made_leaves_the_model_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = patched()

    def fails(*args: Any) -> None:
        assert model.config._attn_implementation != "nsa_flex"
        raise RuntimeError("broken")

    monkeypatch.setattr(model, "_get_logits_processor", fails)
    with pytest.raises(RuntimeError, match="broken"):
        model.init_continuous_batching()
    assert model.config._attn_implementation == "nsa_flex"


def test_a_manager_that_stops_after_unpatch_leaves_the_config_alone() -> None:
    model = tiny_model(max_position_embeddings=512)
    before = model.config._attn_implementation
    nsa_flex.patch(model, NSA)
    with running(model) as manager:
        result_of(manager, manager.add_request([1, 2, 3]))
        nsa_flex.unpatch(model)
    assert model.config._attn_implementation == before
    model(torch.tensor([[1, 2, 3]]))


def test_the_callers_configs_stay_as_they_were() -> None:
    model = patched()
    generation, config = GenerationConfig(max_new_tokens=3), batching(max_blocks_per_request=9)
    before = generation.to_dict(), dict(vars(config))
    model.generate_batch(
        prompts(9), generation_config=generation, continuous_batching_config=config
    )
    assert (generation.to_dict(), vars(config)) == before


def test_other_models_keep_the_pages_of_transformers() -> None:
    model: Any = tiny_model("llama", attn_implementation="sdpa").double()
    twin = patched()
    inputs = prompts(30, 40)
    assert batched(model, inputs) == alone(model, inputs)
    nsa_flex.unpatch(twin)
    twin.set_attn_implementation("sdpa")
    with running(twin) as manager:
        result_of(manager, manager.add_request(inputs[0]))
        (pages,) = manager.batch_processor.cache.cache_allocators.values()
        assert type(pages) is allocators.FullAttentionCacheAllocator


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "graphs": ({"use_cuda_graph": True}, r"got use_cuda_graph=True: pass \(False, True\)"),
    "compiled": ({"default_compile_level": 1}, "compilation is not supported"),
    "pages": ({"page_size": 18}, "page_size=18 must be a multiple of compress_stride=4"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_at_once(case: str) -> None:
    options, message = REFUSED[case]
    model = patched()
    with pytest.raises(ValueError, match=message):
        model.init_continuous_batching(GenerationConfig(), batching(**options))
    assert model.config._attn_implementation == "nsa_flex"


def test_a_model_with_unpatched_layers_is_refused() -> None:
    model = patched("gemma3")
    with pytest.raises(ValueError, match=r"layers.0.self_attn is not patched.*use generate"):
        model.init_continuous_batching(GenerationConfig(), batching())


def test_a_manager_from_before_the_patch_is_refused_when_it_starts() -> None:
    model: Any = tiny_model("llama", attn_implementation="sdpa").double()
    generation = GenerationConfig(max_new_tokens=NUM_NEW, do_sample=False)
    manager = model.init_continuous_batching(generation, batching())
    nsa_flex.patch(model, NSA)
    manager.start()
    result = result_of(manager, manager.add_request(prompts(9)[0]))
    manager.stop(hard_stop=True, timeout=30)
    assert "it was made before the model was patched" in result.error


def test_warming_up_is_no_request(caplog: pytest.LogCaptureFixture) -> None:
    """The engine runs passes of made-up requests before it captures graphs."""
    model = patched()
    inputs = prompts(5, 70)
    generation = GenerationConfig(max_new_tokens=NUM_NEW, do_sample=False)
    manager = model.init_continuous_batching(generation, batching(max_requests_per_batch=4))
    manager.batch_processor = manager._create_batch_processor()
    manager.batch_processor.model_runner.pad_inputs = True
    manager.warmup()
    assert "Failed to warm up" not in caplog.text
    manager.start()
    found = [result_of(manager, manager.add_request(ids)).generated_tokens for ids in inputs]
    manager.stop(timeout=30)
    assert found == alone(model, inputs)


def test_a_manager_from_before_the_patch_is_refused() -> None:
    model: Any = tiny_model("llama", attn_implementation="sdpa").double()
    with running(model) as manager:
        result_of(manager, manager.add_request(prompts(9)[0]))
        nsa_flex.patch(model, NSA)
        result = result_of(manager, manager.add_request(prompts(9)[0]))
    assert "it was made before the model was patched" in result.error


def test_heads_that_the_engine_would_count_otherwise_are_refused() -> None:
    model = patched("falcon-7b")
    message = r"plans pages for 2 key-value heads of 8 dimensions, and .* has 1 of 8"
    with pytest.raises(ValueError, match=message):
        model.init_continuous_batching(GenerationConfig(), batching())


@pytest.mark.parametrize("part", ["nsa", "nsa.gates"])
def test_hooks_on_the_layers_of_nsa_are_called(part: str) -> None:
    model, inputs = moved(patched()), prompts(40, 21, 60)
    before = batched(model, inputs)
    seen = set()

    def halved(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        seen.add(type(output))
        return output * 0.5

    for layer in model.model.layers:
        layer.self_attn.get_submodule(part).register_forward_hook(halved)
    expected = alone(model, inputs)
    assert batched(model, inputs) == expected != before
    assert seen == {torch.Tensor}


def test_an_edited_model_is_batched() -> None:
    model, inputs = moved(patched()), prompts(40, 21)
    layer = copy.deepcopy(model.model.layers[1])
    model.model.layers.append(moved(layer))
    layer.self_attn.layer_idx, model.config.num_hidden_layers = 2, 3
    assert batched(model, inputs) == alone(model, inputs)
