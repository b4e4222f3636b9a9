"""Pictures of masks: what they show is the oracle's mask and a BlockMask that covers it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nsa_flex.config import NSAConfig
from nsa_flex.masks import show
from nsa_flex.masks.picture import (
    PICTURES,
    Cell,
    Picture,
    PictureName,
    Places,
    make_picture,
    random_blocks,
)
from nsa_flex.masks.show import ASCII, UNICODE
from reference import oracle

SMALL = NSAConfig(
    compress_block_size=8,
    compress_stride=4,
    select_block_size=16,
    num_selected_blocks=4,
    window_size=20,
)
LAYOUTS: list[Any] = [(1, None), (7, None), (300, None), (300, [130, 1, 16, 153])]


def oracle_mask(name: PictureName, places: Places, blocks: torch.Tensor) -> np.ndarray:
    """Of the real rows; rows of the folded picture are the queries of residue 0."""
    length = places.length
    starts = None if places.start is None else places.start.numpy()
    num_blocks = max(1, SMALL.num_compressed_blocks(length))
    if name == "sliding":
        mask = oracle.sliding_mask(length, length, SMALL, 0, starts)
    elif name == "selected":
        mask = oracle.selected_mask(blocks.numpy(), length, SMALL, 0, starts)
    else:
        mask = oracle.compressed_mask(length, length, num_blocks, SMALL, 0, starts)
    mask = mask[0, 0] & places.real[:, None]
    if name == "folded":
        rows = np.arange(num_blocks) * SMALL.compress_stride + SMALL.compress_block_size - 1
        mask = np.pad(mask, ((0, SMALL.compress_block_size), (0, 0)))[rows]
    return mask


def picture(name: PictureName, seq_len: int, documents: list[int] | None) -> tuple[Any, Picture]:
    places = Places.of(SMALL, seq_len, documents)
    blocks = random_blocks(SMALL, places, seed=3)
    return oracle_mask(name, places, blocks), make_picture(name, SMALL, places, blocks)


@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.parametrize(("seq_len", "documents"), LAYOUTS)
def test_pictures_show_the_oracles_masks(
    name: PictureName, seq_len: int, documents: list[int] | None
) -> None:
    expected, found = picture(name, seq_len, documents)
    np.testing.assert_array_equal(found.visible, expected)


@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.parametrize(("seq_len", "documents"), LAYOUTS)
def test_nothing_visible_lies_in_a_skipped_tile(
    name: PictureName, seq_len: int, documents: list[int] | None
) -> None:
    _, found = picture(name, seq_len, documents)
    cells = found.cells()
    assert cells.shape == found.visible.shape
    np.testing.assert_array_equal(found.visible, cells >= Cell.VISIBLE)
    tiles = found.tiles.repeat(found.tile_size[0], 0).repeat(found.tile_size[1], 1)
    tiles = tiles[: cells.shape[0], : cells.shape[1]]
    np.testing.assert_array_equal(cells == Cell.SKIPPED, tiles == 0)
    if documents is None:  # rows that stand for no query may lie in full tiles
        assert found.visible[tiles == 2].all()


def test_cells_join_pairs() -> None:
    visible = np.tril(np.ones((5, 5), dtype=bool))
    tiles = np.array([[1, 0], [2, 1]], dtype=np.uint8)
    found = Picture("sliding", "", visible, tiles, (3, 3), (0,), (0,))
    assert found.cells().tolist() == [
        [3, 1, 1, 0, 0],
        [3, 3, 1, 0, 0],
        [3, 3, 3, 0, 0],
        [4, 4, 4, 3, 1],
        [4, 4, 4, 3, 3],
    ]
    assert found.cells(3, 3).tolist() == [[2, 0], [4, 2]]
    assert found.cells(2, 2).tolist() == [[2, 1, 0], [3, 2, 1], [4, 3, 3]]


def test_text_of_a_small_mask() -> None:
    config = NSAConfig(4, 2, 4, num_selected_blocks=3, window_size=3)
    blocks = torch.tensor([[0, -1, -1]] * 4 + [[0, 1, -1]] * 4 + [[0, 2, -1]] * 4)
    text = show(config, 12, "selected", blocks=blocks, width=60)
    assert text.splitlines() == [
        "selected: query x key, 3 blocks of 4",
        "visible 62 of 144 pairs (43.1 %)",
        "tiles of 1 x 4: 8 full, 12 partial, 16 skipped",
        "   ┌0───────────────8───────",
        " 0 │▓▓······",
        " 1 │▓▓▓▓····",
        " 2 │▓▓▓▓▓▓··",
        " 3 │▓▓▓▓▓▓▓▓",
        " 4 │████████▓▓······",
        " 5 │████████▓▓▓▓····",
        " 6 │████████▓▓▓▓▓▓··",
        " 7 │████████▓▓▓▓▓▓▓▓",
        " 8 │████████        ▓▓······",
        " 9 │████████        ▓▓▓▓····",
        "10 │████████        ▓▓▓▓▓▓··",
        "11 │████████        ▓▓▓▓▓▓▓▓",
        "█ visible, full tile    ▓ visible, partial tile",
        "▒ some visible    · computed, then masked",
        "(blank) tile skipped",
    ]


def test_text_marks_where_documents_start() -> None:
    text = show(SMALL, 24, "sliding", documents=[5, 19], width=60)
    rows = text.splitlines()[3:]
    assert rows[0] == "   ┌0───────────────┬───────────────32──────────────"
    assert [row[:2].strip() for row in rows if "├" in row] == ["16"]


@pytest.mark.parametrize("ascii", [False, True])
@pytest.mark.parametrize("width", [24, 60, 100])
@pytest.mark.parametrize("seq_len", [1, 45, 500])
def test_text_fits_the_width(seq_len: int, width: int, ascii: bool) -> None:
    text = show(SMALL, seq_len, width=width, ascii=ascii)
    drawn = [row for row in text.splitlines() if row[:1] in " 0123456789" and row]
    assert max(map(len, drawn)) <= width
    assert text.isascii() is ascii
    assert [text.count(f"{name}: ") for name in PICTURES] == [1, 1, 1, 1]


def test_marks_are_distinct_enough() -> None:
    assert len(set(UNICODE.marks)) == len(Cell) == len(set(ASCII.marks))


def test_choices_are_drawn_as_given_or_from_a_seed() -> None:
    shown = show(SMALL, 200, "selected", seed=1)
    assert shown == show(SMALL, 200, "selected", seed=1)
    assert shown != show(SMALL, 200, "selected", seed=2)
    blocks = random_blocks(SMALL, Places.of(SMALL, 200, None), seed=1)
    assert shown == show(SMALL, 200, "selected", blocks=blocks)
    assert shown == show(SMALL, 200, "selected", blocks=blocks[0, 0])


@pytest.mark.parametrize("branch", [None, "sliding"])
def test_an_image_is_written(branch: PictureName | None, tmp_path: Path) -> None:
    path = tmp_path / "mask.png"
    text = show(SMALL, 300, branch, path=path, documents=[100, 200])
    assert text == show(SMALL, 300, branch, documents=[100, 200])
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_without_matplotlib_only_the_image_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert show(SMALL, 8)
    with pytest.raises(ImportError, match=r"needs matplotlib.*pip install 'nsa-flex\[bench\]'"):
        show(SMALL, 8, path=tmp_path / "mask.png")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"config": {}}, TypeError, "config is a dict; it must be an NSAConfig"),
        ({"branch": "local"}, ValueError, "branch is 'local'; it must be one of compressed"),
        ({"seq_len": 0}, ValueError, "seq_len=0 must be from 1 to 8192"),
        ({"seq_len": 8193}, ValueError, "seq_len=8193 must be from 1 to 8192"),
        ({"width": 23}, ValueError, "width=23 must be at least 24"),
        ({"documents": [20, 20]}, ValueError, r"\[20, 20\] add up to 40; .* to seq_len=64"),
        ({"documents": [0, 64]}, ValueError, "expected lengths of at least 1"),
        ({"documents": []}, ValueError, "add up to 0"),
        ({"blocks": torch.zeros(1, 1, 63, 4).int()}, ValueError, "with Sq at least 64"),
        ({"blocks": torch.zeros(64, 4)}, ValueError, "float32 .* expected integers"),
        ({"blocks": torch.zeros(64).int()}, ValueError, r"\(64,\); expected integers"),
    ],
)
def test_bad_arguments_are_named(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        show(**{"config": SMALL, "seq_len": 64, **change})
