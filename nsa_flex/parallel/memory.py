"""What fits on n GPUs, in closed form: a cache on several ranks, and training on them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from nsa_flex.config import BRANCHES, NSAConfig
from nsa_flex.parallel.sent import num_compressed, num_raw


@dataclass(frozen=True)
class ModelSizes:
    """Of a Llama-like decoder.

    Args:
        num_layers, hidden_size, intermediate_size, vocab_size: L, E, I and V.
        num_query_heads, num_kv_heads, head_dim: Hq, Hkv and D.
        tied: whether the embedding is the output layer, too.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    tied: bool = False

    @property
    def layer_parameters(self) -> int:
        """Of one layer: projections, MLP and norms; what NSA adds is less than 1 %."""
        heads = 2 * self.num_query_heads + 2 * self.num_kv_heads
        wide = 3 * self.intermediate_size
        return self.hidden_size * (heads * self.head_dim + wide + 2)

    @property
    def parameters(self) -> int:
        """Of all layers, the embedding, the output layer and the last norm."""
        outer = self.vocab_size * (1 if self.tied else 2) + 1
        return self.num_layers * self.layer_parameters + self.hidden_size * outer


LLAMA_8B = ModelSizes(32, 4096, 14336, 128256, 32, 8, 128)


def cache_bytes(
    max_length: int,
    num_ranks: int,
    sizes: ModelSizes,
    *,
    config: NSAConfig,
    batch_size: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> int:
    """Bytes of a `ShardedCache` of each layer on one of `num_ranks` ranks, to the byte.

    Args:
        max_length: tokens that each of `batch_size` rows may have.

    >>> cache_bytes(2**19, 2, LLAMA_8B, config=NSAConfig()) / 2**30
    34.0078125
    """
    block = config.select_block_size
    tokens = -(-max_length // (num_ranks * block)) * block
    slots = 2 * (tokens + block) + num_compressed(config) * (tokens // config.compress_stride)
    row = sizes.num_kv_heads * sizes.head_dim * dtype.itemsize
    return sizes.num_layers * batch_size * slots * row


def gathered_bytes(
    num_tokens: int,
    num_ranks: int,
    sizes: ModelSizes,
    *,
    config: NSAConfig,
    batch_size: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> int:
    """Bytes that a layer gathers in the forward of context parallelism, to the byte.

    Keys and values, compressed ones, and the first tokens of each chunk.

    Args:
        num_tokens: S, of a whole row, padding included.
    """
    halo = 2 * num_ranks * (config.compress_block_size - config.compress_stride)
    raw = 2 * num_ranks * num_raw(num_tokens // num_ranks, config)
    compressed = (num_tokens // config.compress_stride + halo) * num_compressed(config)
    row = sizes.num_kv_heads * sizes.head_dim * dtype.itemsize
    return batch_size * (raw + compressed) * row


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes on each rank at the highest point of a training step, by what they are.

    weights, gradients, optimizer: float32 shards of them, and of AdamW's moments.
    layers: of two layers and the outer parameters, whole, in half precision.
    kept: the inputs of all layers, which recomputation starts from.
    gathered: keys and values of whole rows of one layer, and their gradients twice: in half
        precision, and in float32 to be reduced. Without a selected branch an upper bound.
    work: what one recomputed layer keeps for its backward, about.
    logits: in half precision, in float32 and their gradient; nothing else is large then.
    """

    weights: int
    gradients: int
    optimizer: int
    layers: int
    kept: int
    gathered: int
    work: int
    logits: int

    @property
    def total(self) -> int:
        """Of a layer's backward or of the logits', whichever is more."""
        lasting = self.weights + self.gradients + self.optimizer + self.layers + self.kept
        return lasting + max(self.gathered + self.work, self.logits)


def training_memory(
    num_tokens: int,
    num_ranks: int,
    sizes: ModelSizes,
    *,
    config: NSAConfig,
    batch_size: int = 1,
) -> TrainingMemory:
    """A step in bfloat16 with FSDP2 and context parallelism over the same ranks.

    Every layer is recomputed in the backward; weights, gradients and moments are float32.

    Args:
        num_tokens: S, of each of `batch_size` rows.
        num_ranks: of both.
    """
    own = batch_size * num_tokens // num_ranks
    shard = 4 * sizes.parameters // num_ranks
    outer = sizes.parameters - sizes.num_layers * sizes.layer_parameters
    # Where few are sent, attention is given rows as long: zeros before the window.
    rows = replace(config, branches=BRANCHES)
    gathered = gathered_bytes(num_tokens, num_ranks, sizes, config=rows, batch_size=batch_size)
    # A layer keeps about 10 tensors of the hidden size and 3 of the MLP's.
    work = own * (10 * sizes.hidden_size + 3 * sizes.intermediate_size) * 2
    return TrainingMemory(
        weights=shard,
        gradients=shard,
        optimizer=2 * shard,
        layers=2 * (2 * sizes.layer_parameters + outer),
        kept=sizes.num_layers * own * sizes.hidden_size * 2,
        gathered=gathered * (1 + 1 + 2),
        work=work,
        logits=own * sizes.vocab_size * (2 + 4 + 4),
    )


def longest_row(device_bytes: int, num_ranks: int, sizes: ModelSizes, *, config: NSAConfig) -> int:
    """The longest row, a multiple of 2 P · l', that `training_memory` fits into a rank; 0 if none.

    >>> longest_row(72 * 2**30, 8, LLAMA_8B, config=NSAConfig())
    301056
    """
    multiple = 2 * num_ranks * config.select_block_size

    def fits(number: int) -> bool:
        found = training_memory(number * multiple, num_ranks, sizes, config=config)
        return found.total <= device_bytes

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * multiple
