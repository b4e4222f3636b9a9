"""Ranks of a job as a mesh: rows are shared out over one axis, the tokens of a row over the other.

The ranks of `engine.context_parallel` are neighbours and get the same rows; each collates them and
keeps its shard.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nsa_flex.config import NSAConfig
from nsa_flex.parallel import SequenceShards, sent_bytes, shard_batch
from nsa_flex.patching import context_parallel
from nsa_flex.training.arguments import data_ranks, is_bf16, world_size
from nsa_flex.training.config import TrainConfig
from nsa_flex.training.packing import Row
from nsa_flex.training.telemetry.observe import nsa_layers

# As accelerate calls these axes, whose data loaders give the same rows along the second.
ROWS, TOKENS = "dp_replicate", "cp"


def check_mesh(config: TrainConfig) -> None:
    """Raise ValueError if `engine.context_parallel` fits neither the ranks nor the model."""
    sharing = config.engine.context_parallel
    if sharing == 1:
        return
    if world_size() % sharing:
        raise ValueError(
            f"engine.context_parallel is {sharing}, and the job has {world_size()} processes: "
            f"start a multiple of {sharing} with torchrun"
        )
    if config.model.attention != "nsa":
        raise ValueError(
            f"engine.context_parallel is {sharing}, and model.attention {config.model.attention}: "
            "only NSA attends over ranks; set model.attention nsa, or context_parallel 1"
        )
    if config.model.dense_layers:
        raise ValueError(
            f"engine.context_parallel is {sharing}, and model.dense_layers "
            f"{list(config.model.dense_layers)}: only NSA attends over ranks; leave them out, or "
            "set context_parallel 1"
        )


def share_sequences(model: Any, config: TrainConfig, device: torch.device) -> DeviceMesh | None:
    """Put `model` in context parallelism as `config` says; the mesh, None where ranks are alone.

    The process group exists.
    """
    sharing = config.engine.context_parallel
    if sharing == 1:
        return None
    shape = (data_ranks(config), sharing)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=(ROWS, TOKENS))
    context_parallel(model, mesh[TOKENS])
    return mesh


def collator_of(model: Any, collate: Callable[[list[Row]], dict[str, Tensor]]) -> ShardedCollator:
    """Batches for a model whose sequences are shared."""
    layer: Any = next(iter(nsa_layers(model).values()))
    return ShardedCollator(collate, layer.shards, layer.config)


class ShardedCollator:
    """Batches of which this rank has its tokens: labels are shifted, rows padded to the mesh.

    Args:
        collate: makes whole batches of rows, as `Collator`.
        shards: the ranks that share them.
        config: of the model's NSA layers.
    """

    def __init__(
        self,
        collate: Callable[[list[Row]], dict[str, Tensor]],
        shards: SequenceShards,
        config: NSAConfig,
    ) -> None:
        self.collate, self.shards, self.config = collate, shards, config

    def __call__(self, rows: list[Row]) -> dict[str, Tensor]:
        """Rows (B,) -> what `shard_batch` gives, without a count of labels, the trainer's."""
        batch = self.collate(rows)
        own = shard_batch(
            batch["input_ids"],
            self.shards,
            self.config,
            labels=batch["labels"],
            cu_seqlens=batch.get("cu_seq_lens_q"),
        )
        del own["num_items_in_batch"]
        return own


def sent_per_step(model: Any, config: TrainConfig, collate: ShardedCollator) -> int:
    """Bytes that a rank sends in an optimizer step, for context parallelism alone.

    Recomputed activations send the forward again.
    """
    data, training = config.data, config.training
    row = Row(np.zeros(data.seq_len, np.int64), np.zeros(1, np.int64), data.seq_len)
    rows, own = collate([row] * training.batch_size)["input_ids"].shape
    forwards = 1 if config.engine.checkpointing == "none" else 2
    total = 0
    layers: Any = nsa_layers(model).values()
    for layer in layers:
        sent = sent_bytes(
            own * collate.shards.size,
            collate.shards.size,
            layer.compress_key.num_kv_heads,
            layer.compress_key.head_dim,
            config=layer.config,
            value_head_dim=layer.compress_value.head_dim,
            batch_size=rows,
            dtype=torch.bfloat16 if is_bf16(config) else torch.float32,
        )
        total += forwards * sent.forward + sent.backward
    return total * training.accumulate
