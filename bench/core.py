"""Times the whole attention core against dense causal attention on one CUDA device.

The core is what replaces attention in a layer: compression (mean), the three branches, the choice
of blocks and the gates, from q, k, v and gates to the output, compiled. Dense is causal SDPA on
cuDNN. Random inputs, so that choices hardly overlap. Rows go to a JSON file.

Example: python bench/core.py --heads 64/4 32/8 --seq-len 8192 65536 --out core.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench

from nsa_flex import NSAConfig, explain, nsa_attention
from nsa_flex.compression import mean_of_blocks, split_segments

QUANTILES = [0.5, 0.2, 0.8]


def inputs_of(heads: int, kv_heads: int, length: int, dim: int) -> list[Tensor]:
    """q, k, v and gates in (B, S, H, D) memory, bf16, requiring gradients."""

    def normal(count: int, width: int) -> Tensor:
        x = torch.randn(1, length, count, width, device="cuda", dtype=torch.bfloat16)
        return x.transpose(1, 2).requires_grad_(True)

    tensors = [normal(heads, dim), normal(kv_heads, dim), normal(kv_heads, dim)]
    return [*tensors, normal(heads, 3).detach().sigmoid().requires_grad_(True)]


def core(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, config: NSAConfig) -> Tensor:
    """What is timed."""
    ck, cv = (mean_of_blocks(split_segments(x, config), config).to(x.dtype) for x in (k, v))
    return nsa_attention(q, k, v, ck, cv, gates, config=config)


def dense(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
    """The baseline: one causal attention over all tokens."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def measure(function: Callable[[], Any], milliseconds: int) -> dict[str, float]:
    """Median and the 20th and 80th percentile, in ms."""
    median, low, high = do_bench(function, warmup=25, rep=milliseconds, quantiles=QUANTILES)
    return {"median_ms": median, "p20_ms": low, "p80_ms": high}


def time_both(
    function: Callable[..., Tensor], inputs: list[Tensor], milliseconds: int
) -> dict[str, Any]:
    """Forward without gradients, forward with backward, and the peak memory of the latter."""
    with torch.no_grad():
        forward = measure(lambda: function(*inputs), milliseconds)
    grad = torch.randn_like(inputs[0])

    def step() -> None:
        out = function(*inputs)
        torch.autograd.grad(out, inputs, grad, allow_unused=True)

    step()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    peak = torch.cuda.max_memory_allocated() - before
    both = measure(step, milliseconds)
    return {"forward": forward, "forward_backward": both, "peak_bytes_above_inputs": peak}


def check(function: Callable[..., Tensor], inputs: list[Tensor], config: NSAConfig) -> None:
    """Before timing: the compiled core agrees with the eager one, gradients included."""
    plain = core(*inputs, config)
    out = function(*inputs)
    grad = torch.randn_like(out)
    pairs = [(out, plain)]
    pairs += zip(*(torch.autograd.grad(x, inputs, grad) for x in (out, plain)), strict=True)
    for got, want in pairs:
        error = (got.float() - want.float()).norm() / want.float().norm()
        assert error < 2**-6, f"compiled and eager differ by {error:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", nargs="+", default=["64/4", "32/8"], help="Hq/Hkv")
    parser.add_argument("--seq-len", nargs="+", type=int, default=[8192, 32768, 65536])
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--milliseconds", type=int, default=150, help="timed per measurement")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of rows")
    arguments = parser.parse_args()
    config = NSAConfig()
    rows = []
    for shape in arguments.heads:
        heads, kv_heads = (int(x) for x in shape.split("/"))
        for length in arguments.seq_len:
            torch._dynamo.reset()
            torch.manual_seed(0)
            inputs = inputs_of(heads, kv_heads, length, arguments.head_dim)
            compiled = torch.compile(core, fullgraph=True, dynamic=False)
            ours = lambda *xs, compiled=compiled: compiled(*xs, config)  # noqa: E731
            check(ours, inputs, config)
            row = {
                "what": "attention core",
                "device": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "triton": triton.__version__,
                "dtype": "bfloat16",
                "batch": 1,
                "heads": shape,
                "head_dim": arguments.head_dim,
                "seq_len": length,
                "backends": explain(*inputs[:3]).to_dict(),
                "nsa": time_both(ours, inputs, arguments.milliseconds),
                "dense": time_both(dense, inputs, arguments.milliseconds),
            }
            for part in ("forward", "forward_backward"):
                dense_ms, ours_ms = (row[who][part]["median_ms"] for who in ("dense", "nsa"))
                row[f"dense_over_nsa_{part}"] = dense_ms / ours_ms
                print(f"{shape} {length} {part}: nsa {ours_ms:.2f} ms, dense {dense_ms:.2f} ms")
            rows.append(row)
            arguments.out.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
