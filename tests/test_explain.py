"""The kernels that `explain` tells are those that run, with the reasons why not others."""

from __future__ import annotations

import contextlib
import importlib
import json
import pkgutil
import re
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa_flex import Compression, LayerCache, NSAConfig, explain, fallback_kernels, nsa_attention
from nsa_flex.installed import HAS_TRITON
from nsa_flex.parallel import SequenceShards, exchanged_bytes, sent_bytes
from reference.interpreter import INTERPRETED
from reference.launches import SUBSETS, decode_kernels_of

pytestmark = pytest.mark.skipif(
    INTERPRETED or not HAS_TRITON, reason="kernels are compiled by Triton, not interpreted"
)
if HAS_TRITON:
    from triton.runtime.jit import JITFunction, KernelInterface

    from nsa_flex.fallback_kernels.common import arch

GPU = torch.device("cuda:0")
A100 = ((8, 0), 166912)


@cache
def kernels_of(suffix: str = "") -> frozenset[str]:
    """Names of all Triton functions in modules whose name ends so."""
    found = set()
    for module in pkgutil.walk_packages(
        fallback_kernels.__path__, fallback_kernels.__name__ + "."
    ):
        if module.name.endswith(suffix):
            members = vars(importlib.import_module(module.name)).values()
            found |= {
                each.fn.__name__
                for each in members
                if isinstance(each, JITFunction) and each.fn.__module__ == module.name
            }
    return frozenset(found)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """(B, H, S, D) in memory (B, S, H, D)."""
    batch, heads, tokens, dim = shape
    return torch.empty(batch, tokens, heads, dim, dtype=dtype, device="meta").transpose(1, 2)


def pair(dtype: torch.dtype = torch.bfloat16, tokens: int = 16384) -> tuple[torch.Tensor, ...]:
    return meta(1, 64, tokens, 128, dtype=dtype), meta(1, 4, tokens, 128, dtype=dtype)


def filled_cache(
    kind: Any, tokens: int = 4096, max_length: int = 8192, config: NSAConfig | None = None
) -> LayerCache:
    phi = [
        Compression(config or NSAConfig(), 4, 128, kind, device="meta", dtype=torch.bfloat16)
        for _ in range(2)
    ]
    cache = LayerCache(*phi, max_length=max_length)
    with torch.no_grad():
        cache.update(meta(1, 4, tokens, 128), meta(1, 4, tokens, 128))
    return cache


@pytest.fixture
def imagine() -> Any:
    """Gives the imaginary device GPU other properties for the rest of the test."""
    with contextlib.ExitStack() as stack:
        yield lambda *facts: stack.enter_context(arch.imagining(GPU, arch.Device(*facts)))


def test_training_runs_the_sm90_kernels_on_hopper(imagine: Callable[..., None]) -> None:
    imagine(*arch.SM90)
    kernels = explain(*pair(), device=GPU, needs_grad=True).kernels
    assert {run.stage for run in kernels.forward if run.name in kernels_of("_sm90")} == {
        "topk",
        "selected",
        "fused",
    }
    assert {run.stage for run in kernels.backward} >= {"fused", "selected", "compressed"}
    assert kernels.names <= kernels_of()
    assert kernels.passed_over == ()
    assert explain(*pair(), device=GPU, needs_grad=False).kernels.backward == ()


def test_the_device_is_why_gluon_does_not_run(imagine: Callable[..., None]) -> None:
    imagine(*A100)
    kernels = explain(*pair(), device=GPU, needs_grad=True).kernels
    assert kernels.names
    assert not kernels.names & kernels_of("_sm90")
    reason = "the Gluon kernels need compute capability 9.x, got 8.0"
    assert {f"{stage}: {reason}" for stage in ("topk", "selected")} <= set(kernels.passed_over)


