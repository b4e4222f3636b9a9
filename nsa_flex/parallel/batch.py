"""Batches for ranks that share sequences: tokens laid out, padded and labelled, then shared out.

What concerns a token's neighbours is settled here, where every rank has whole rows of token ids:
its position, its document, the next token, which is its label.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from nsa_flex.config import NSAConfig
from nsa_flex.documents import DocumentLayout, align_packed, align_padded, align_positions
from nsa_flex.parallel.shards import SequenceShards, all_gather

if TYPE_CHECKING:
    from jaxtyping import Int, Shaped

IGNORED = -100  # the label of tokens that have none, as of F.cross_entropy


def shard_sequence(
    x: Shaped[Tensor, ...],
    mesh: DeviceMesh | dist.ProcessGroup | SequenceShards,
    dim: int = 1,
) -> Tensor:
    """This rank's part of `x`, the same on every rank: chunks r and 2P - 1 - r of 2P along `dim`.

    Args:
        x: whole sequences along `dim`.
        mesh: the P ranks that share sequences, a mesh of one dimension or a process group.
        dim: of the tokens.

    Returns:
        `x` with 1 / P of the tokens.

    Raises:
        ValueError: 2P does not divide the tokens, or the mesh has several dimensions.
    """
    return SequenceShards.of(mesh).shard(x, dim)


def last_tokens(
    x: Shaped[Tensor, "B T ..."],
    lengths: Int[Tensor, " B"],
    mesh: DeviceMesh | dist.ProcessGroup | SequenceShards,
) -> Tensor:
    """What is at the last token of each row, on every rank, from shards: logits, for instance.

    Args:
        x: (B, T, ...), this rank's shard.
        lengths: int (B,), tokens of each row.
        mesh: the ranks that share sequences.

    Returns:
        (B, ...).
    """
    shards = SequenceShards.of(mesh)
    places = shards.positions(x.shape[1], x.device)
    is_last = places == lengths.to(x.device)[:, None] - 1
    is_last = is_last.view(*x.shape[:2], *[1] * (x.dim() - 2))
    own = torch.where(is_last, x, 0).sum(1)
    return all_gather(shards, own).sum(0)


def shard_batch(
    input_ids: Int[Tensor, "B S"],
    mesh: DeviceMesh | dist.ProcessGroup | SequenceShards,
    config: NSAConfig,
    *,
    labels: Int[Tensor, "B S"] | None = None,
    attention_mask: Shaped[Tensor, "B S"] | None = None,
    position_ids: Int[Tensor, "B S"] | None = None,
    cu_seqlens: Int[Tensor, " bounds"] | None = None,
    max_documents: int | None = None,
    pad_token_id: int = 0,
) -> dict[str, Tensor]:
    """This rank's part of a batch, for `model(**batch)` of a model in `context_parallel`.

    Every rank gives the same whole batch. Rows are padded at their end, where causal attention
    never looks; padding on the left goes, and packed documents begin at whole blocks, so that
    tokens come in another order than in `input_ids`. No label is lost, save those that padding
    would have predicted.

    Args:
        input_ids: (B, S).
        mesh: the P ranks that share sequences.
        config: that of the model's NSA layers.
        labels: (B, S), of each token its own id or -100; shifted here.
        attention_mask: (B, S), nonzero at real tokens, which are adjacent in each row.
        position_ids: (B, S), which restart at packed documents, as `align_positions` takes them.
        cu_seqlens: of the documents in one row, as `align_packed` takes them.
        max_documents: with `position_ids`, no more documents than these.
        pad_token_id: of the padding.

    Returns:
        input_ids (B', S' / P), S' a multiple of 2 P * select_block_size. For packed documents,
        which make B' = 1, position_ids. With labels also labels and shift_labels, each token's
        next one, and num_items_in_batch, so that the mean of the ranks' losses is the loss of the
        whole batch, and data parallelism, which means gradients over ranks, gives its gradients.

    Raises:
        ValueError: shapes that do not fit, or two of attention_mask, position_ids and cu_seqlens.
    """
    shards = SequenceShards.of(mesh)
    given = {
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "cu_seqlens": cu_seqlens,
    }
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise ValueError(f"input_ids must be (B, S), got {tuple(input_ids.shape)}")
    if max_documents is not None and position_ids is None:
        raise ValueError(f"max_documents={max_documents} was given without position_ids")
    names = [name for name, x in given.items() if x is not None]
    if len(names) > 1:
        raise ValueError(f"{names[0]} and {names[1]} were both given: pass one")
    for name, x in {"labels": labels, **given}.items():
        if x is not None and name != "cu_seqlens" and x.shape != input_ids.shape:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; expected that of input_ids, "
                f"{tuple(input_ids.shape)}"
            )
    layout: DocumentLayout | None = None
    if attention_mask is not None:
        layout = align_padded(attention_mask)
    elif position_ids is not None:
        layout = align_positions(position_ids, config, max_documents)
    elif cu_seqlens is not None:
        if input_ids.shape[0] != 1:
            raise ValueError(f"cu_seqlens describe one row, got {input_ids.shape[0]}")
        layout = align_packed(cu_seqlens, input_ids.shape[1], config)

    multiple = 2 * shards.size * config.select_block_size

    def lay_out(x: Tensor, filler: int) -> Tensor:
        if layout is not None:
            assert layout.repeats is not None  # each of the three can leave slots unused
            x = x.flatten()[layout.source].masked_fill(layout.repeats, filler)
        return shards.shard(F.pad(x, (0, -x.shape[1] % multiple), value=filler))

    batch = {"input_ids": lay_out(input_ids, pad_token_id)}
    if layout is not None and layout.start is not None:
        slots = layout.start.shape[1]
        # Each block of the padding is a document of its own, as behind the last document.
        place = torch.arange(slots + -slots % multiple, device=layout.start.device)
        own = place % config.select_block_size
        position = torch.cat(((place[:slots] - layout.start[0]), own[slots:]))
        batch["position_ids"] = shards.shard(position[None])
    if labels is not None:
        following = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        batch["labels"] = lay_out(labels, IGNORED)
        batch["shift_labels"] = lay_out(following, IGNORED)
        counted = following != IGNORED
        if layout is not None and layout.padding is not None:
            counted = counted & ~layout.padding
        batch["num_items_in_batch"] = counted.sum() / shards.size
    return batch
