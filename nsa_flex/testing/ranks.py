"""`check_ranks`: do ranks that share sequences attend the tokens that others have?

`nsa_flex.audit(..., mesh=mesh)` asks the same by `ranks_apart`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from nsa_flex.parallel.shards import SequenceShards, all_gather


def check_ranks(
    loss: Callable[[Tensor], Tensor],
    input_ids: Tensor,
    mesh: DeviceMesh | dist.ProcessGroup | SequenceShards,
    *,
    shard: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Raises where a rank's loss does not depend on an earlier token that another rank has.

    Of each rank's shard the first token is changed, and every other rank that has a later one must
    see its loss move. For any model and any way to share sequences out; the labels must stay, or
    they would move the loss by themselves. Every rank of the mesh calls it; gradients are not
    computed.

    Args:
        loss: of this rank's ids, as `shard` gives them, with labels that do not depend on them.
        input_ids: int (B, S), whole rows, the same on every rank.
        mesh: the ranks that share sequences, a mesh of one dimension or a process group.
        shard: whole rows (B, S) to this rank's (B, T), T the same on every rank; by default as
            `shard_sequence` does.

    Raises:
        AssertionError: on every rank; it names each rank that attends alone, and the other.
        ValueError: input_ids is not (B, S), or there is but one rank, which has nobody to attend.

    >>> def loss(ids):  # doctest: +SKIP
    ...     return model(input_ids=ids, labels=own_labels, shift_labels=own_next).loss
    >>> nsa_flex.testing.check_ranks(loss, input_ids, mesh["cp"])  # doctest: +SKIP
    """
    alone = ranks_apart(loss, input_ids, SequenceShards.of(mesh), shard)
    if alone:
        raise AssertionError(
            f"ranks attend their own tokens alone: {'; '.join(alone)}. Put the model in "
            "nsa_flex.context_parallel(model, mesh), or call it with whole sequences"
        )


def ranks_apart(
    loss: Callable[[Tensor], Tensor],
    input_ids: Tensor,
    shards: SequenceShards,
    shard: Callable[[Tensor], Tensor] | None = None,
) -> list[str]:
    """Sentences on ranks that do not see those of others, the same on every rank.

    Arguments and errors as of `check_ranks`.
    """
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}; expected (B, S)")
    if shards.size < 2:
        raise ValueError("the mesh has 1 rank; check_ranks needs several")
    share = shards.shard if shard is None else shard
    places = share(torch.arange(input_ids.shape[1], device=input_ids.device)[None])
    whole = all_gather(shards, places).flatten(1)  # [P, T]
    firsts = whole.amin(1).tolist()
    with torch.no_grad():
        before = loss(share(input_ids)).double()
        noise = (loss(share(input_ids)).double() - before).abs()
        moves = []
        for first in firsts:
            changed = input_ids.clone()
            token = input_ids[:, first]
            changed[:, first] = torch.where(token > 0, token - 1, token + 1)
            moves.append((loss(share(changed)).double() - before).abs() > 4 * noise)
    moved = all_gather(shards, torch.stack(moves).flatten())  # [P, P], of rank, by other
    return [
        f"rank {rank} does not see those of rank {other}"
        for rank, last in enumerate(whole.amax(1).tolist())
        for other, first in enumerate(firsts)
        if rank != other and last > first and not moved[rank, other]
    ]
