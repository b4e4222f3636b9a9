"""The audit of this package: no hot path breaks the graph, waits for the device or recompiles.

Every path runs under the detectors of `nsa_flex.hot_path` eagerly, on the meta device, and
compiled with `fullgraph=True`, forward and backward. test_hot_path.py proves that they fire. Code
is generated, on CUDA, for the function on `auto` and on FlexAttention, which waits without it, for
a model's training on documents and for its decoding. A training step on documents takes a minute:
packed by position_ids, or of the module alone, it is compiled on the CPU and eager on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from nsa_flex import NSAConfig, explain, nsa_attention
from nsa_flex.hot_path import ForwardBackward, count_graphs, find_syncs, find_value_reads
from nsa_flex.module import NSAAttention

CPU_CONFIG = NSAConfig(
    compress_block_size=8,
    compress_stride=4,
    select_block_size=16,
    num_selected_blocks=4,
    num_local_blocks=2,
    window_size=24,
    compression="mlp",
)


@pytest.fixture(autouse=True)
def _forget_shapes() -> None:
    """Else torch makes symbols of the sizes in which one test differs from the one before."""
    torch._dynamo.reset()


def config_for(device: torch.device) -> NSAConfig:
    """Small on the CPU, where time is short; the paper's where kernels are tuned for it."""
    return NSAConfig(compression="mlp") if device.type == "cuda" else CPU_CONFIG


def random(device: torch.device, *shape: int, grad: bool = False) -> torch.Tensor:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.randn(*shape, device=device, dtype=dtype, requires_grad=grad)


def assert_clean(
    fn: Callable, *args: Any, device: torch.device, meta: bool = True, generate: bool = False
) -> None:
    """No finding in eager mode, without data, or compiled; a graph break raises."""
    assert_clean_eagerly(fn, *args, meta=meta)
    generate = generate and device.type == "cuda"
    assert find_syncs(compiled(fn, generate=generate), *args) == []


def assert_clean_eagerly(fn: Callable, *args: Any, meta: bool = True) -> None:
    assert find_syncs(fn, *args) == []
    if meta:
        assert find_value_reads(fn, *args) == []


def compiled(fn: Callable, *, generate: bool = False) -> Callable:
    """Compiled in one graph, without generating code unless asked to."""
    if isinstance(fn, ForwardBackward):
        return ForwardBackward(compiled(fn.fn, generate=generate))
    return torch.compile(fn, fullgraph=True, backend="inductor" if generate else "aot_eager")


def attention(config: NSAConfig, backend: Any, **options: Any) -> Callable:
    def call(*tensors, **named):
        return nsa_attention(*tensors, config=config, backend=backend, **options, **named)

    return call


def attention_inputs(
    device: torch.device, num_keys: int, num_queries: int | None = None, *, grad: bool = False
) -> tuple[torch.Tensor, ...]:
    """The six tensors of `nsa_attention`: batch 2, 4 query heads, 2 KV heads."""
    num_queries = num_keys if num_queries is None else num_queries
    num_blocks = max(2, config_for(device).num_compressed_blocks(num_keys))
    dim = 64 if device.type == "cuda" else 16
    shapes = [(4, num_queries, dim), *[(2, num_keys, dim)] * 2, *[(2, num_blocks, dim)] * 2]
    return tuple(random(device, 2, *shape, grad=grad) for shape in [*shapes, (4, num_queries, 3)])


CPU, CUDA = torch.device("cpu"), torch.device("cuda")

# (device, backend, whether it has a backward)
EVERYWHERE = [
    pytest.param(CPU, "dense", True, id="cpu-dense"),
    pytest.param(CPU, "flex", False, id="cpu-flex"),
    *(
        pytest.param(CUDA, backend, True, id=f"cuda-{backend}", marks=pytest.mark.gpu)
        for backend in ("auto", "dense", "flex")
    ),
]
WHOLE_SEQUENCE_ONLY = [
    pytest.param(CUDA, {branch: backend}, True, id=f"cuda-{backend}", marks=pytest.mark.gpu)
    for branch, backend in (
        ("compressed", "sdpa"),
        ("compressed", "fa2"),
        ("sliding", "fa2"),
        ("selected", "triton"),
        ("sliding", "triton"),
    )
]


