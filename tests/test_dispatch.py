"""The table of `auto`, explicit choices, and what `explain` says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nsa_flex import explain
from nsa_flex.dispatch import IMPLEMENTATIONS, Facts, choose_backends, is_decoded, is_fused

CUDA = Facts(
    device_type="cuda",
    dtype=torch.bfloat16,
    head_dim=128,
    value_head_dim=128,
    num_query_heads=32,
    num_kv_heads=8,
    num_queries=8192,
    whole=True,
    documents=False,
    needs_grad=True,
)


def backends(facts: Facts, backend: object = "auto") -> tuple[str, ...]:
    return tuple(choice.backend for choice in choose_backends(facts, backend).values())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("sdpa", "triton", "triton")),
        ({"needs_grad": False}, ("sdpa", "triton", "triton")),
        ({"dtype": torch.float32}, ("triton", "triton", "triton")),
        ({"head_dim": 192}, ("sdpa", "triton", "triton")),
        ({"head_dim": 192, "value_head_dim": 192}, ("triton", "triton", "triton")),
        ({"head_dim": 512}, ("flex", "flex", "flex")),
        ({"documents": True}, ("triton", "triton", "triton")),
        ({"dtype": torch.float64}, ("dense", "dense", "dense")),
        ({"select_block_size": 48}, ("sdpa", "flex", "triton")),
        ({"num_selected_blocks": 128}, ("sdpa", "triton", "triton")),
        ({"num_selected_blocks": 129}, ("sdpa", "flex", "triton")),
        ({"num_query_heads": 128, "num_kv_heads": 1}, ("sdpa", "flex", "triton")),
        ({"whole": False}, ("triton", "triton", "triton")),
        ({"whole": False, "documents": True}, ("triton", "triton", "triton")),
        ({"whole": False, "num_queries": 1}, ("dense", "dense", "dense")),
        ({"head_dim": 8, "value_head_dim": 8}, ("sdpa", "triton", "triton")),
        ({"device_type": "cpu"}, ("dense", "dense", "dense")),
        ({"device_type": "cpu", "needs_grad": False}, ("dense", "dense", "dense")),
    ],
)
def test_auto(changes: dict[str, object], expected: tuple[str, ...]) -> None:
    assert backends(replace(CUDA, **changes)) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "together"),
    [
        ({}, True),
        ({"dtype": torch.float32}, False),
        ({"documents": True}, True),
        ({"whole": False, "needs_grad": False}, True),
        ({"whole": False, "needs_grad": False, "dtype": torch.float32}, True),
        ({"whole": False, "needs_grad": False, "head_dim": 12}, False),
        ({"whole": False, "needs_grad": False, "known_offset": False}, False),
        ({"whole": False, "needs_grad": False, "documents": True}, False),
        ({"whole": False}, True),
        ({"whole": False, "documents": True}, True),
        ({"num_selected_blocks": 65}, False),
        ({"selection": "max_pool"}, False),
        ({"selection": "of a fourth kind"}, False),
        ({"selection": "tiled_top_k"}, True),
    ],
)
def test_one_operator(changes: dict[str, object], together: bool) -> None:
    facts = replace(CUDA, **changes)  # type: ignore[arg-type]
    assert is_fused(choose_backends(facts), facts) == together


FEW = replace(CUDA, whole=False, num_queries=16, needs_grad=False, decode_problem=None)


@pytest.mark.parametrize(
    ("changes", "backend", "problem"),
    [
        ({}, "auto", None),
        ({"known_offset": False}, "auto", None),
        ({"needs_grad": True}, "auto", "they have no backward"),
        ({"documents": True}, "auto", "they take one document a row"),
        ({"decode_problem": "too many"}, "auto", "too many"),
        ({}, {"sliding": "auto"}, "they run all branches together"),
    ],
)
def test_few_queries_against_a_longer_past(
    changes: dict[str, object], backend: object, problem: str | None
) -> None:
    facts = replace(FEW, **changes)  # type: ignore[arg-type]
    choices = choose_backends(facts, backend)  # type: ignore[arg-type]
    assert is_decoded(facts, backend) == (problem is None)  # type: ignore[arg-type]
    for choice in choices.values():
        if problem is None:
            assert choice.backend == "triton"
            assert choice.reason.startswith("the decode kernels: at most 16 queries")
        else:
            assert choice.backend == "dense"
            assert choice.reason.endswith(f"longer past; not the decode kernels: {problem}")


@pytest.mark.parametrize("changes", [{"num_queries": 17}, {"whole": True}, {"device_type": "cpu"}])
def test_other_calls_are_no_decode_steps(changes: dict[str, object]) -> None:
    assert not is_decoded(replace(FEW, **changes), "auto")  # type: ignore[arg-type]


def test_a_named_backend_computes_few_queries() -> None:
    assert backends(FEW, "triton") == ("triton", "triton", "triton")
    assert not is_decoded(FEW, "triton")


def test_an_explicit_choice_is_taken_and_the_rest_is_auto() -> None:
    assert backends(CUDA, "flex") == ("flex", "flex", "flex")
    assert backends(CUDA, "dense") == ("dense", "dense", "dense")
    assert backends(CUDA, "fa2") == ("fa2", "triton", "fa2")
    assert backends(CUDA, "sdpa") == ("sdpa", "triton", "triton")
    assert backends(CUDA, {"selected": "flex"}) == ("sdpa", "flex", "triton")


@pytest.mark.parametrize(
    ("changes", "backend", "message"),
    [
        ({"dtype": torch.float32}, "sdpa", "needs float16 or bfloat16, got torch.float32"),
        ({"dtype": torch.float32}, "fa2", "needs float16 or bfloat16, got torch.float32"),
        ({"head_dim": 192}, "fa2", "FA-2 needs equal key and value head dims, got 192 and 128"),
        ({"head_dim": 256, "value_head_dim": 256}, "sdpa", "or 192 and 128, got 256 and 256"),
        ({"head_dim": 100, "value_head_dim": 100}, "fa2", "head dim that 8 divides, up to 256"),
        ({"head_dim": 160}, "sdpa", "head dims up to 128, or 192 and 128, got 160 and 128"),
        ({"head_dim": 100}, "sdpa", "head dims in multiples of 8, got 100 and 128"),
        ({"documents": True}, "fa2", "it cannot bound the keys a query"),
        ({"whole": False}, "sdpa", "needs the queries to be all the tokens"),
        ({"head_dim": 8}, "flex", "head dims of at least 16, got 8 and 128"),
        ({"device_type": "cpu"}, "flex", "FlexAttention has no backward on CPU"),
        ({"device_type": "cpu"}, "sdpa", "needs a CUDA device, got cpu"),
        ({"dtype": torch.float64}, "triton", "float16, bfloat16 or float32, got torch.float64"),
        ({"dtype": torch.float64}, "flex", "take float32, bfloat16 and float16"),
        ({"documents": True}, {"sliding": "fa2"}, "it cannot bound the keys a query"),
        ({"head_dim": 512}, "triton", "head dims up to 256, got 512 and 128"),
    ],
)
def test_an_explicit_choice_never_falls_back(
    changes: dict[str, object], backend: object, message: str
) -> None:
    facts = replace(CUDA, **changes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        choose_backends(facts, backend)  # type: ignore[arg-type]


def test_wide_heads_go_to_cudnn_from_hopper_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsa_flex.dispatch.unsupported.shared_memory", lambda: 166912)  # an A100's
    choice = choose_backends(replace(CUDA, head_dim=192))["compressed"]
    assert choice.backend == "triton"
    assert "not sdpa: cuDNN's backward takes head dims of 192 and 128 from Hopper" in choice.reason


def test_triton_is_passed_over_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsa_flex.dispatch.unsupported.HAS_TRITON", False)
    choice = choose_backends(CUDA)["selected"]
    assert choice.backend == "flex"
    assert "not triton: triton is not installed" in choice.reason
    with pytest.raises(ValueError, match="triton is not installed"):
        choose_backends(CUDA, "triton")


def test_every_backend_of_the_table_exists() -> None:
    for facts in (CUDA, replace(CUDA, dtype=torch.float32), replace(CUDA, device_type="cpu")):
        for branch, choice in choose_backends(facts).items():
            assert (choice.backend, branch) in IMPLEMENTATIONS


def test_explain() -> None:
    q = torch.empty(1, 32, 8192, 128, device="meta", dtype=torch.bfloat16)
    k = torch.empty(1, 8, 8192, 128, device="meta", dtype=torch.bfloat16)
    told = explain(q, k, device="cuda", needs_grad=True)
    assert told["compressed"].backend == "sdpa"
    assert told.to_dict()["selected"] == {"backend": "triton", "reason": "first in the table"}
    lines = str(told).splitlines()
    assert [line.split()[:2] for line in lines[:3]] == [
        ["compressed", "sdpa"],
        ["selected", "triton"],
        ["sliding", "triton"],
    ]
    told = explain(q.float(), k.float(), device="cuda")
    assert "not sdpa: it needs float16 or bfloat16" in told["compressed"].reason
    assert explain(q, k, device="cpu")["sliding"].backend == "dense"
    with pytest.raises(ValueError, match=r"key must be 4-D \(B, H, S, D\), got \(8, 8192, 128\)"):
        explain(q, k[0])
