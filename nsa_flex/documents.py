"""Packed documents and padded batches, laid out so that block grids start where documents do.

NSA's compressed windows and selectable blocks are counted from a document's first token. Moving
every document to a multiple of `select_block_size` (which `compress_stride` divides) makes all
their grids parts of one grid, so that the only thing left of packing is a lower bound a query:
`document_start`. Left padding is the same move, one document a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nsa_flex.config import NSAConfig


class DocumentLayout(NamedTuple):
    """Where every token goes, and back.

    source: int64 (B', S'), for each aligned place the flat index (b * S + s) of its token. Places
        behind a document's end repeat a token; no real query sees them.
    target: int64 (B, S), for each token its flat place (b' * S' + s'); padding tokens get any
        valid place.
    start: int32 (B', S'), first aligned place of the document that each place belongs to (the
        `document_start` of `nsa_attention`), or None where every row is one document from place 0.
    """

    source: Tensor
    target: Tensor
    start: Tensor | None

    def align(self, x: Tensor) -> Tensor:
        """(B, H, S, D) -> (B', H, S', D)."""
        return _take(x, self.source)

    def restore(self, x: Tensor) -> Tensor:
        """(B', H, S', D) -> (B, H, S, D), the inverse of `align` on real tokens."""
        return _take(x, self.target)

    @property
    def positions(self) -> Tensor:
        """Position of each token in its own document, int64 (B, S), as rotary embeddings want."""
        places = self.target % self.source.shape[1]
        if self.start is None:
            return places
        return places - self.start.flatten()[self.target]


def _take(x: Tensor, index: Tensor) -> Tensor:
    tokens = x.transpose(1, 2).flatten(0, 1)  # [B * S, H, D]
    taken = tokens.index_select(0, index.flatten())
    return taken.unflatten(0, index.shape).transpose(1, 2)


def align_packed(cu_seqlens: Tensor, num_tokens: int, config: NSAConfig) -> DocumentLayout:
    """Layout of one row of `num_tokens` tokens that holds `len(cu_seqlens) - 1` documents.

    Args:
        cu_seqlens: int (M + 1,), document m is tokens cu_seqlens[m] up to cu_seqlens[m + 1];
            the first is 0. Empty documents are allowed.
        num_tokens: T, length of the row.

    Returns:
        a layout with B = B' = 1 and S' at most T + M * (l' - 1), known without reading values.

    Raises:
        ValueError: cu_seqlens is not a one-dimensional integer tensor of at least two entries.
    """
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2 or cu_seqlens.is_floating_point():
        raise ValueError(
            f"cu_seqlens must be a 1-D integer tensor (num_documents + 1,), "
            f"got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
        )
    size, device = config.select_block_size, cu_seqlens.device
    cu = cu_seqlens.long()
    begin, length = cu[:-1], cu.diff()
    num_documents = begin.shape[0]
    padded = -(-length // size) * size
    end = padded.cumsum(0)
    aligned = end - padded

    token = torch.arange(num_tokens, device=device)
    # One less than the number of documents that begin at or before the token. Over all of cu:
    # Inductor of torch 2.11 cannot search in a slice.
    document = (torch.searchsorted(cu, token, right=True) - 1).clamp(max=num_documents - 1)
    num_places = (num_tokens + num_documents * (size - 1)) // size * size
    target = (aligned[document] + token - begin[document]).clamp(max=num_places - 1)

    place = torch.arange(num_places, device=device)
    document = torch.searchsorted(end, place, right=True).clamp(max=num_documents - 1)
    within = torch.minimum(place - aligned[document], length[document] - 1)
    source = (begin[document] + within).clamp(0, num_tokens - 1)
    start = aligned[document].to(torch.int32)
    return DocumentLayout(source[None], target[None], start[None])


def align_positions(
    position_ids: Tensor,
    config: NSAConfig,
    max_documents: int | None = None,
    *,
    bound_name: str = "max_documents",
) -> DocumentLayout:
    """Layout of packed rows whose `position_ids` (B, S) restart at every document.

    A document ends where the next position is not one more. The rows become one row. Their number
    must be bounded without reading values: by `max_documents`, by default 16, one more a row and
    one more for every 4 * l' tokens. More documents than that raise an error on the device (an
    assertion that the host does not wait for), which calls the bound `bound_name`. `align_packed`
    has no such bound.
    """
    batch, length = position_ids.shape
    total = batch * length
    if max_documents is None:
        max_documents = 16 + batch + total // (4 * config.select_block_size)
    new = torch.ones_like(position_ids, dtype=torch.bool)
    new[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    document = new.flatten().cumsum(0) - 1
    torch._assert_async(
        document[-1] < max_documents,
        f"position_ids hold more than {bound_name}={max_documents} documents: "
        f"raise {bound_name} or pass cu_seqlens",
    )
    ranks = torch.arange(max_documents, device=position_ids.device)
    cu_seqlens = torch.searchsorted(document, ranks)
    cu_seqlens = torch.nn.functional.pad(cu_seqlens, (0, 1), value=total)
    layout = align_packed(cu_seqlens, total, config)
    return layout._replace(target=layout.target.view(batch, length))


def align_padded(attention_mask: Tensor) -> DocumentLayout:
    """Layout of a padded batch: every row moved left so that its first real token is at 0.

    Padding behind the real tokens needs nothing: causal attention never looks there.

    Args:
        attention_mask: (B, S), nonzero at real tokens, which must be adjacent in each row; a gap
            raises an error on the device (an assertion that the host does not wait for).
    """
    batch, length = attention_mask.shape
    real = (attention_mask != 0).to(torch.int32)
    rises = (real[:, 1:] > real[:, :-1]).sum(1) + real[:, 0]
    torch._assert_async(
        (rises <= 1).all(), "attention_mask has gaps: real tokens of a row must be adjacent"
    )
    first = real.argmax(1, keepdim=True)  # [B, 1]
    place = torch.arange(length, device=attention_mask.device)
    row = torch.arange(batch, device=attention_mask.device)[:, None] * length
    source = row + (place + first).clamp(max=length - 1)
    target = row + (place - first).clamp(min=0)
    return DocumentLayout(source, target, None)


def gather_real(real: Tensor) -> DocumentLayout:
    """Layout that moves the true tokens of each row to its front and keeps their order.

    Args:
        real: bool (B, S).
    """
    batch, length = real.shape
    rank = real.cumsum(1)
    behind = rank[:, -1:] + (~real).cumsum(1)
    place = torch.where(real, rank, behind) - 1
    row = torch.arange(batch, device=real.device)[:, None] * length
    token = torch.arange(length, device=real.device).expand(batch, length)
    source = torch.zeros_like(place).scatter(1, place, token)
    return DocumentLayout(source + row, place + row, None)
