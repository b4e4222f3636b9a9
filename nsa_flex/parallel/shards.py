"""Which tokens of a sequence a rank has, and the one collective that brings it the others.

A sequence is 2P chunks over P ranks. Rank r has chunk r (its head) and chunk 2P - 1 - r (its
tail), in this order: late queries see many keys and early ones few, so that any head and its tail
cost as much as any other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
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

        Gradients come back by a reduce-scatter in float32 (float64 for float64), which begins
        where those of `Sent.arrived` are there, and is waited for where the shards' are wanted.
        """
        # Chunks first, and within them memory ordered (B, T, H, D).
        chunks = [x.unflatten(2, (2, -1)).permute(2, 0, 3, 1, 4) for x in shards]
        own = torch.cat([x.flatten(1) for x in chunks], 1)  # [2, elements of a chunk of all]
        sizes = tuple(tuple(x.shape[1:]) for x in chunks)
        whole, ticket = _Gather.apply(own, self.group, self.size)
        return Sent(whole, ticket, sizes, self)

    def gather(self, *shards: Tensor) -> list[Tensor]:
        """The whole (B, H, P * T, D) of each shard (B, H, T, D)."""
        return self.send(*shards).arrived()


class Sent(NamedTuple):
    """What `send` began to gather.

    chunks: (2P, elements of a chunk), not to be read before it has arrived.
    ticket: (2, elements of a chunk), wide and without memory: gradients of the shards pass there.
    sizes: (B, T / 2, H, D) of each tensor.
    """

    chunks: Tensor
    ticket: Tensor
    sizes: tuple[tuple[int, ...], ...]
    shards: SequenceShards

    def arrived(self) -> list[Tensor]:
        """Wait for it: each tensor whole, (B, H, P * T, D), in memory ordered (B, S, H, D)."""
        return self.arrived_until(2 * self.shards.size * self.sizes[0][1])[0]

    def arrived_until(self, *ends: int, windows: Sequence[Tensor] = ()) -> list[list[Tensor]]:
        """Wait for it: for each end, of each tensor the first so many tokens (B, H, end, D).

        These share their memory. Their gradients are summed in float32.

        Args:
            ends: numbers of tokens.
            windows: (B, H, n, D) for each end and each tensor, last tokens of others like it, four
                at most. For each end follow these, as the last of (B, H, end, D), in the same
                memory: what is before them is not theirs, and gets no gradient.
        """
        count, group, size = len(self.sizes), self.shards.group, self.shards.size
        four = (*windows, None, None, None, None)[:4]
        found = _Arrive.apply(self.chunks, self.ticket, self.sizes, ends, group, size, *four)
        by_end = [found[i : i + count] for i in range(0, len(found), count)]
        return [list(chain(*by_end[i :: len(ends)])) for i in range(len(ends))]


_ops: Any = torch.ops._c10d_functional


def _sent(begun: Tensor) -> Tensor:
    """A collective's result, under way on a GPU.

    On the CPU it is waited for: torch 2.13's gloo has two threads that write the name of the last
    collective without a lock, and two collectives under way may free it twice; waiting makes that
    rare. One thread a group, as the tests have, rules it out.
    """
    return _ops.wait_tensor(begun) if begun.device.type == "cpu" else begun


class _Gather(torch.autograd.Function):
    """Rows of all ranks one behind the other, [2, N] -> [2P, N], which nobody has waited for, and
    the ticket of `Sent`, whose gradient nobody has waited for either.
    """

    @staticmethod
    def forward(own: Tensor, group: str, size: int) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(own.dtype, torch.float32)
        ticket = own.new_empty((), dtype=wide).expand(own.shape)
        return _sent(_ops.all_gather_into_tensor(own, size, group)), ticket

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.dtype = inputs[0].dtype
        ctx.mark_non_differentiable(output[0])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, _: None, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
        return None if grad is None else _ops.wait_tensor(grad).to(ctx.dtype), None, None


class _Arrive(torch.autograd.Function):
    """Waits, and puts the chunks in order: see `Sent.arrived_until`.

    Dynamo counts arguments: `*windows` is not for it.
    """

    @staticmethod
    def forward(
        chunks: Tensor,
        ticket: Tensor,
        sizes: tuple[tuple[int, ...], ...],
        ends: tuple[int, ...],
        group: str,
        size: int,
        window_0: Tensor | None,
        window_1: Tensor | None,
        window_2: Tensor | None,
        window_3: Tensor | None,
    ) -> tuple[Tensor, ...]:
        windows = [x for x in (window_0, window_1, window_2, window_3) if x is not None]
        arrived: Tensor = _ops.wait_tensor(chunks)
        whole = []
        parts = arrived.split([math.prod(x) for x in sizes], 1)
        for i, (part, of_chunk) in enumerate(zip(parts, sizes, strict=True)):
            # Of rank r chunk r, then chunk 2P - 1 - r. One copy puts them in order.
            rows = [x.unflatten(0, of_chunk) for x in part.unbind()]
            behind = [x.transpose(1, 2) for x in windows[i :: len(sizes)]]
            whole.append(torch.cat((*rows[::2], *rows[::-2], *behind), 1).transpose(1, 2))
        found = [x[:, :, :end] for end in ends for x in whole]
        stop = 2 * size * sizes[0][1]
        for end, window in zip(ends, windows[:: len(sizes)], strict=False):
            stop += window.shape[2]
            found += [x[:, :, stop - end : stop] for x in whole]
        return tuple(found)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, ticket, ctx.sizes, _, ctx.group, ctx.size, *windows = inputs
        ctx.lengths = tuple(x.shape[2] for x in windows if x is not None)
        ctx.dtype = ticket.dtype
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        given = next((x for x in grads if x is not None), None)
        if given is None:
            return (None,) * 10
        num_whole = len(grads) - len(ctx.lengths)
        own = None
        if ctx.needs_input_grad[1]:  # nobody waits for a sum that nobody takes
            elements = [math.prod(x) for x in ctx.sizes]
            total = given.new_zeros((2 * ctx.size, sum(elements)), dtype=ctx.dtype)
            parts = total.split(elements, 1)
            for i, grad in enumerate(grads[:num_whole]):
                if grad is not None:
                    of_chunk = ctx.sizes[i % len(parts)]
                    _add_chunks(parts[i % len(parts)].unflatten(1, of_chunk), grad)
            own = _sent(_ops.reduce_scatter_tensor(total, "sum", ctx.size, ctx.group))
        behind = zip(grads[num_whole:], ctx.lengths, strict=True)
        windows = [None if grad is None else grad[:, :, -n:] for grad, n in behind]
        return (None, own, None, None, None, None, *windows, None, None, None, None)[:10]


def _add_chunks(total: Tensor, grad: Tensor) -> None:
    """Adds (B, H, tokens, D), from token 0 on, to chunks as they were sent: (2P, B, T/2, H, D)."""
    num_chunks, _, chunk = total.shape[:3]
    for c, of_chunk in enumerate(grad.transpose(1, 2).split(chunk, 1)):
        row = 2 * c if 2 * c < num_chunks else 2 * (num_chunks - 1 - c) + 1
        total[row, :, : of_chunk.shape[1]].add_(of_chunk)


def all_gather(shards: SequenceShards, own: Tensor) -> Tensor:
    """(P, *shape) of each rank's tensor, by one collective; without gradients."""
    sent = _ops.all_gather_into_tensor(own.flatten(), shards.size, shards.group)
    whole: Tensor = _ops.wait_tensor(sent)
    return whole.view(shards.size, *own.shape)
