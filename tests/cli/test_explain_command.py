"""`nsa-flex explain`: backends of each branch from sizes given on the command line."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import nsa_flex
from nsa_flex.cli.app import app


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["explain", *arguments], prog_name="nsa-flex")


def as_json(*arguments: str) -> dict[str, Any]:
    result = invoke("--json", *arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_says_what_explain_says(train, device):
    sizes = ["--heads", "8/2", "--head-dim", "64", "--seq-len", "4096", "--dtype", "fp32"]
    query, key = (torch.empty(1, heads, 4096, 64, device="meta") for heads in (8, 2))
    expected = nsa_flex.explain(query, key, device=device, needs_grad=train).to_dict()
    assert as_json(*sizes, "--device", device, "--train" if train else "--no-train") == expected


def test_table_names_each_branch_with_its_backend_and_reason():
    text = invoke("--device", "cpu", "--train").output
    told = as_json("--device", "cpu", "--train")
    for branch in ("compressed", "selected", "sliding"):
        choice = told[branch]
        assert any(
            f"{branch} " in line and choice["backend"] in line and choice["reason"] in line
            for line in text.splitlines()
        )


def test_key_and_value_head_dims_may_differ():
    assert "160 and 128" in as_json("--head-dim", "160/128")["compressed"]["reason"]


def test_few_queries_against_a_longer_past():
    assert as_json("--queries", "1") != as_json()


def test_kernels_are_listed_with_their_launches():
    told, text = as_json("--train"), invoke("--train").output
    assert told["forward"]
    assert told["backward"]
    for run in told["forward"] + told["backward"]:
        assert f"{run['name']} x{run['launches']}" in text


def test_a_decode_step_over_a_cache():
    step = ["--seq-len", "4096", "--queries", "1", "--cached"]
    told = as_json(*step)
    assert {told[branch]["backend"] for branch in ("compressed", "selected", "sliding")} == {
        "triton"
    }
    assert {run["stage"] for run in told["forward"]} == {"decode"}
    mlp = as_json(*step, "--compression", "mlp")
    # φ of these kinds has two kernels of its own; the others store and compress as they attend.
    of_compression = ["decode_project_kernel", "decode_write_blocks_kernel"]
    kernels = [[run["name"] for run in each["forward"]] for each in (mlp, told)]
    assert kernels[0] == [*of_compression, *kernels[1]]


def test_dtypes_have_a_short_and_a_long_name():
    assert as_json("--dtype", "float32") == as_json("--dtype", "fp32") != as_json()


def test_a_backend_for_one_branch():
    chosen = as_json("--device", "cpu", "--backend", "selected=flex, sliding=dense")
    assert chosen["selected"] == {"backend": "flex", "reason": "asked for"}
    assert chosen["sliding"] == {"backend": "dense", "reason": "asked for"}


@pytest.mark.parametrize(
    ("backend", "text"),
    [
        ("sliding=fa2", "backend 'fa2' cannot compute the sliding branch"),
        ("nonsense", "backend is 'nonsense'; it must be one of"),
        ("sideways=flex", "backend names branches ['sideways']"),
    ],
)
def test_a_backend_that_cannot_exits_with_1(backend, text):
    result = invoke("--device", "cpu", "--backend", backend)
    assert result.exit_code == 1
    assert text in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["--heads", "32/7"],
        ["--heads", "32/0"],
        ["--heads", "many"],
        ["--head-dim", "64/"],
        ["--head-dim", "64/64/64"],
        ["--head-dim", "-1"],
        ["--seq-len", "0"],
        ["--seq-len", "8", "--queries", "9"],
        ["--dtype", "int8"],
        ["--cached", "--train"],
        ["--compression", "nonsense"],
        ["--device", "nonsense"],
    ],
)
def test_wrong_usage_exits_with_2(arguments):
    assert invoke(*arguments).exit_code == 2
