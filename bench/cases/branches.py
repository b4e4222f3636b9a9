"""The three branches alone, on every backend that offers them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nsa_flex.backends.branch import Branch
from nsa_flex.bench.cases import patterns
from nsa_flex.bench.cases.case import Case
from nsa_flex.bench.cases.targets import (
    Function,
    Group,
    Target,
    Task,
    Tensors,
    compiled,
    compress,
    normal,
    query_key_value,
    scale_of,
    too_large,
)
from nsa_flex.bench.measure import reference
from nsa_flex.dispatch import IMPLEMENTATIONS, BranchName
from nsa_flex.selection import choose_blocks

DETERMINISTIC = "triton-deterministic"


class BranchTarget(Target):
    """What `compressed`, `selected` and `sliding` have in common: a backend is asked by name.

    Compiled, unless the name ends in "-eager".
    """

    name: BranchName

    def implementations(self) -> tuple[str, ...]:
        backends = [backend for backend, branch in IMPLEMENTATIONS if branch == self.name]
        return (*backends, *(f"{backend}-eager" for backend in backends))

    def unsupported_reason(self, case: Case, memory: int) -> str | None:
        return too_large(case, case.seq_len, memory) if backend_of(case) == "dense" else None

    def function(self, case: Case, task: Task, compiler: str) -> Function:
        run = IMPLEMENTATIONS[backend_of(case), self.name]
        config, scale, blocks = case.config, scale_of(case), task.constants.get("blocks")
        need_lse = self.name == "compressed" and task.arguments["query"].device.type == "cuda"

        def branch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            config.specialize()
            asked = Branch(query, key, value, config, scale, blocks=blocks, need_lse=need_lse)
            return run(asked)[0]

        return branch if case.implementation.endswith("-eager") else compiled(branch, compiler)


class Compressed(BranchTarget):
    """Branch 1 from compressed keys and values, its log-sum-exp included on CUDA."""

    name = "compressed"

    def prepare(self, case: Case, device: torch.device) -> Task:
        tensors, facts = query_key_value(case, device)
        for name in ("key", "value"):
            means = compress(tensors[name].detach().contiguous(), case.config)
            tensors[name] = means.requires_grad_(case.train)
        return Task(tensors, facts=facts)

    def unsupported_reason(self, case: Case, memory: int) -> str | None:
        keys = case.config.num_compressed_blocks(case.seq_len)
        return too_large(case, keys, memory) if backend_of(case) == "dense" else None

    def reference(self, case: Case, task: Task, group: Group, arguments: Tensors) -> Tensor:
        query, key, value = arguments.values()
        scale = scale_of(case)
        return reference.compressed(query, key, value, group.positions, scale, case.config)


class Selected(BranchTarget):
    """Branch 2 for given choices: real ones of the inputs, or those of a trained model.

    `triton-deterministic` has no float atomics in its backward.
    """

    name = "selected"

    def implementations(self) -> tuple[str, ...]:
        return (*super().implementations(), DETERMINISTIC)

    def function(self, case: Case, task: Task, compiler: str) -> Function:
        if case.implementation != DETERMINISTIC:
            return super().function(case, task, compiler)
        branch = super().function(replace(case, implementation="triton"), task, compiler)
        return lambda *arguments: deterministically(branch, *arguments)

    def prepare(self, case: Case, device: torch.device) -> Task:
        tensors, facts = query_key_value(case, device)
        if case.pattern == "trained":
            blocks = patterns.recorded_choices(case, device)
        else:
            blocks = real_choices(case, tensors["query"].detach(), tensors["key"].detach())
        facts["overlap"] = round(patterns.neighbour_overlap(blocks), 4)
        return Task(tensors, {"blocks": blocks}, facts)

    def reference(self, case: Case, task: Task, group: Group, arguments: Tensors) -> Tensor:
        blocks = task.constants["blocks"][group.batch, group.head, group.positions]
        query, key, value = arguments.values()
        scale, places = scale_of(case), group.positions
        return reference.selected(query, key, value, places, scale, blocks, case.config)


class Sliding(BranchTarget):
    """Branch 3."""

    name = "sliding"

    def prepare(self, case: Case, device: torch.device) -> Task:
        names = {"query": case.query_heads, "key": case.kv_heads, "value": case.kv_heads}
        widths = {"query": case.head_dim, "key": case.head_dim, "value": case.value_dim}
        tensors = {
            name: normal(case, heads, case.seq_len, widths[name], device)
            for name, heads in names.items()
        }
        return Task(tensors)

    def reference(self, case: Case, task: Task, group: Group, arguments: Tensors) -> Tensor:
        query, key, value = arguments.values()
        scale = scale_of(case)
        return reference.sliding(query, key, value, group.positions, scale, case.config)


def deterministically(function: Function, *arguments: Tensor) -> Tensor:
    """A call with deterministic algorithms, whose backward is then deterministic as well.

    New memory is not filled, which is a debugging aid that no kernel here needs.
    """
    before = torch.are_deterministic_algorithms_enabled()
    memory: Any = torch.utils.deterministic  # torch's stubs lack the field
    fills = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False
    try:
        return function(*arguments)
    finally:
        torch.use_deterministic_algorithms(before)
        memory.fill_uninitialized_memory = fills


def backend_of(case: Case) -> str:
    """The backend that an implementation of a branch names."""
    return case.implementation.removesuffix("-eager")


def real_choices(case: Case, query: Tensor, key: Tensor) -> Tensor:
    """int32 (B, Hkv, S, n) of Eq. 9, by the mean of each block."""
    return choose_blocks(
        query,
        compress(key, case.config),
        config=case.config,
        scale=scale_of(case),
        num_blocks=case.config.num_select_blocks(case.seq_len),
        positions=torch.arange(case.seq_len, device=key.device)[None],
    )
