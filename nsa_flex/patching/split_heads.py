"""NSA layers in tensor parallelism: each rank has some heads, their gates and their φ."""

from __future__ import annotations

import dataclasses

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from nsa_flex.compression import Compression
from nsa_flex.patching.layer import AttentionShape, NSALayer


def check_heads_divide(name: str, shape: AttentionShape, num_ranks: int, what: str) -> None:
    """That each rank can have whole groups of heads.

    The query heads of a group choose their blocks together, so a KV head cannot be on two ranks.

    Raises:
        ValueError: the ranks do not divide the KV heads.
    """
    heads = shape.num_kv_heads
    if heads % num_ranks:
        raise ValueError(
            f"{name} has {heads} KV heads (and {shape.num_query_heads} query heads), and {what} "
            f"over {num_ranks} ranks needs a multiple of {num_ranks}: the query heads of a group "
            f"choose blocks together, so NSA repeats no KV head; use at most {heads} ranks, a "
            "divisor of it"
        )


def split_heads(layer: NSALayer, mesh: DeviceMesh) -> None:
    """Leave `layer` this rank's heads, in place; parameters become DTensors.

    Gates go column-wise with the query heads, and φ that has parameters a KV head with those. The
    φ that heads share stays whole, and its gradient is the sum over ranks. Rank 0's values count:
    every rank of the mesh must call this.

    Args:
        layer: whole.
        mesh: of one dimension, whose size divides the KV heads.
    """
    shape, size = layer.shape, mesh.size()
    layer.shape = dataclasses.replace(
        shape,
        num_query_heads=shape.num_query_heads // size,
        num_kv_heads=shape.num_kv_heads // size,
    )
    parallelize_module(layer.gates.linear, mesh, ColwiseParallel())
    layer.gates.num_query_heads = layer.shape.num_query_heads
    for phi in (layer.compress_key, layer.compress_value):
        _split_phi(phi, layer.shape.num_kv_heads, mesh)


def _split_phi(phi: Compression, num_kv_heads: int, mesh: DeviceMesh) -> None:
    phi.num_kv_heads, phi.is_split = num_kv_heads, True
    placement = Replicate() if phi.kind == "mlp" else Shard(0)
    for name, parameter in list(phi.named_parameters(recurse=False)):
        part = distribute_tensor(parameter.detach(), mesh, [placement])
        phi.register_parameter(name, nn.Parameter(part, parameter.requires_grad))
