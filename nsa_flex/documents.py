"""Packed documents and padded batches, laid out so that block grids start where documents do.

NSA's compressed windows and selectable blocks are counted from a document's first token. Moving
every document to a multiple of `select_block_size` (which `compress_stride` divides) makes all
their grids parts of one grid, so that the only thing left of packing is a lower bound a query:
`document_start`. Left padding is the same move, one document a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_flex.config import NSAConfig, checked_int

# On CUDA a message may have 254 characters; Inductor for the CPU takes no quotation marks.
POSITIONS_RULE = (
    "position_ids break the rule: each is the one before plus one, 0 where a document begins, or "
    "of padding, and the first is 0 or counts the cached tokens. Shards of a sequence break it: "
    "see nsa_flex.context_parallel"
)


class DocumentLayout(NamedTuple):
    """Where every token goes, and back.

    Gradients go back the way the tokens came, by a gather. A slot behind a document's end gives
    none to the token that it repeats, and takes none: no real query sees it.

    source: int64 (B', S'), for each aligned slot the flat index (b * S + s) of its token. Slots
        behind a document's end repeat a token; no real query sees them.
    target: int64 (B, S), for each token its flat slot (b' * S' + s'); padding tokens get any
        valid slot.
    start: int32 (B', S'), first aligned slot of the document that each slot belongs to (the
        `document_start` of `nsa_attention`), or None where every row is one document from slot 0.
        Blocks behind the last document are documents of their own, which cost attention little.
    repeats: bool (B', S'), slots that repeat a token; None if there are none.
    padding: bool (B, S), tokens that no slot is for; None if there are none.
    max_document_length: no document has more tokens; None where the host does not know.
    """

    source: Tensor
    target: Tensor
    start: Tensor | None
    repeats: Tensor | None = None
    padding: Tensor | None = None
    max_document_length: int | None = None

    def align(self, x: Tensor) -> Tensor:
        """(B, H, S, D) -> (B', H, S', D)."""
        return move_tokens(x, self.source, self.target, self.padding)

    def restore(self, x: Tensor) -> Tensor:
        """(B', H, S', D) -> (B, H, S, D), the inverse of `align` on real tokens."""
        return move_tokens(x, self.target, self.source, self.repeats)

    @property
    def positions(self) -> Tensor:
        """Position of each token in its own document, int64 (B, S), as rotary embeddings want."""
        slots = self.target % self.source.shape[1]
        if self.start is None:
            return slots
        return slots - self.start.flatten()[self.target]


def align_packed(
    cu_seqlens: Tensor,
    num_tokens: int,
    config: NSAConfig,
    max_document_length: int | None = None,
) -> DocumentLayout:
    """Layout of one row of `num_tokens` tokens that holds `len(cu_seqlens) - 1` documents.

    Args:
        cu_seqlens: int (M + 1,), document m is tokens cu_seqlens[m] up to cu_seqlens[m + 1];
            the first is 0, the last T (an assertion on the device). Empty documents are allowed.
        num_tokens: T, length of the row.
        max_document_length: tokens of the longest document, if the host knows. A longer one raises
            an error on the device (an assertion that the host does not wait for).

    Returns:
        a layout with B = B' = 1 and S' at most T + M * (l' - 1), known without reading values.

    Raises:
        ValueError: cu_seqlens is not a one-dimensional integer tensor of at least two entries, or
            max_document_length is less than 1.
        TypeError: max_document_length is not an int.
    """
    cu = checked_bounds(cu_seqlens, num_tokens, max_document_length)
    num_documents = cu.shape[0] - 1
    token = torch.arange(num_tokens, device=cu.device)
    # One less than the number of documents that begin at or before the token. Over all of cu:
    # Inductor of torch 2.11 cannot search in a slice.
    document = torch.searchsorted(cu, token, right=True) - 1
    first = cu[document.clamp(0, num_documents - 1)]
    room = num_documents * (config.select_block_size - 1)
    num_slots = _num_slots(num_tokens, room, config)
    target = _aligned(first, config)
    return _row(first, target, (1, num_tokens), num_slots, config, max_document_length)


def checked_bounds(
    cu_seqlens: Tensor, num_tokens: int, max_document_length: int | None = None
) -> Tensor:
    """`cu_seqlens` of `align_packed` as int64, which raises as that does."""
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2 or not is_integral(cu_seqlens):
        raise ValueError(
            f"cu_seqlens must be a 1-D integer tensor (num_documents + 1,), "
            f"got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
        )
    if num_tokens < 1:
        raise ValueError(f"num_tokens={num_tokens} must be at least 1")
    check_max_document_length(max_document_length)
    cu = cu_seqlens.long()
    lengths = cu.diff()
    torch._assert_async(
        (cu[0] == 0) & (cu[-1] == num_tokens) & (lengths >= 0).all(),
        "cu_seqlens must begin with 0, never descend, and end with the number of tokens: tokens "
        "past the last document, padding for example, are one more document",
    )
    if max_document_length is not None:
        torch._assert_async(
            (lengths <= max_document_length).all(),
            "cu_seqlens hold a document that is longer than max_document_length: pass the length "
            "of the longest",
        )
    return cu


def is_integral(x: Tensor) -> bool:
    """Whether it holds integers, as offsets and places of tokens are."""
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def check_max_document_length(length: object) -> None:
    """Raises TypeError or ValueError unless it is None or a positive int."""
    if length is None:
        return
    if isinstance(length, bool) or not isinstance(length, int):
        raise TypeError(
            f"max_document_length must be an int or None, got {type(length).__name__}: a tensor "
            "would have to be read"
        )
    if length < 1:
        raise ValueError(f"max_document_length={length} must be at least 1")


def align_positions(
    position_ids: Tensor,
    config: NSAConfig,
    max_documents: int | None = None,
    *,
    bound_name: str = "max_documents",
) -> DocumentLayout:
    """Layout of packed rows whose `position_ids` (B, S) restart at every document.

    Each position is the one before plus one, or 0 where a document begins (an assertion on the
    device, which the host does not wait for). The rows become one row. The unused
    slots behind the documents must be bounded without reading values: by l' - 1 for each of
    `max_documents`, whatever their lengths. By default by an eighth of the tokens and l' - 1 for
    each row and eight more: room for documents of 4 * l' tokens on average, of any lengths that
    leave half a block unused on average. Documents that do not fit raise an error on the device
    (an assertion that the host does not wait for), which calls the bound `bound_name`.
    `align_packed` has no such bound.
    """
    if position_ids.dim() != 2 or 0 in position_ids.shape or not is_integral(position_ids):
        raise ValueError(
            f"position_ids must be integers (B, S), got {position_ids.dtype} "
            f"{tuple(position_ids.shape)}"
        )
    if max_documents is not None:
        max_documents = checked_int(bound_name, max_documents)
    batch, length = position_ids.shape
    total, gap = batch * length, config.select_block_size - 1
    room = total // 8 + (8 + batch) * gap if max_documents is None else max_documents * gap
    new = torch.ones_like(position_ids, dtype=torch.bool)
    new[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    torch._assert_async((~new | (position_ids == 0)).all(), POSITIONS_RULE)
    document = new.flatten().cumsum(0)
    first = torch.searchsorted(document, document)
    target, num_slots = _aligned(first, config), _num_slots(total, room, config)
    torch._assert_async(target[-1] < num_slots, _too_many(bound_name, max_documents))
    return _row(first, target, (batch, length), num_slots, config)


def _too_many(bound_name: str, max_documents: int | None) -> str:
    if max_documents is None:
        return (
            "position_ids hold more short documents than are expected: pass "
            f"{bound_name}, a bound on their number, or cu_seqlens"
        )
    return (
        f"position_ids hold more than {bound_name}={max_documents} documents: "
        f"raise {bound_name} or pass cu_seqlens"
    )


def _num_slots(num_tokens: int, room: int, config: NSAConfig) -> int:
    """Length of a row of whole blocks in which documents leave at most `room` slots unused."""
    return (num_tokens + room) // config.select_block_size * config.select_block_size


def _aligned(first: Tensor, config: NSAConfig) -> Tensor:
    """Ascending slots of the tokens of a row, int64 (T,): each document begins at a block.

    Args:
        first: int64 (T,), for each token the index of the first one of its document.
    """
    token = torch.arange(first.shape[0], device=first.device)
    unused = -first.diff() % config.select_block_size  # behind the document before
    return token + torch.nn.functional.pad(unused.cumsum(0), (1, 0))


def _row(
    first: Tensor,
    target: Tensor,
    shape: tuple[int, int],
    num_slots: int,
    config: NSAConfig,
    max_document_length: int | None = None,
) -> DocumentLayout:
    """The layout of one row, from the slots of its tokens, which come in `shape`.

    In one call, without `_replace`: torch 2.11 cannot return what that makes from a graph.
    """
    slot = torch.arange(num_slots, device=target.device)
    source = torch.searchsorted(target, slot, right=True) - 1  # the last token at or before
    token = torch.arange(target.shape[0], device=target.device)
    own, block = target[source], slot - slot % config.select_block_size
    start = torch.where(block > own, block, (target - token + first)[source])
    return DocumentLayout(
        source[None],
        target.clamp(max=num_slots - 1).view(shape),
        start.to(torch.int32)[None],
        (own != slot)[None],
        max_document_length=max_document_length,
    )


def align_padded(attention_mask: Tensor) -> DocumentLayout:
    """Layout of a padded batch: every row moved left so that its first real token is at 0.

    Padding behind the real tokens needs nothing: causal attention never looks there.

    Args:
        attention_mask: (B, S), nonzero at real tokens, which must be adjacent in each row; a gap
            raises an error on the device (an assertion that the host does not wait for).
    """
    if attention_mask.dim() != 2 or 0 in attention_mask.shape:
        raise ValueError(f"attention_mask must be (B, S), got {tuple(attention_mask.shape)}")
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
    return DocumentLayout(source, target, None, place + first >= length, place < first)


def real_positions(mask: Tensor) -> Tensor:
    """Position (B, S) of each token among those of its row that `mask` (B, S) is nonzero at.

    Of padding that of the real token before it, or 0.
    """
    return ((mask != 0).cumsum(1) - 1).clamp(min=0)


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


def move_tokens(x: Tensor, index: Tensor, inverse: Tensor, unused: Tensor | None) -> Tensor:
    """The tokens of x at `index`.

    Args:
        x: (B, H, S, D), any strides.
        index: int64 (B', S'), flat indices b * S + s.
        inverse: int64 (B, S), for each token of x its flat index b' * S' + s' in the output.
        unused: bool (B, S), tokens of x that `inverse` does not speak for: they get gradient 0.

    Returns:
        (B', H, S', D), in memory ordered (B', S', H, D). Where `index` names a token more than
        once, its gradient is that of the occurrence in `inverse` alone.
    """
    moved: Tensor = _MovedTokens.apply(x, index, inverse, unused)
    return moved


class _MovedTokens(torch.autograd.Function):
    """A gather whose backward is a gather too.

    That of an indexing operation adds into zeros, with atomics, since an index may occur twice.
    Where tokens only change their places, both directions are known beforehand: gradients go back
    as one read and one write, in an order that does not vary, and Inductor fuses either direction
    with what stands before it (a rotary embedding, for example).
    """

    @staticmethod
    def forward(x: Tensor, index: Tensor, inverse: Tensor, unused: Tensor | None) -> Tensor:
        tokens = x.transpose(1, 2).flatten(0, 1)  # [B * S, H, D]
        moved = tokens.index_select(0, index.flatten())
        return moved.unflatten(0, index.shape).transpose(1, 2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        index, inverse, unused = ctx.saved_tensors
        moved = move_tokens(grad, inverse, index, None)
        if unused is not None:
            moved = moved.masked_fill(unused[:, None, :, None], 0)
        return moved, None, None, None