def has_meta_kernels(backend: Any) -> bool:
    """A fused backend named explicitly refuses the meta device, as it does any other."""
    return backend in ("auto", "dense")


def over_whole_sequences() -> Iterator[Any]:
    """Every backend; the log-sum-exps and choices too on the CPU and of `auto`."""
    for case in (*EVERYWHERE, *WHOLE_SEQUENCE_ONLY):
        yield pytest.param(*case.values, False, id=case.id, marks=case.marks)
        device, backend, _ = case.values
        if device == CPU or backend == "auto":
            yield pytest.param(*case.values, True, id=f"{case.id}-aux", marks=case.marks)


@pytest.mark.long
@pytest.mark.parametrize(("device", "backend", "trains", "return_aux"), over_whole_sequences())
def test_attention_over_whole_sequences(device, backend, trains, return_aux):
    config = config_for(device)
    inputs = attention_inputs(device, 100, grad=trains)
    chosen = explain(*inputs[:3], backend=backend)
    for branch, name in backend.items() if isinstance(backend, dict) else ():
        assert chosen[branch].backend == name
    call = attention(config, backend, return_aux=return_aux)
    step = ForwardBackward(call) if trains else call
    if return_aux and backend == "flex" and device.type == "cpu":
        # Compiled, FlexAttention has no log-sum-exp on the CPU: the error says so.
        assert find_syncs(step, *inputs) == []
        with pytest.raises(torch._dynamo.exc.Unsupported, match="gives no log-sum-exp"):
            compiled(step)(*inputs)
        return
    meta, generate = has_meta_kernels(backend), backend in ("auto", "flex")
    assert_clean(step, *inputs, device=device, meta=meta, generate=generate)


@pytest.fixture(autouse=True)
def _no_graphs_of_other_tests() -> None:
    """Tests share code objects, and with them Dynamo's limit of graphs for each."""
    torch._dynamo.reset()


@pytest.mark.long
@pytest.mark.kept(lambda num_queries, backend: num_queries == 5 or backend == "dense")
@pytest.mark.parametrize(("device", "backend", "trains"), EVERYWHERE)
@pytest.mark.parametrize("num_queries", [1, 5], ids=["decode", "chunk"])
def test_attention_against_a_longer_past(device, backend, trains, num_queries):
    inputs = attention_inputs(device, 100, num_queries)
    static_cache = {"query_offset": torch.tensor([40, 17], device=device)}
    for named in ({}, static_cache):
        call = attention(config_for(device), backend)
        assert_clean(
            lambda *tensors, call=call, named=named: call(*tensors, **named),
            *inputs,
            device=device,
            meta=has_meta_kernels(backend),
            generate=backend in ("auto", "flex"),
        )


@pytest.mark.long
@pytest.mark.parametrize(("device", "backend", "trains"), EVERYWHERE)
def test_attention_of_documents_and_separate_keys(device, backend, trains):
    config = config_for(device)
    inputs = attention_inputs(device, 192, grad=trains)
    sliding_key, sliding_value = (x.detach().clone().requires_grad_(trains) for x in inputs[1:3])
    starts = torch.tensor([0, 64, 128], device=device).repeat_interleave(64).expand(2, 192)

    def call(sliding_key, sliding_value, starts, *tensors):
        return nsa_attention(
            *tensors,
            config=config,
            backend=backend,
            sliding_key=sliding_key,
            sliding_value=sliding_value,
            document_start=starts,
        )

    step = ForwardBackward(call) if trains else call
    assert_clean(
        step,
        sliding_key,
        sliding_value,
        starts,
        *inputs,
        device=device,
        meta=has_meta_kernels(backend),
        generate=backend in ("auto", "flex"),
    )


