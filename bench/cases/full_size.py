"""Times the models of public checkpoints at full size, with random weights, on one GPU.

    nsa-1b-train     a training step of NSA-1B on one row, layers recomputed in the backward
    nsa-1b-generate  a prompt of that length, and new tokens by the growing cache
    minicpm4-prefill MiniCPM4-8B with its sparse_config: one row into a cache
    minicpm4-decode  the same model: new tokens of 8 rows, which share that many prompt tokens
    minimax-m3-layer the attention of one sparse layer, indexer included, forward and backward

bfloat16, not compiled. Each is run twice, and the second counts. Rows of JSON: seconds by the
wall clock, of a whole step or of one new token, and the most memory that was allocated. Nothing
is compared with other attention: what is shown is that it runs, and how fast.

Example: python -m nsa_flex.bench.cases.full_size --out full_size.json
Example: python -m nsa_flex.bench.cases.full_size --only minimax-m3-layer --out m3.json
"""

from __future__ import annotations

import gc
import json
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import nsa_flex
from nsa_flex.bench.cases.checkpoints import NSA_1B
from nsa_flex.bench.command_line import parser_of
from nsa_flex.bench.measure.machine import describe
from nsa_flex.bench.measure.timing import peak_of, reset_peak

KI = 1024
LOSS_TOKENS = 4096  # whose logits are in memory at once
NEW_TOKENS = 16
SPARSE_CONFIG = {
    "kernel_size": 32, "kernel_stride": 16, "init_blocks": 1, "block_size": 64,
    "window_size": 2048, "topk": 64, "use_nope": False, "dense_len": 8192,
}  # fmt: skip
M3_LAYER = {
    "hidden_size": 6144, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
    "rotary_dim": 64, "index_n_heads": 4, "index_head_dim": 128, "index_block_size": 128,
    "index_topk_blocks": 16, "num_hidden_layers": 1, "layer_types": ["minimax_m3_sparse"],
    "mlp_layer_types": ["dense"], "intermediate_size": 16, "dense_intermediate_size": 16,
    "shared_intermediate_size": 16, "num_local_experts": 2, "num_experts_per_tok": 1,
    "vocab_size": 16, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5
    },
}  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """Where to run, tokens, and what to replace in the configs: by nothing at full size."""

    device: torch.device
    tokens: int
    changes: dict[str, Any]


@contextmanager
def new_modules(device: torch.device) -> Iterator[None]:
    """Within, modules are made on the device in bfloat16."""
    former = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(former)


def random_ids(model: Any, *shape: int) -> Tensor:
    return torch.randint(3, model.config.vocab_size, shape, device=model.device)


def nsa_1b(sizes: Sizes) -> Any:
    config = transformers.LlamaConfig(
        **{
            "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
            "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 8192,
            "vocab_size": 128256, "rope_theta": 5e5, "tie_word_embeddings": True,
            "max_position_embeddings": sizes.tokens + NEW_TOKENS, "eos_token_id": None,
            **sizes.changes,
        }
    )  # fmt: skip
    with new_modules(sizes.device):
        model = transformers.LlamaForCausalLM(config)
        return nsa_flex.patch(model, NSA_1B, init="unbiased")


def nsa_1b_train(sizes: Sizes) -> Callable[[], int]:
    model = nsa_1b(sizes).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), fused=sizes.device.type == "cuda")
    ids = random_ids(model, 1, sizes.tokens)

    def loss_of(hidden: Tensor, following: Tensor) -> Tensor:
        logits = model.lm_head(hidden).float()
        return F.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="sum")

    def step() -> int:
        hidden = model.model(ids, use_cache=False).last_hidden_state
        parts = zip(
            hidden[:, :-1].split(LOSS_TOKENS, 1), ids[:, 1:].split(LOSS_TOKENS, 1), strict=True
        )
        losses = [checkpoint(loss_of, *part, use_reentrant=False) for part in parts]
        (torch.stack(losses).sum() / sizes.tokens).backward()
        missing = [name for name, x in model.named_parameters() if x.grad is None]
        assert not missing, f"no gradient of {missing}"
        optimizer.step()
        optimizer.zero_grad()
        return 1

    return step


def nsa_1b_generate(sizes: Sizes) -> Callable[[], int]:
    model = nsa_1b(sizes).eval()
    prompt = random_ids(model, 1, sizes.tokens)

    def generate() -> int:
        out = model.generate(
            prompt, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0,
            attention_mask=torch.ones_like(prompt),
        )  # fmt: skip
        assert out.shape[1] == sizes.tokens + NEW_TOKENS
        return 1

    return generate


