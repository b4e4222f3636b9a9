"""Attention of public checkpoints, the choice of blocks included, against dense attention.

The sizes of NSA-1B's layers are cases of the core. InfLLM-V2 (MiniCPM4) and MiniMax-M3 are targets
of their own: queries, keys and values go in, an output comes out, and nothing is given.

* nsa: compiled. nsa-eager: without torch.compile around it. sdpa-*: dense causal attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_flex.bench.cases.case import Case
from nsa_flex.bench.cases.core import CLEAR_MARGIN, SDPA, dense_attention, is_nsa
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
)
from nsa_flex.bench.measure import reference
from nsa_flex.config import NSAConfig
from nsa_flex.indexer import indexer_topk
from nsa_flex.infllm import COARSE, InfLLMV2Config, infllm_v2_attention
from nsa_flex.selected import selected_attention
from nsa_flex.selection import coarse_keys

NSA_1B = NSAConfig(
    *(16, 16, 16, 16),
    num_initial_blocks=0,
    num_local_blocks=1,
    window_size=128,
    compression="mean",
    selection="tiled_top_k",
)
INFLLM_V2 = InfLLMV2Config().selection
MINIMAX_M3 = NSAConfig(
    *(128, 128, 128, 16), num_initial_blocks=0, num_local_blocks=1, compression="mean"
)


class GivenBlocks(Target):
    """Selected attention for blocks that the case's own rule chooses."""

    def implementations(self) -> tuple[str, ...]:
        return ("nsa", "nsa-eager", *SDPA)

    def attention(self, case: Case, task: Task) -> Function:
        """(query, key, value) to output, sparse."""
        raise NotImplementedError

    def choice(self, case: Case, task: Task, group: Group) -> tuple[Tensor, Tensor]:
        """Blocks (R, n) of a group's sampled queries, and by which share they lead."""
        raise NotImplementedError

    def function(self, case: Case, task: Task, compiler: str) -> Function:
        if not is_nsa(case):
            return dense_attention(SDPA[case.implementation])
        attention = self.attention(case, task)
        return attention if case.implementation == "nsa-eager" else compiled(attention, compiler)

    def reference(self, case: Case, task: Task, group: Group, arguments: Tensors) -> Tensor:
        query, key, value = arguments.values()
        positions, scale = group.positions, scale_of(case)
        if not is_nsa(case):
            return reference.dense(query, key, value, positions, scale)
        blocks, _ = self.choice(case, task, group)
        return reference.selected(query, key, value, positions, scale, blocks, case.config)

    def clear(self, case: Case, task: Task, group: Group) -> Tensor:
        if not is_nsa(case):
            return super().clear(case, task, group)
        return self.choice(case, task, group)[1] > CLEAR_MARGIN


class InfLLMV2(GivenBlocks):
    """Means of keys, max-pooled scores by the coarse log-sum-exp, and one softmax over blocks."""

    name = "infllm-v2"

    def prepare(self, case: Case, device: torch.device) -> Task:
        tensors, facts = query_key_value(case, device)
        return Task(tensors, facts=facts)

    def attention(self, case: Case, task: Task) -> Function:
        config = infllm_config(case.config)

        def infllm_v2(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return infllm_v2_attention(query, key, value, config=config)

        return infllm_v2

    def choice(self, case: Case, task: Task, group: Group) -> tuple[Tensor, Tensor]:
        query, key = (task.arguments[name].detach() for name in ("query", "key"))
        heads = slice(group.head * case.group_size, (group.head + 1) * case.group_size)
        means = compress(key[group.batch, group.head][None, None], case.config)
        scored = reference.max_pooled_scores(
            query[group.batch, heads, group.positions].double(),
            means[0, 0].double(),
            coarse_keys(means, case.config, COARSE)[0, 0].double(),
            group.positions,
            scale_of(case),
            case.config,
            COARSE,
        )
        return reference.choice(scored, group.positions, case.config)


class MiniMaxM3(GivenBlocks):
    """The blocks of an indexer of one head a KV head and keys that all share, then attention."""

    name = "minimax-m3"

    def prepare(self, case: Case, device: torch.device) -> Task:
        tensors, facts = query_key_value(case, device)
        sizes = {"index_query": case.kv_heads, "index_key": 1}
        constants = {
            name: normal(case, heads, case.seq_len, case.head_dim, device, grad=False)
            for name, heads in sizes.items()
        }
        return Task(tensors, constants, facts)

    def attention(self, case: Case, task: Task) -> Function:
        config, indexer = case.config, tuple(task.constants.values())

        def minimax_m3(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            blocks = indexer_topk(
                *indexer,
                block_size=config.select_block_size,
                num_blocks=config.num_selected_blocks,
                num_local_blocks=config.num_local_blocks,
            )
            return selected_attention(query, key, value, blocks, config=config)

        return minimax_m3

    def choice(self, case: Case, task: Task, group: Group) -> tuple[Tensor, Tensor]:
        query, key = task.constants.values()
        scored = reference.largest_products(
            query[group.batch, group.head, group.positions].double(),
            key[group.batch, 0].double(),
            group.positions,
            case.config.select_block_size,
        )
        return reference.choice(scored, group.positions, case.config)


def infllm_config(config: NSAConfig) -> InfLLMV2Config:
    """InfLLM-V2's sizes of a case's; sparse at every length."""
    window = config.num_local_blocks - 1
    return InfLLMV2Config(
        kernel_size=config.compress_block_size,
        kernel_stride=config.compress_stride,
        block_size=config.select_block_size,
        init_blocks=config.num_initial_blocks,
        window_size=window * config.select_block_size,
        topk=config.num_selected_blocks - window,
        dense_len=0,
    )