def layer(device: torch.device, **options: Any) -> NSAAttention:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    dim = 64 if device.type == "cuda" else 8
    return NSAAttention(
        4 * dim, 4, 2, config=config_for(device), device=device, dtype=dtype, **options
    )


MODULE_CALLS = {
    "plain": {},
    "packed": {"cu_seqlens": [0, 30, 100]},
    "padded": {"attention_mask": [[0] * 10 + [1] * 80 + [0] * 10]},
}


@pytest.mark.long
@pytest.mark.kept(lambda call: call != "plain")
@pytest.mark.parametrize("call", MODULE_CALLS)
def test_module_trains(call, device):
    module = layer(device)
    x = random(device, 1, 100, module.hidden_size)
    named = {name: torch.tensor(v, device=device) for name, v in MODULE_CALLS[call].items()}
    step = ForwardBackward(lambda x: module(x, **named))
    if device.type == "cuda" and call == "packed":
        assert_clean_eagerly(step, x, meta=False)
    else:
        assert_clean(step, x, device=device, meta=not named)
    assert find_value_reads(lambda x, **named: module(x, **named), x, **named) == []


def test_module_with_keys_of_its_own_for_each_branch(device):
    module = layer(device, separate_branch_kv=True)
    x = random(device, 1, 100, module.hidden_size)
    assert_clean(ForwardBackward(module), x, device=device)


@pytest.fixture
def llama(device):
    pytest.importorskip("transformers")
    from nsa_flex.patching import patch
    from patching.tiny_models import tiny_model

    sizes = {"hidden_size": 256, "head_dim": 64} if device.type == "cuda" else {}
    model = tiny_model("llama", num_hidden_layers=1, **sizes).to(device)
    if device.type == "cuda":
        model = model.bfloat16()
    return patch(model, config_for(device))


def llama_call(model: torch.nn.Module, **fixed: Any) -> Callable:
    def call(input_ids, **named):
        return model(input_ids=input_ids, **fixed, **named).logits

    return call


def token_ids(device: torch.device, length: int, batch: int = 1) -> torch.Tensor:
    return torch.randint(2, 90, (batch, length), device=device)


def packed_positions(device: torch.device, *lengths: int) -> torch.Tensor:
    return torch.cat([torch.arange(length, device=device) for length in lengths])[None]


def llama_arguments(name: str, device: torch.device) -> dict[str, torch.Tensor]:
    if name == "padded":
        mask = torch.ones(1, 100, dtype=torch.long, device=device)
        mask[:, :10] = 0
        return {"attention_mask": mask}
    if name == "packed by position_ids":
        return {"position_ids": packed_positions(device, 40, 60)}
    if name == "packed by cu_seqlens":
        bounds = torch.tensor([0, 40, 100], dtype=torch.int32, device=device)
        positions = packed_positions(device, 40, 60)
        return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "position_ids": positions}
    return {}


@pytest.mark.long
@pytest.mark.kept(lambda call: call in ("padded", "packed by position_ids"))
@pytest.mark.parametrize(
    "call", ["plain", "padded", "packed by position_ids", "packed by cu_seqlens"]
)
def test_patched_llama_trains(call, device, llama):
    names = llama_arguments(call, device)
    forward = llama_call(llama, use_cache=False)

    def step(input_ids, *values):
        return forward(input_ids, **dict(zip(names, values, strict=True)))

    training = ForwardBackward(step)
    arguments = (token_ids(device, 100), *names.values())
    if device.type == "cuda" and call == "packed by position_ids":
        assert_clean_eagerly(training, *arguments)
    else:
        assert_clean(training, *arguments, device=device, generate=call == "packed by cu_seqlens")


@pytest.mark.kept(lambda kind: kind == "static")
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_patched_llama_decodes(kind, device, llama):
    from transformers import DynamicCache, StaticCache

    if kind == "static":
        cache = StaticCache(config=llama.config, max_cache_len=64)
    else:
        cache = DynamicCache(config=llama.config)
    forward = torch.no_grad()(llama_call(llama, past_key_values=cache, use_cache=True))
    forward(token_ids(device, 50))
    assert_clean(forward, token_ids(device, 1), device=device, generate=kind == "static")


