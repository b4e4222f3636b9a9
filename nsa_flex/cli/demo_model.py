"""The small Llama of the demo, its patched copy, and how much of the text NSA reads."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass, replace
from typing import Any

import torch

import nsa_flex
from nsa_flex.config import NSAConfig


@dataclass(frozen=True)
class Size:
    """Everything about the demo that depends on the machine.

    Args:
        hidden_size, num_layers, num_query_heads, num_kv_heads, head_dim: of the Llama.
        config: NSA's sizes.
        seq_len: S, bytes of one training row.
        batch_size: rows of one training step.
        steps: training steps.
        learning_rate: peak, after warm-up.
        held_out_rows: rows of S held-out bytes on which the loss is measured.
        new_bytes: how many bytes to generate.
        compiler: backend of torch.compile.
        dtype: of matrix products (autocast); parameters and optimizer are float32.
    """

    hidden_size: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    config: NSAConfig
    seq_len: int
    batch_size: int
    steps: int
    learning_rate: float
    held_out_rows: int
    new_bytes: int
    compiler: str = "inductor"
    dtype: torch.dtype = torch.float32


# The smallest blocks with which 512 bytes are a long text: NSA reads under a third of the keys.
CPU = Size(
    hidden_size=128,
    num_layers=2,
    num_query_heads=8,
    num_kv_heads=2,
    head_dim=16,
    config=NSAConfig(
        compress_block_size=16,
        compress_stride=8,
        select_block_size=16,
        num_selected_blocks=4,
        window_size=32,
    ),
    seq_len=512,
    batch_size=2,
    steps=360,
    learning_rate=4e-3,
    held_out_rows=24,
    new_bytes=200,
)

# The paper's blocks.
GPU = Size(
    hidden_size=1024,
    num_layers=6,
    num_query_heads=16,
    num_kv_heads=4,
    head_dim=64,
    config=NSAConfig(),
    seq_len=4096,
    batch_size=4,
    steps=400,
    learning_rate=1e-3,
    held_out_rows=32,
    new_bytes=400,
    dtype=torch.bfloat16,
)

# For tests: seconds. Traced and differentiated ahead of time like the others, but the graphs
# are run operator by operator, since generating code takes most of the demo's time.
QUICK = Size(
    hidden_size=32,
    num_layers=1,
    num_query_heads=8,
    num_kv_heads=2,
    head_dim=8,
    config=NSAConfig(
        compress_block_size=8,
        compress_stride=4,
        select_block_size=8,
        num_selected_blocks=4,
        window_size=16,
    ),
    seq_len=128,
    batch_size=2,
    steps=30,
    learning_rate=1e-2,
    held_out_rows=4,
    new_bytes=8,
    compiler="aot_eager",
)


def choose_size(
    device: torch.device, *, quick: bool, steps: int | None, seq_len: int | None
) -> Size:
    """The size for a device, with what the user asked for otherwise."""
    size = QUICK if quick else GPU if device.type == "cuda" else CPU
    return replace(
        size,
        steps=size.steps if steps is None else steps,
        seq_len=size.seq_len if seq_len is None else seq_len,
    )


def build_models(size: Size, seed: int, device: torch.device) -> tuple[Any, Any]:
    """A patched Llama and its unpatched twin: the same random weights where both have any."""
    LlamaConfig, LlamaForCausalLM = _import_llama()
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=size.hidden_size,
        intermediate_size=3 * size.hidden_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_query_heads,
        num_key_value_heads=size.num_kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=2 * size.seq_len,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    twin = LlamaForCausalLM(config).to(device).train()
    patched = nsa_flex.patch(copy.deepcopy(twin), size.config)
    return patched, twin


def _import_llama() -> tuple[Any, Any]:
    """transformers imports what quantizes models too, which warns of what it cannot load."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    finally:
        logging.disable(before)
    return LlamaConfig, LlamaForCausalLM


def num_parameters(model: torch.nn.Module) -> int:
    """Each counted once, tied or not."""
    return sum(parameter.numel() for parameter in model.parameters())


@dataclass(frozen=True)
class KeysRead:
    """Keys that one query attends in each branch, in a document of S tokens.

    Args:
        compressed, selected, sliding: keys that the last query reads.
        fraction_last: of the S keys that the last query would read in dense attention, the
            share that NSA reads, counted once in each branch.
        fraction_mean: likewise, over all S queries together.
    """

    compressed: int
    selected: int
    sliding: int
    fraction_last: float
    fraction_mean: float


def keys_read(config: NSAConfig, seq_len: int) -> KeysRead:
    """How sparse NSA is; follows from sizes alone, whatever is chosen.

    >>> keys_read(NSAConfig(), 65536)
    KeysRead(compressed=4095, selected=1024, sliding=512, fraction_last=0.0859..., ...)
    """
    rows = [_keys_of(config, position) for position in range(seq_len)]
    total_dense = seq_len * (seq_len + 1) // 2
    return KeysRead(
        *rows[-1],
        fraction_last=sum(rows[-1]) / seq_len,
        fraction_mean=sum(map(sum, rows)) / total_dense,
    )


def _keys_of(config: NSAConfig, position: int) -> tuple[int, int, int]:
    """Compressed, selected and sliding keys of the query at `position`."""
    size = config.select_block_size
    own, place = divmod(position, size)
    whole_blocks = min(config.num_selected_blocks - 1, own)
    return (
        config.num_compressed_blocks(position + 1),
        whole_blocks * size + place + 1,
        min(config.window_size, position + 1),
    )
