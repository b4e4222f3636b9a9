"""`show`: pictures of the masks of a config, as text and as an image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor

from nsa_flex.config import NSAConfig
from nsa_flex.masks.picture import (
    PICTURES,
    Cell,
    Picture,
    PictureName,
    Places,
    make_picture,
    random_blocks,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# A picture evaluates its mask at every pair: 64 MB here, and more than a screen can show.
MAX_TOKENS = 8192
MIN_WIDTH = 24
IMAGE_CELLS = 512


class Style(NamedTuple):
    """Characters of a text: one a `Cell`, and those of the frame."""

    marks: str
    side: str
    tee: str
    line: str
    down: str
    corner: str


UNICODE = Style(" ·▒▓█", "│", "├", "─", "┬", "┌")
ASCII = Style(" .:+#", "|", "+", "-", "+", ".")
MEANINGS = {
    Cell.FULL: "visible, full tile",
    Cell.VISIBLE: "visible, partial tile",
    Cell.SOME: "some visible",
    Cell.HIDDEN: "computed, then masked",
    Cell.SKIPPED: "tile skipped",
}
COLORS = {
    Cell.FULL: "#1f3b73",
    Cell.VISIBLE: "#4f7fc4",
    Cell.SOME: "#a3c1e8",
    Cell.HIDDEN: "#e4e4e4",
    Cell.SKIPPED: "#ffffff",
}


def show(
    config: NSAConfig,
    seq_len: int,
    branch: PictureName | None = None,
    *,
    path: str | Path | None = None,
    documents: Sequence[int] | None = None,
    blocks: Tensor | None = None,
    seed: int = 0,
    width: int = 80,
    ascii: bool = False,
) -> str:
    """Pictures of what each query sees, and of the tiles that a kernel computes for it.

    Drawn from the mask_mods and BlockMasks that FlexAttention is given, evaluated at every pair.
    Queries run downwards, keys (or compressed blocks) to the right.

    Args:
        config: block sizes, counts and window.
        seq_len: S, tokens; at most 8192.
        branch: "compressed", "folded" (the compressed branch after the fold, residue 0),
            "selected" or "sliding"; all four if None.
        path: also write an image there (PNG, or what else matplotlib knows by the suffix).
        documents: lengths of packed documents, which add up to `seq_len`. They are drawn as
            computed: each starts at a multiple of `select_block_size`; nothing is visible to the
            rows between a document's end and the next one's start.
        blocks: int (..., Sq, n), chosen blocks as `NSAAux.blocks` has them (row 0 and KV head 0
            are drawn), or (Sq, n). Chosen by random scores if None.
        seed: of the random scores.
        width: columns of text, at least 24.
        ascii: keep to ASCII characters.

    Returns:
        the text, lines of at most `width` characters where the titles fit.

    Raises:
        ValueError: an unknown branch, seq_len out of 1 ... 8192, documents that do not add up,
            blocks of another length, or too small a width.
        ImportError: `path` is given and matplotlib is not installed.

    >>> tiny = NSAConfig(4, 2, 4, num_selected_blocks=3, window_size=3)
    >>> print(show(tiny, 8, "sliding", ascii=True))
    sliding: query x key, window of 3
    visible 21 of 64 pairs (32.8 %)
    tiles of 128 x 128: 0 full, 1 partial, 0 skipped
       .0---------------
     0 |++..............
     1 |++++............
     2 |++++++..........
     3 |..++++++........
     4 |....++++++......
     5 |......++++++....
     6 |........++++++..
     7 |..........++++++
    # visible, full tile    + visible, partial tile    : some visible
    . computed, then masked    (blank) tile skipped
    """
    _check(config, seq_len, branch, documents, width)
    places = Places.of(config, seq_len, documents)
    names = PICTURES if branch is None else (branch,)
    if "selected" in names:
        blocks = _choice(config, places, blocks, seed)
    pictures = [make_picture(name, config, places, blocks) for name in names]
    if path is not None:
        _write_image(pictures, path)
    parts = [_text(picture, width, ASCII if ascii else UNICODE) for picture in pictures]
    return "\n\n".join(parts) + "\n" + _legend(width, ASCII if ascii else UNICODE)


def _check(
    config: NSAConfig,
    seq_len: int,
    branch: str | None,
    documents: Sequence[int] | None,
    width: int,
) -> None:
    if not isinstance(config, NSAConfig):
        raise TypeError(f"config is a {type(config).__name__}; it must be an NSAConfig")
    if branch is not None and branch not in PICTURES:
        raise ValueError(f"branch is {branch!r}; it must be one of {', '.join(PICTURES)}, or None")
    if not 1 <= seq_len <= MAX_TOKENS:
        raise ValueError(f"seq_len={seq_len} must be from 1 to {MAX_TOKENS}: every pair is drawn")
    if width < MIN_WIDTH:
        raise ValueError(f"width={width} must be at least {MIN_WIDTH} columns")
    if documents is not None and (min(documents, default=0) < 1 or sum(documents) != seq_len):
        raise ValueError(
            f"documents={list(documents)} add up to {sum(documents)}; expected lengths of at "
            f"least 1 that add up to seq_len={seq_len}"
        )


def _choice(config: NSAConfig, places: Places, blocks: Tensor | None, seed: int) -> Tensor:
    if blocks is None:
        return random_blocks(config, places, seed)
    if blocks.dim() < 2 or blocks.is_floating_point() or blocks.shape[-2] < places.length:
        raise ValueError(
            f"blocks is {blocks.dtype} {tuple(blocks.shape)}; expected integers (..., Sq, n) with "
            f"Sq at least {places.length}"
        )
    first = blocks.flatten(0, -3)[0] if blocks.dim() > 2 else blocks
    return first[None, None, : places.length].cpu().int()


def _text(picture: Picture, width: int, style: Style) -> str:
    rows, columns = picture.visible.shape
    margin = max(3, len(str(rows)) + 1)
    available = width - margin - 1
    # Powers of two: cells then end where tiles do. A character is about twice as high as wide.
    per_column = _power_of_two(columns / available)
    per_row = _power_of_two(rows / (available // 2))
    cells = picture.cells(per_row, per_column)
    widen = 2 if 2 * cells.shape[1] <= available else 1
    cells = cells.repeat(widen, axis=1)

    ruler = _ruler(cells.shape[1], widen, per_column, picture.column_starts, style)
    row_starts = {first // per_row for first in picture.row_starts[1:]}
    text = [*_summary(picture), " " * margin + style.corner + ruler]
    for index, row in enumerate(cells):
        label = str(index * per_row) if index % 4 == 0 or len(cells) <= 16 else ""
        edge = style.tee if index in row_starts else style.side
        text.append(
            f"{label:>{margin - 1}} {edge}{''.join(style.marks[cell] for cell in row)}".rstrip()
        )
    return "\n".join(text)


def _summary(picture: Picture) -> list[str]:
    seen, pairs = int(picture.visible.sum()), picture.visible.size
    partial, full = (int((picture.tiles == kind).sum()) for kind in (1, 2))
    size = " x ".join(map(str, picture.tile_size))
    skipped = picture.tiles.size - partial - full
    return [
        f"{picture.name}: {picture.title}",
        f"visible {seen} of {pairs} pairs ({100 * seen / pairs:.1f} %)",
        f"tiles of {size}: {full} full, {partial} partial, {skipped} skipped",
    ]


def _ruler(length: int, widen: int, per_column: int, starts: tuple[int, ...], style: Style) -> str:
    """Marks where documents start, and column numbers at every 16th character."""
    marked = {first // per_column * widen for first in starts[1:]}
    ruler = [style.down if place in marked else style.line for place in range(length)]
    for place in range(0, length, 16):
        label = str(place // widen * per_column)
        span = range(place, place + len(label))
        if span.stop <= length and marked.isdisjoint(span):
            ruler[span.start : span.stop] = label
    return "".join(ruler)


def _legend(width: int, style: Style) -> str:
    lines = [""]
    for cell, meaning in MEANINGS.items():
        entry = f"{style.marks[cell] if cell != Cell.SKIPPED else '(blank)'} {meaning}"
        if lines[-1] and len(lines[-1]) + 4 + len(entry) > width:
            lines.append("")
        lines[-1] += ("    " if lines[-1] else "") + entry
    return "\n".join(lines)


def _power_of_two(least: float) -> int:
    """The smallest power of two that is at least `least`, and 1."""
    power = 1
    while power < least:
        power *= 2
    return power


def _write_image(pictures: list[Picture], path: str | Path) -> None:
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError(
            "an image of a mask needs matplotlib, which is not installed; "
            "install it with: pip install 'nsa-flex[bench]'"
        ) from error
    side = 2 if len(pictures) > 1 else 1
    figure: Any = Figure(figsize=(5.2 * side, 5.2 * side + 0.5), layout="constrained")
    for axes, picture in zip(np.ravel(figure.subplots(side, side)), pictures, strict=True):
        _draw(axes, picture)
    handles = [
        Patch(facecolor=COLORS[cell], edgecolor="#888888", label=meaning)
        for cell, meaning in MEANINGS.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=1 + side, frameon=False)
    figure.savefig(path, dpi=110)


def _draw(axes: Axes, picture: Picture) -> None:
    from matplotlib.colors import ListedColormap

    rows, columns = picture.visible.shape
    per_row, per_column = (_power_of_two(n / IMAGE_CELLS) for n in (rows, columns))
    axes.imshow(
        picture.cells(per_row, per_column),
        cmap=ListedColormap([COLORS[cell] for cell in Cell]),
        vmin=min(Cell),
        vmax=max(Cell),
        extent=(0, columns, rows, 0),
        aspect="auto",
        interpolation="nearest",
    )
    tile_rows, tile_columns = picture.tile_size
    if rows // tile_rows <= 64:  # lines closer than that would hide the picture
        for y in range(tile_rows, rows, tile_rows):
            axes.axhline(y, color="#888888", linewidth=0.4)
    for x in range(tile_columns, columns, tile_columns):
        axes.axvline(x, color="#888888", linewidth=0.4)
    for y in picture.row_starts[1:]:
        axes.axhline(y, color="#c0392b", linewidth=1, linestyle="--")
    for x in picture.column_starts[1:]:
        axes.axvline(x, color="#c0392b", linewidth=1, linestyle="--")
    axes.set_title(f"{picture.name}: {picture.title}", fontsize=9)
    axes.tick_params(labelsize=8)