# How many graphs a sweep over sequence lengths S compiles; l, d and l' are 8, 4 and 16 here.
#
# The rule: S = 1 has a graph of its own, since torch takes a size of one for a constant; all
# S >= 2 share one. With `dynamic=None` torch first compiles for the first length alone and again,
# for all, at the second. What could be of size one at short lengths (compressed blocks, tiles of
# 128 tokens, selectable blocks) is filled up to two. The first length of a sweep should differ
# from other dynamic sizes, such as the batch: torch takes equal ones for one symbol.
SWEEP = (64, 100, 65, 24, 300, 129, 128, 16, 520, 601, 1, 7, 2, 8, 11, 12, 15, 1030, 8192)


def attention_sweep(
    lengths: tuple[int, ...], *, grad: bool = True
) -> list[tuple[torch.Tensor, ...]]:
    return [attention_inputs(CPU, length, grad=grad) for length in lengths]


def test_number_of_graphs_of_attention():
    """With `dynamic=None` one more, for the first length; with True see the module below."""
    call = attention(CPU_CONFIG, "dense")
    report = count_graphs(call, attention_sweep(SWEEP[:-2]), dynamic=None)
    assert report.graphs == 3
    assert [finding.kind for finding in report.findings] == ["recompile"] * 2


@pytest.mark.exhaustive
def test_number_of_graphs_of_attention_to_8192_tokens():
    """On the meta device: traced alike, and nothing is computed."""
    inputs = [
        tuple(x.to("meta") for x in attention_inputs(CPU, length))
        for length in (*SWEEP, *range(2, 8192, 571))
    ]
    assert count_graphs(attention(CPU_CONFIG, "dense"), inputs, dynamic=True).graphs == 2


@pytest.mark.kept(lambda separate: not separate)
@pytest.mark.parametrize("separate", [False, True])
def test_number_of_graphs_of_the_module(separate):
    module = layer(CPU, separate_branch_kv=separate)
    inputs = [(random(CPU, 1, length, module.hidden_size),) for length in SWEEP[:-1]]
    assert count_graphs(module, inputs, dynamic=True).graphs == 2


@pytest.mark.kept(lambda dynamic: dynamic is None)
@pytest.mark.parametrize("device", [CPU], ids=["cpu"])
@pytest.mark.parametrize("dynamic", [True, None])
def test_number_of_graphs_of_patched_llama(device, llama, dynamic):
    call = llama_call(llama, use_cache=False)
    inputs = [(token_ids(CPU, length),) for length in SWEEP[:-2]]
    assert count_graphs(call, inputs, dynamic=dynamic).graphs == 2 + (dynamic is None)


def test_number_of_graphs_of_decoding():
    """One token against a past that grows."""
    call = attention(CPU_CONFIG, "dense")
    inputs = [attention_inputs(CPU, length, 1) for length in (100, 7, 8, 11, 12, 2, 16, 300)]
    assert count_graphs(call, inputs, dynamic=True).graphs == 1


@pytest.mark.exhaustive
def test_number_of_graphs_of_flex():
    every = attention_sweep(SWEEP[:-2], grad=False)
    call = attention(CPU_CONFIG, "flex")
    assert count_graphs(call, every, dynamic=True).graphs == 2


CUDA_SWEEP = (2500, 8192, 2501, 1, 31, 2, 32, 100, 128, 129, 48, 64, 1000)


@pytest.mark.long
@pytest.mark.gpu
@pytest.mark.parametrize("train", [False, True], ids=["forward", "training"])
def test_number_of_graphs_on_cuda(train):
    """Generated code included: what Inductor guards on counts too."""
    inputs = [attention_inputs(CUDA, length, grad=train) for length in CUDA_SWEEP]
    call = attention(config_for(CUDA), "auto")
    report = count_graphs(call, inputs, dynamic=True, backend="inductor")
    assert report.graphs == 2, report