def test_the_version_of_triton_is_why_gluon_does_not_run(
    imagine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triton.__version__", "4.0.1")
    arch._warn_of_version.cache_clear()
    imagine(*arch.SM90)
    with pytest.warns(UserWarning, match="kernels for Hopper and the fast launcher") as told:
        kernels = [explain(*pair(), device=GPU, needs_grad=grad).kernels for grad in (True, False)]
    assert not (kernels[0].names | kernels[1].names) & kernels_of("_sm90")
    reason = "written for Triton 3.6.x, 3.7.x, 3.8.x and 3.9.x, got 4.0.1"
    assert any(line.endswith(reason) for line in kernels[0].passed_over)
    (warning,) = (str(each.message) for each in told)  # once, whatever asks
    assert reason in warning
    assert "at 2k tokens and 64/4 heads a forward takes about 20 % longer" in warning


def test_the_warning_tells_the_committed_rows() -> None:
    path = Path(__file__).parents[1] / "bench" / "results" / "hopper_off_h100.json"
    rows = json.loads(path.read_text())["rows"]
    of = {row["hopper"]: row for row in rows if (row["heads"], row["tokens"]) == ("64/4", 2048)}
    forward, both = (
        round(100 * (of[False][name] / of[True][name] - 1))
        for name in ("forward_ms", "forward_backward_ms")
    )
    assert re.findall(r"\d+ %", arch.HOPPER_LOSS) == [f"{forward} %", f"{both} %"]
    assert f"a forward takes about {forward} % longer, and {both} % with" in arch.HOPPER_LOSS


def test_only_hopper_is_warned_of_a_version(
    imagine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triton.__version__", "4.0.1")
    arch._warn_of_version.cache_clear()
    imagine(*A100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert explain(*pair(), device=GPU, needs_grad=True).kernels.names


def test_float32_says_why_not(imagine: Callable[..., None]) -> None:
    imagine(*arch.SM90)
    told = explain(*pair(torch.float32), device=GPU, needs_grad=True)
    assert not told.kernels.names & kernels_of("_sm90")
    assert {"ranges", "selected", "topk"} <= {run.stage for run in told.kernels.forward}
    assert "query is torch.float32" in str(told)


def test_keys_of_its_own_keep_the_sliding_branch_out_of_the_epilogue(
    imagine: Callable[..., None],
) -> None:
    imagine(*arch.SM90)
    query, key = pair()
    shared = explain(query, key, device=GPU).kernels
    own = explain(query, key, device=GPU, sliding_key=meta(*key.shape), sliding_value=key).kernels
    assert {run.stage for run in own.forward} == {run.stage for run in shared.forward}
    assert own.names != shared.names


def test_ranks_and_the_bytes_that_they_send() -> None:
    """Of the last chunk of rank 0 of two, which attends all keys of both."""
    shards, phi = SequenceShards("", 0, 2), Compression(NSAConfig(), 2, 64)
    query, key = (torch.empty(1, heads, 256, 64, device="meta") for heads in (8, 2))
    found = explain(query, key, device="cuda", mesh=shards, needs_grad=False)
    alone = explain(query[:, :, :128], key.new_empty(1, 2, 512, 64), device="cuda")
    assert found.choices == alone.choices
    sent = sent_bytes(512, 2, 2, 64, config=NSAConfig(), dtype=torch.float32)
    assert (found.ranks, found.sent) == (2, sent)
    assert str(found).splitlines()[3] == (
        f"2 ranks share each row; each sends {sent.forward / 1e9:.3g} GB forward, "
        f"{sent.backward / 1e9:.3g} GB backward"
    )
    assert found.to_dict()["sent"] == sent._asdict()
    with pytest.raises(ValueError, match="a shard has 64 tokens; expected a multiple of 2"):
        explain(query[:, :, :64], key[:, :, :64], mesh=shards)
    with pytest.raises(ValueError, match="mesh and cache were both given: the cache decides"):
        explain(query[:, :, :1], cache=LayerCache(phi, phi), mesh=shards)


def test_ranks_heed_what_the_call_is_given() -> None:
    """Of the last chunk of rank 0 of two: 128 queries, the last ones of 512 keys or fewer."""
    shards = SequenceShards("", 0, 2)
    query, key = (torch.empty(2, heads, 256, 64, device="meta") for heads in (8, 2))
    chunk, keys = query[:, :, :128], key.new_empty(2, 2, 512, 64)
    own = {"sliding_key": key, "sliding_value": key.clone()}
    starts = torch.empty(2, 256, dtype=torch.int64, device="meta")
    both: dict[str, Any] = {"device": GPU, "needs_grad": False}
    cases: list[tuple[dict[str, Any], Any]] = [
        ({**own}, {"sliding_key": keys.clone(), "sliding_value": keys.clone()}),
        ({"document_start": starts}, {"document_start": starts[:, :128]}),
    ]
    plain = explain(chunk, keys, **both)
    for given, of_chunk in cases:
        found = explain(query, key, mesh=shards, **given, **both)
        alone = explain(chunk, keys, **of_chunk, **both)
        assert (found.choices, found.kernels) == (alone.choices, alone.kernels)
        assert found.kernels != plain.kernels
    sizes: dict[str, Any] = {"config": NSAConfig(), "batch_size": 2, "dtype": torch.float32}
    sent = sent_bytes(512, 2, 2, 64, separate_branch_kv=True, **sizes)
    assert explain(query, key, mesh=shards, **own, **both).sent == sent
    few = query[:, :, :8]
    for offset, end in ((None, 512), (100, 116)):
        found = explain(few, key, mesh=shards, query_offset=offset, **own, **both)
        window = keys[:, :, :end].clone()
        alone = explain(
            few[:, :, :4], keys[:, :, :end], sliding_key=window, sliding_value=window, **both
        )
        assert (found.choices, found.kernels) == (alone.choices, alone.kernels)
        sent = sent_bytes(512, 2, 2, 64, separate_branch_kv=True, num_queries=16, **sizes)
        assert found.sent == sent


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (
            {"max_document_length": 64},
            ValueError,
            "max_document_length and mesh were both given: context_parallel_attention takes",
        ),
        (
            {"query_offset": torch.zeros(1)},
            TypeError,
            "query_offset is a Tensor; with mesh it must",
        ),
        (
            {"query_offset": 1},
            ValueError,
            "query_offset=1 with 512 queries leaves the 512 keys of all ranks",
        ),
        (
            {name: torch.zeros(1, 2, 128, 64) for name in ("sliding_key", "sliding_value")},
            ValueError,
            r"sliding_key has shape \(1, 2, 128, 64\); expected \(1, 2, 256, 64\)",
        ),
        (
            {"document_start": torch.zeros(1, 100, dtype=torch.int32)},
            ValueError,
            r"document_start must be int \(1, 128\), got torch.int32 \(1, 50\)",
        ),
        (
            {"exchange_heads": True, "query_offset": 0},
            ValueError,
            "query_offset and exchange_heads were both given: layers have none",
        ),
        (
            {"exchange_heads": True, "sliding_key": torch.zeros(1, 2, 256, 64)},
            ValueError,
            "sliding_key and exchange_heads were both given",
        ),
    ],
)
def test_what_ranks_do_not_take(
    given: dict[str, Any], error: type[Exception], message: str
) -> None:
    query, key = (torch.empty(1, heads, 256, 64, device="meta") for heads in (8, 2))
    with pytest.raises(error, match=message):
        explain(query, key, mesh=SequenceShards("", 0, 2), **given)


def test_heads_exchanged_and_the_bytes_that_they_take() -> None:
    """What a rank of two runs is whole rows of half the heads."""
    shards, phi = SequenceShards("", 0, 2), Compression(NSAConfig(), 2, 64)
    query, key = (torch.empty(3, heads, 256, 64, device="meta") for heads in (8, 2))
    options = {"mesh": shards, "exchange_heads": True, "needs_grad": False}
    found = explain(query, key, key[..., :32], device="cuda", **options)
    whole = [torch.empty(3, heads, 512, 64, device="meta") for heads in (4, 1)]
    alone = explain(*whole, whole[1][..., :32], device="cuda")
    assert found.choices == alone.choices
    starts = torch.empty(3, 256, dtype=torch.int64, device="meta")
    told = {"document_start": starts, "max_document_length": 64, "device": GPU}
    reason = explain(query, key, **told, **options)["selected"].reason
    assert reason.startswith("documents of up to 1024 tokens")
    sizes = {"value_head_dim": 32, "batch_size": 3, "dtype": torch.float32}
    sent = exchanged_bytes(512, 2, 8, 2, 64, config=NSAConfig(), **sizes)
    assert (found.ranks, found.sent) == (2, sent)
    with pytest.raises(ValueError, match="key has 1 heads; 2 ranks that exchange tokens for head"):
        explain(query, key[:, :1], **options)
    with pytest.raises(ValueError, match="exchange_heads needs the ranks that exchange them"):
        explain(query, key, exchange_heads=True)
    with pytest.raises(ValueError, match="exchange_heads and cache were both given: the cache"):
        explain(query[:, :, :1], cache=LayerCache(phi, phi), exchange_heads=True)


@pytest.mark.parametrize("on_device", [False, True])
def test_few_queries_run_the_decode_kernels(on_device: bool) -> None:
    query, key = meta(1, 64, 16, 128), meta(1, 4, 65536, 128)
    offset = torch.empty(1, dtype=torch.int64, device="meta") if on_device else 1000
    told = explain(query, key, device=GPU, query_offset=offset, needs_grad=False)
    assert {choice.backend for choice in told.choices.values()} == {"triton"}
    assert {run.stage for run in told.kernels.forward} == {"decode"}
    own = explain(query, key, device=GPU, sliding_key=key, sliding_value=meta(*key.shape))
    assert own["sliding"].reason.endswith("the sliding branch has keys of its own")
    assert "decode" not in {run.stage for run in own.kernels.forward}
    tall = explain(meta(1, 512, 16, 128), key, device=GPU)
    assert "128 query heads share a KV head; the decode kernels take" in tall["sliding"].reason


@pytest.mark.parametrize("branches", SUBSETS, ids="+".join)
def test_few_queries_of_some_branches_run_the_decode_kernels_of_those(branches: Any) -> None:
    sizes: Any = {"device": GPU, "query_offset": 1000, "config": NSAConfig(branches=branches)}
    told = explain(meta(1, 64, 16, 128), meta(1, 4, 65536, 128), needs_grad=False, **sizes)
    assert {choice.backend for choice in told.choices.values()} == {"triton"}
    assert [run.name for run in told.kernels.forward] == decode_kernels_of(branches, stores=False)


def test_a_decode_step_runs_on_triton() -> None:
    told = explain(meta(1, 64, 1, 128), cache=filled_cache("mean"), device=GPU)
    assert {choice.backend for choice in told.choices.values()} == {"triton"}
    assert {run.stage for run in told.kernels.forward} == {"decode"}
    assert all(run.launches == 1 for run in told.kernels.forward)


@pytest.mark.parametrize("branches", SUBSETS, ids="+".join)
def test_a_step_of_some_branches_runs_no_others(branches: Any) -> None:
    """Even where it would complete a block, and φ has kernels of its own."""
    cache = filled_cache("mlp", 4095, config=NSAConfig(branches=branches))
    told = explain(meta(1, 64, 1, 128), cache=cache, device=GPU)
    assert {choice.backend for choice in told.choices.values()} == {"triton"}
    assert tuple(told.choices) == branches
    names = [run.name for run in told.kernels.forward]
    phi = ["decode_project_kernel", "decode_write_blocks_kernel"]
    before = [] if branches == ("sliding",) else phi
    assert names == before + decode_kernels_of(branches, stores=True)


def test_a_step_that_completes_a_block_multiplies() -> None:
    query = meta(1, 64, 1, 128)
    mean, mlp, before = (
        explain(query, cache=filled_cache(kind, tokens), device=GPU).kernels.names
        for kind, tokens in (("mean", 4095), ("mlp", 4095), ("mlp", 4094))
    )
    assert mlp - mean == {"decode_project_kernel", "decode_write_blocks_kernel"}
    assert before == mean


def test_phi_that_no_kernel_takes_is_told() -> None:
    cache = filled_cache("mean")
    cache.compress_value = Compression(NSAConfig(), 4, 128, "mlp", device="meta")
    kernels = explain(meta(1, 64, 1, 128), cache=cache, device=GPU).kernels
    assert {run.stage for run in kernels.forward} == {"decode"}
    assert any("keys and values alike, got mean and mlp" in x for x in kernels.passed_over)


def test_a_step_that_no_kernel_takes_is_dense() -> None:
    cache = filled_cache("mean")
    on_cpu = explain(meta(1, 64, 1, 128), cache=cache, device="cpu")
    assert on_cpu["selected"].backend == "dense"
    assert "need a CUDA device, got cpu" in on_cpu["selected"].reason
    assert on_cpu.kernels.names == frozenset()
    grouped = explain(meta(1, 512, 1, 128), cache=cache, device=GPU)
    assert grouped["selected"].backend == "dense"
    assert "128 query heads share a KV head" in grouped["selected"].reason


def test_a_prefill_with_a_cache_follows_the_table() -> None:
    empty = filled_cache("mean", tokens=64)
    empty.reset()
    first = explain(meta(1, 64, 4096, 128), cache=empty, device=GPU)
    assert first["sliding"].backend == "triton"
    later = explain(meta(1, 64, 64, 128), cache=filled_cache("mean"), device=GPU)
    assert later["sliding"].backend == "triton"
    assert "store_tokens_kernel" in first.kernels.names & later.kernels.names
    assert "needs the queries to be all the tokens" in later["compressed"].reason


def test_queries_at_an_offset_run_in_one_operator(imagine: Callable[..., None]) -> None:
    imagine(*arch.SM90)
    query, key = meta(1, 64, 512, 128), meta(1, 4, 4096, 128)
    told = explain(query, key, device=GPU, query_offset=1000, needs_grad=False)
    ends = {"fused_fwd_epilogue_sm90_kernel", "gated_sum_fwd_kernel"}
    assert told.kernels.names & ends == {"fused_fwd_epilogue_sm90_kernel"}
    assert "ranges_fwd_kernel" in told.kernels.names
    assert told["compressed"].reason.startswith("first in the table")
    with_gradients = explain(query, key, device=GPU, query_offset=1000, needs_grad=True)
    assert with_gradients.kernels.names & ends == {"fused_fwd_epilogue_sm90_kernel"}
    assert "fused_bwd_dkdv_kernel" in with_gradients.kernels.names
    # Tiles of four queries begin before the first one.
    told = explain(query, key, device=GPU, query_offset=1001, needs_grad=True)
    assert "fused_sliding_epilogue_kernel" in told.kernels.names
    assert "begin before the query at 1001" in str(told.kernels.route)
    query, key = meta(1, 64, 16384, 128), meta(1, 4, 65536, 128)
    told = explain(query, key, device=GPU, query_offset=32768, needs_grad=True)
    assert told.kernels.route.compressed == "cudnn"
    assert "compressed_past_bwd_kernel" in told.kernels.names


def test_the_cache_stays_as_it_is() -> None:
    cache = LayerCache(*(Compression(NSAConfig(), 2, 16) for _ in range(2)))
    with torch.no_grad():
        cache.update(torch.randn(2, 2, 100, 16), torch.randn(2, 2, 100, 16))
    before = [x.clone() for x in (*cache.buffers.tensors, cache.lengths)]
    held = cache.buffers.tensors
    for tokens in (1, 40, 400):
        explain(torch.randn(2, 4, tokens, 16), cache=cache, device=GPU)
    assert cache.get_seq_length() == 100
    assert cache.incoming is None
    assert all(x is y for x, y in zip(held, cache.buffers.tensors, strict=True))
    for x, y in zip(before, (*cache.buffers.tensors, cache.lengths), strict=True):
        assert torch.equal(x, y)


def test_launching_is_as_it_was_afterwards() -> None:
    launch = KernelInterface.__getitem__
    assert explain(*pair(), device=GPU).kernels.names
    assert KernelInterface.__getitem__ is launch


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "neither key nor cache was given"),
        ({"key": True, "cache": True}, "key and cache were both given"),
    ],
)
def test_one_of_key_and_cache(arguments: dict[str, bool], message: str) -> None:
    given = {"key": meta(1, 4, 64, 128), "cache": filled_cache("mean")}
    with pytest.raises(ValueError, match=message):
        explain(meta(1, 64, 1, 128), **{name: given[name] for name in arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": NSAConfig()}, "config and cache were both given"),
        ({"query_offset": 3}, "query_offset and cache were both given"),
        ({"max_document_length": 3}, "max_document_length and cache were both given"),
        ({"needs_grad": True}, "needs_grad and cache were both given"),
        ({"query": meta(1, 63, 1, 128)}, "query has 63 heads of 128, the cache"),
        ({"query": meta(1, 64, 1, 64)}, "query has 64 heads of 64, the cache"),
        ({"query": meta(2, 64, 1, 128)}, "query has 2 rows, the cache holds 1"),
    ],
)
def test_what_a_cache_decides_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        explain(**{"query": meta(1, 64, 1, 128), "cache": filled_cache("mean"), **arguments})


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"query": meta(1, 3, 64, 128)}, "key has 4 heads; query's 3 must be a multiple"),
        ({"query": meta(2, 8, 64, 128)}, r"key has shape \(1, 4, 64, 128\); expected"),
        ({"query": meta(1, 8, 64, 64)}, r"key has shape \(1, 4, 64, 128\); expected"),
        ({"query": meta(1, 8, 64, 128).long()}, "key is torch.bfloat16, query torch.int64"),
        ({"query": meta(1, 8, 65, 128)}, "query has 65 tokens, key only 64"),
        ({"query_offset": 99}, "query_offset=99 with 64 queries leaves"),
        ({"max_document_length": 9}, "was given without document_start"),
        ({"sliding_key": meta(1, 4, 64, 128)}, "must be given together"),
    ],
)
def test_calls_that_would_be_refused(arguments: dict[str, Any], message: str, device: str) -> None:
    """Before anybody asks for kernels."""
    with pytest.raises(ValueError, match=message):
        explain(
            **{"query": meta(1, 8, 64, 128), "key": meta(1, 4, 64, 128), **arguments},
            device=device,
        )


