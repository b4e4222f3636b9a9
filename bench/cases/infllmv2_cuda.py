"""InfLLM-V2 attention, block selection included: OpenBMB's kernels, nsa_flex and cuDNN in turn.

`infllmv2_cuda_impl` (module infllm_v2) must be installed; its pipeline here is that of MiniCPM4's
own code: means of keys, scores, max-pooling, top-k, attention. One row, 32/2 heads of 128,
bfloat16, random inputs, the published configuration without its dense part. Rows of JSON: medians
in milliseconds (`measure.timing`); `distance` is that of both sparse outputs, over the norm.

Example: python -m nsa_flex.bench.cases.infllmv2_cuda --out infllmv2.json
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsa_flex import InfLLMV2Config, infllm_v2_attention
from nsa_flex.bench.command_line import pair_of, row_parser
from nsa_flex.bench.measure import machine
from nsa_flex.bench.measure.timing import both_passes
from nsa_flex.bench.report.rows import Row, write_rows

CONFIG = InfLLMV2Config(dense_len=0)
HEAD_DIM = 128
BLOCK, STRIDE, LOCAL = 64, 16, 33  # tokens of a block and between means; blocks of 2048 tokens
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # of (S, H, D)


def upstream(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    from infllm_v2 import (  # type: ignore[import-not-found]
        infllmv2_attn_stage1,
        infllmv2_attn_varlen_func,
        max_pooling_1d_varlen,
    )

    length, device = query.shape[0], query.device

    def means(size: int, stride: int) -> Tensor:
        return key.unfold(0, size, stride).float().mean(-1).to(key.dtype).contiguous()

    def bounds(count: int) -> Tensor:
        return torch.tensor([0, count], dtype=torch.int32, device=device)

    with torch.no_grad():
        fine, coarse = means(32, STRIDE), means(128, 4 * STRIDE)
        rows, blocks = bounds(length), bounds(fine.shape[0])
        scores = infllmv2_attn_stage1(
            query,
            fine,
            coarse,
            cu_seqlens_q=rows,
            cu_seqlens_k=blocks,
            cu_seqlens_v=bounds(coarse.shape[0]),
            max_seqlen_q=length,
            max_seqlen_k=fine.shape[0],
            causal=True,
        )
        pooled = max_pooling_1d_varlen(
            scores.to(query.dtype),
            rows,
            blocks,
            torch.zeros(1, dtype=torch.int32, device=device),
            max_seqlen_q=length,
            max_seqlen_k=fine.shape[0],
            local_blocks=LOCAL,
            init_blocks=1,
            block_size=BLOCK,
            stride=STRIDE,
        )
        del scores
        best = (
            pooled.topk(min(CONFIG.num_blocks, pooled.shape[-1]), dim=-1).indices.sort(-1).values
        )
        own = (torch.arange(length, device=device) // BLOCK)[None, :, None]
        best = torch.where(best <= own, best, -1).to(torch.int32).contiguous()
    found: Tensor = infllmv2_attn_varlen_func(
        query, key, value, rows, rows, length, length, 0.0, None, causal=True, topk_idx=best
    )
    return found


def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    return infllm_v2_attention(q, k, v, config=CONFIG)[0].transpose(0, 1)


def dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)


WAYS: dict[str, Attention] = {"infllmv2_cuda_impl": upstream, "nsa_flex": ours, "cudnn": dense}


def distance_of(leaves: list[Tensor]) -> float:
    """Of both sparse outputs, over the norm of ours."""
    with torch.no_grad():
        theirs, own = (WAYS[name](*leaves).float() for name in ("infllmv2_cuda_impl", "nsa_flex"))
        return float((theirs - own).norm() / own.norm())


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = row_parser(__doc__, "32/2")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1 << 16, 1 << 17])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--milliseconds", type=float, default=300, help="of each measurement")
    arguments = parser.parse_args(argv)
    device = torch.device(arguments.device)
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "requires_grad": True}
    rows: list[Row] = []
    for heads, tokens in itertools.product(arguments.heads, arguments.tokens):
        torch.manual_seed(0)
        query_heads, kv_heads = pair_of(heads)
        leaves = [
            torch.randn(tokens, count, HEAD_DIM, **options)
            for count in (query_heads, kv_heads, kv_heads)
        ]
        shape: Row = {"heads": heads, "tokens": tokens, "distance": distance_of(leaves)}
        for name, way in WAYS.items():
            times = both_passes(way, leaves, arguments.milliseconds)
            rows.append({"name": name, **shape, **times, **machine.describe(device)})
            print(json.dumps(rows[-1]), flush=True)
            write_rows(arguments.out, rows)


if __name__ == "__main__":
    main()