def minicpm4(sizes: Sizes) -> Any:
    from nsa_flex.patching.minicpm import MiniCPM4ForCausalLM
    from nsa_flex.patching.minicpm_config import MiniCPM4Config

    config = MiniCPM4Config(
        sparse_config=SPARSE_CONFIG,
        max_position_embeddings=sizes.tokens,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        **sizes.changes,
    )
    with new_modules(sizes.device):
        return MiniCPM4ForCausalLM._from_config(config, dtype=torch.bfloat16).eval()


@torch.no_grad()
def minicpm4_prefill(sizes: Sizes) -> Callable[[], int]:
    model = minicpm4(sizes)
    ids = random_ids(model, 1, sizes.tokens)

    def prefill() -> int:
        with torch.no_grad():
            assert model(ids, use_cache=True, logits_to_keep=1).logits.isfinite().all()
        return 1

    return prefill


def minicpm4_decode(sizes: Sizes) -> Callable[[], int]:
    model = minicpm4(sizes)
    ids = random_ids(model, 8, sizes.tokens // 8 - 2 * NEW_TOKENS)
    with torch.no_grad():
        out = model(ids, use_cache=True, logits_to_keep=1)
    name = "cache" if hasattr(out, "cache") else "past_key_values"
    cache, following = getattr(out, name), out.logits.argmax(-1)

    def steps() -> int:
        token = following
        with torch.no_grad():
            for _ in range(NEW_TOKENS):
                token = model(token, **{name: cache}, use_cache=True).logits.argmax(-1)
        return NEW_TOKENS

    return steps


def minimax_m3_layer(sizes: Sizes) -> Callable[[], int]:
    from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as modeling

    config = modeling.MiniMaxM3VLTextConfig(**{**M3_LAYER, **sizes.changes})
    with new_modules(sizes.device):
        model = modeling.MiniMaxM3VLForCausalLM._from_config(
            config, attn_implementation="nsa_flex", dtype=torch.bfloat16
        )
        layer, rotary = model.model.layers[0].self_attn, model.model.rotary_emb
        hidden = torch.randn(1, sizes.tokens, config.hidden_size, requires_grad=True)
    positions = torch.arange(sizes.tokens, device=sizes.device)[None]
    angles = rotary(hidden, positions)
    grad = torch.randn_like(hidden)

    def step() -> int:
        options = {"position_embeddings": angles, "position_ids": positions}
        out, *_ = layer(hidden, attention_mask=None, **options)
        out.backward(grad)
        assert hidden.grad is not None
        hidden.grad = None
        layer.zero_grad()
        return 1

    return step


RUNS: dict[str, tuple[Callable[[Sizes], Callable[[], int]], int]] = {
    "nsa-1b-train": (nsa_1b_train, 64 * KI),
    "nsa-1b-generate": (nsa_1b_generate, 64 * KI),
    "minimax-m3-layer": (minimax_m3_layer, 128 * KI),
    "minicpm4-prefill": (minicpm4_prefill, 128 * KI),
    "minicpm4-decode": (minicpm4_decode, 128 * KI),
}


def row_of(name: str, sizes: Sizes) -> dict[str, Any]:
    """Seconds of the second run, of a step or a token, or what went wrong."""
    row: dict[str, Any] = {"run": name, "tokens": sizes.tokens}
    synchronise = torch.cuda.synchronize if sizes.device.type == "cuda" else lambda: None
    try:
        torch.manual_seed(0)
        run = RUNS[name][0](sizes)
        run()
        reset_peak(sizes.device)
        synchronise()
        start = time.perf_counter()
        number = run()
        synchronise()
        row["seconds"] = round((time.perf_counter() - start) / number, 5)
        row["peak_bytes"] = peak_of(sizes.device)
    except Exception as error:
        traceback.print_exc()
        row["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
    gc.collect()
    if sizes.device.type == "cuda":
        torch.cuda.empty_cache()
    return row


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--out", type=Path, required=True, help="JSON file of rows")
    device = torch.device("cuda")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.only:
        rows.append(row_of(name, Sizes(device, RUNS[name][1], {})))
        print(json.dumps(rows[-1]), flush=True)
        about = str(__doc__).partition("Rows of")[0]
        head = json.dumps({"about": about, **describe(device)})[:-1]
        lines = ",\n".join(json.dumps(row) for row in rows)
        arguments.out.write_text(f'{head}, "rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