def test_a_cached_call_on_a_backend_of_torch() -> None:
    explanation = explain(
        meta(1, 64, 1, 128), cache=filled_cache("mean"), backend="flex", device="cpu"
    )
    assert explanation["selected"].backend == "flex"
    assert not explanation.kernels.names


# On a device: what the profiler sees.


def seen(call: Callable[[], Any]) -> frozenset[str]:
    """Names of nsa_flex's kernels that run in a call, which has run once before."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        call()
        torch.cuda.synchronize()
    return frozenset(event.name for event in profiler.events()) & kernels_of()


def random(*shape: int, dtype: torch.dtype, grad: bool = False) -> torch.Tensor:
    batch, heads, tokens, dim = shape
    x = torch.randn(batch, tokens, heads, dim, dtype=dtype, device="cuda")
    return x.transpose(1, 2).requires_grad_(grad)


CALLS: dict[str, dict[str, Any]] = {
    "core": {},
    "core, training": {"grad": True},
    "core, keys of its own": {"grad": True, "own": True},
    "few tokens": {"tokens": 640},
    "few queries": {"queries": 3},
    "float32": {"dtype": torch.float32, "grad": True},
    "documents": {"documents": True, "grad": True},
    "selected and sliding alone": {"backend": {"compressed": "dense"}, "grad": True},
    "selected alone": {"backend": {"compressed": "dense", "sliding": "dense"}, "grad": True},
    "sliding alone": {"backend": {"compressed": "dense", "selected": "dense"}, "grad": True},
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_the_profiler_sees_the_kernels_of_a_call(name: str) -> None:
    case = {"dtype": torch.bfloat16, "grad": False, "tokens": 2048, "backend": "auto"}
    case |= CALLS[name]
    dtype, grad, tokens = case["dtype"], case["grad"], case["tokens"]
    num_blocks = NSAConfig().num_compressed_blocks(tokens)
    lengths = {
        "query": (64, case.get("queries", tokens)),
        "key": (4, tokens),
        "value": (4, tokens),
    }
    lengths |= {"compressed_key": (4, num_blocks), "compressed_value": (4, num_blocks)}
    if case.get("own"):
        lengths |= {"sliding_key": (4, tokens), "sliding_value": (4, tokens)}
    inputs = {
        each: random(1, heads, length, 128, dtype=dtype, grad=grad)
        for each, (heads, length) in lengths.items()
    }
    gates_shape = (*inputs["query"].shape[:3], 3)
    gates = torch.rand(gates_shape, dtype=dtype, device="cuda", requires_grad=grad)
    options: dict[str, Any] = {"backend": case["backend"]}
    if case.get("documents"):
        places = torch.arange(tokens, device="cuda")[None]
        options["document_start"] = places // 1024 * 1024

    def call() -> None:
        out = nsa_attention(**inputs, gates=gates, config=NSAConfig(), **options)
        if grad:
            out.backward(torch.ones_like(out))

    told_of = {each: x for each, x in inputs.items() if not each.startswith("compressed")}
    told = explain(**told_of, **options)
    assert seen(call) == told.kernels.names
    assert told.kernels.names


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["mean", "weighted", "mlp"])
@pytest.mark.parametrize("tokens", [1, 4])
def test_the_profiler_sees_the_kernels_of_a_decode_step(kind: Any, tokens: int) -> None:
    phi = [
        Compression(NSAConfig(), 4, 128, kind, device="cuda", dtype=torch.bfloat16)
        for _ in range(2)
    ]
    cache = LayerCache(*phi, max_length=4096)
    options = {"dtype": torch.bfloat16}

    def step(num_new: int = tokens) -> None:
        from nsa_flex.cache.columns import IncomingBatch
        from nsa_flex.cache.layer import advance

        cache.expect(IncomingBatch(num_new))
        key, value = (random(1, 4, num_new, 128, **options) for _ in range(2))
        keys, values = cache.update(key, value)
        gates = torch.rand(1, 64, num_new, 3, device="cuda", **options)
        cache.attend(random(1, 64, num_new, 128, **options), keys, values, gates)
        advance([cache], IncomingBatch(num_new))

    with torch.no_grad():
        step(2048)
        told = explain(random(1, 64, tokens, 128, **options), cache=cache)
        assert {choice.backend for choice in told.choices.values()} == {"triton"}
        assert seen(step) == told.kernels.names
