"""Which tokens of a sequence a rank has, and the one collective that brings it the others.

A sequence is 2P chunks over P ranks. Rank r has chunk r (its head) and chunk 2P - 1 - r (its
tail), in this order: late queries see many keys and early ones few, so that any head and its tail
cost as much as any other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class SequenceShards:
    """The ranks that share sequences, and this one among them.

    Args:
        group: name of their process group, which compiled code takes for a constant.
        rank: r, this one's place in the group.
        size: P.
    """

    group: str
    rank: int
    size: int

    @classmethod
    def of(cls, mesh: DeviceMesh | dist.ProcessGroup | SequenceShards) -> SequenceShards:
        """Of a mesh of one dimension (`mesh["cp"]` of a larger one) or a process group.

        Raises:
            ValueError: the mesh has several dimensions.
            TypeError: it is something else.
        """
        if isinstance(mesh, SequenceShards):
            return mesh
        if isinstance(mesh, DeviceMesh):
            if mesh.ndim != 1:
                raise ValueError(
                    f"mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names}; expected the one "
                    "that shares sequences, mesh[name]"
                )
            mesh = mesh.get_group()
        if not isinstance(mesh, dist.ProcessGroup):
            raise TypeError(
                f"mesh is a {type(mesh).__name__}; it must be a DeviceMesh or a ProcessGroup"
            )
        return cls(mesh.group_name, dist.get_rank(mesh), dist.get_world_size(mesh))

    @property
    def chunks(self) -> tuple[int, int]:
        """Of the 2P chunks those that this rank has."""
        return self.rank, 2 * self.size - 1 - self.rank

    def positions(self, num_tokens: int, device: torch.device) -> Tensor:
        """Place in the whole sequence of each of this rank's tokens, int64 (num_tokens,)."""
        chunk = num_tokens // 2
        token = torch.arange(chunk, device=device)
        return torch.cat([token + c * chunk for c in self.chunks])

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's part of `x`, which has the whole sequence along `dim`.

        Raises:
            ValueError: 2P does not divide the sequence.
        """
        if x.shape[dim] % (2 * self.size):
            raise ValueError(
                f"the sequence has {x.shape[dim]} tokens; {self.size} ranks need a multiple of "
                f"{2 * self.size}: pad it"
            )
        parts = x.chunk(2 * self.size, dim)
        return torch.cat([parts[c] for c in self.chunks], dim)

    def send(self, *shards: Tensor) -> Sent:
        """Begin to gather shards (B, H, T, D), all by one collective.

        Gradients come back by a reduce-scatter in float32 (float64 for float64).
        """
        # Chunks first, and within them memory ordered (B, T, H, D).
        chunks = [x.unflatten(2, (2, -1)).permute(2, 0, 3, 1, 4) for x in shards]
        own = torch.cat([x.flatten(1) for x in chunks], 1)  # [2, elements of a chunk of all]
        sizes = tuple(tuple(x.shape[1:]) for x in chunks)
        return Sent(_Gather.apply(own, self.group, self.size), sizes)

    def gather(self, *shards: Tensor) -> list[Tensor]:
        """The whole (B, H, P * T, D) of each shard (B, H, T, D)."""
        return self.send(*shards).arrived()


class Sent(NamedTuple):
    """What `send` began to gather.

    chunks: (2P, elements of a chunk), not to be read before it has arrived.
    sizes: (B, T / 2, H, D) of each tensor.
    """

    chunks: Tensor
    sizes: tuple[tuple[int, ...], ...]

    def arrived(self) -> list[Tensor]:
        """Wait for it: each tensor whole, (B, H, P * T, D), in memory ordered (B, S, H, D)."""
        chunks: Tensor = _Wait.apply(self.chunks)
        whole = []
        parts = chunks.split([math.prod(size) for size in self.sizes], 1)
        for part, size in zip(parts, self.sizes, strict=True):
            # Of rank r chunk r, then chunk 2P - 1 - r.
            heads, tails = part.unflatten(1, size).unflatten(0, (-1, 2)).unbind(1)
            ordered = torch.cat((heads, tails.flip(0)))  # [2P, B, T/2, H, D]
            whole.append(ordered.transpose(0, 1).flatten(1, 2).transpose(1, 2))
        return whole


_ops: Any = torch.ops._c10d_functional


class _Gather(torch.autograd.Function):
    """Rows of all ranks one behind the other: [2, N] -> [2P, N], which nobody has waited for."""

    @staticmethod
    def forward(own: Tensor, group: str, size: int) -> Tensor:
        return _ops.all_gather_into_tensor(own, size, group)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.group, ctx.size = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32)).contiguous()
        own = _ops.reduce_scatter_tensor(wide, "sum", ctx.size, ctx.group)
        return _ops.wait_tensor(own).to(grad.dtype), None, None


class _Wait(torch.autograd.Function):
    """Waits, with a gradient in any version of torch."""

    @staticmethod
    def forward(sent: Tensor) -> Tensor:
        return _ops.wait_tensor(sent)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def all_gather(shards: SequenceShards, *own: Tensor) -> list[Tensor]:
    """(P, *shape) of each rank's tensors of one dtype, by one collective; without gradients."""
    flat = torch.cat([x.flatten() for x in own])
    whole = _ops.wait_tensor(_ops.all_gather_into_tensor(flat, shards.size, shards.group))
    parts = whole.view(shards.size, -1).split([x.numel() for x in own], 1)
    return [part.view(shards.size, *x.shape) for part, x in zip(parts, own, strict=True)]
