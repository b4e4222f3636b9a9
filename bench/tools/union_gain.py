"""Whether block unions pay on the choices of a trained model, for several G.

    python -m nsa_flex.bench.tools.union_gain bench/results/choices_125m.npz --out union_gain.json

times the selected branch forward on recorded choices with unions and without (every tile by
partial outputs). Whatever G the model had, its KV heads stand for KV heads of the G asked for.
Needs CUDA.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from triton.testing import do_bench

from nsa_flex import NSAConfig, selected_attention
from nsa_flex.bench.cases.patterns import neighbour_overlap
from nsa_flex.bench.measure import machine
from nsa_flex.bench.report.rows import write_rows
from nsa_flex.fallback_kernels.launch.plans import forget_plans
from nsa_flex.fallback_kernels.selected import config as selected_plan
from nsa_flex.fallback_kernels.selected.block_union import build_block_unions

GROUPS = (1, 4, 6, 16)
NUM_QUERY_HEADS = 48  # a multiple of each G


def forget() -> None:
    """Plans of launches and of sizes: both hold the limit of unions."""
    selected_plan.forget_kept()
    forget_plans()


def row_of(
    blocks: Tensor, block_size: int, group: int, head_dim: int, repetitions: int
) -> dict[str, Any]:
    """One G and head dim.

    Args:
        blocks: int32 (1, Hkv, S, n), of a trained model.
    """
    length, config = blocks.shape[2], NSAConfig()
    counts = config.num_initial_blocks, config.num_local_blocks
    query, key, value = (
        torch.randn(
            1, length, heads, head_dim, device=blocks.device, dtype=torch.bfloat16
        ).transpose(1, 2)
        for heads in (group * blocks.shape[1], blocks.shape[1], blocks.shape[1])
    )
    row: dict[str, Any] = {"group": group, "head_dim": head_dim, "seq_len": length}
    row["heads"] = f"{query.shape[1]}/{key.shape[1]}"
    row["overlap"] = round(neighbour_overlap(blocks), 4)
    for name, limit in (("unions", selected_plan.UNION_LIMIT), ("partials", 0)):
        with mock.patch.object(selected_plan, "UNION_LIMIT", limit), torch.no_grad():
            forget()
            plan = selected_plan.SelectedPlan.of(
                *(query, key, value, blocks.shape[3], block_size, *counts, 0)
            )
            sizes = build_block_unions(plan, blocks).sizes
            row[f"{name}_share"] = round((sizes >= 0).float().mean().item(), 4)
            row[f"{name}_ms"] = round(
                do_bench(
                    lambda: selected_attention(
                        query,
                        key,
                        value,
                        blocks,
                        block_size=block_size,
                        num_initial_blocks=counts[0],
                        num_local_blocks=counts[1],
                    ),
                    rep=repetitions,
                    return_mode="median",
                ),
                4,
            )
    forget()
    row["partials_over_unions"] = round(row["partials_ms"] / row["unions_ms"], 3)
    return row


def main() -> None:
    """Time, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("choices", type=Path, help="of bench/tools/record_choices.py")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--groups", type=int, nargs="+", default=GROUPS)
    parser.add_argument("--head-dims", type=int, nargs="+", default=(64, 128))
    parser.add_argument("--repetitions-ms", type=int, default=100)
    given = parser.parse_args()
    device = torch.device("cuda")
    with np.load(given.choices) as file:
        table, block_size = file["blocks"].astype(np.int32), int(file["block_size"])
    rows = []
    for head_dim in given.head_dims:
        for group in given.groups:
            turns = np.arange(NUM_QUERY_HEADS // group) % len(table)
            blocks = torch.from_numpy(table[turns])[None].contiguous().to(device)
            row = row_of(blocks, block_size, group, head_dim, given.repetitions_ms)
            rows.append({**row, "choices": given.choices.name, **machine.describe(device)})
            print(json.dumps(row), flush=True)
    if given.out is not None:
        write_rows(given.out, rows)


if __name__ == "__main__":
    main()
