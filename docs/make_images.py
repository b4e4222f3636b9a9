"""Draws the pictures in docs/images: `python docs/make_images.py`.

Needs matplotlib and Chromium.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from nsa_flex import NSAConfig
from nsa_flex.masks import show

matplotlib.use("Agg")

IMAGES = Path(__file__).parent / "images"

# Small enough that blocks can be told apart.
CONFIG = NSAConfig(num_selected_blocks=6, window_size=192)


def main() -> None:
    """Write every picture."""
    IMAGES.mkdir(exist_ok=True)
    draw_core(IMAGES / "core.png")
    draw_fold(IMAGES / "fold.png")
    show(CONFIG, 1024, path=IMAGES / "masks.png")
    show(CONFIG, 1024, path=IMAGES / "documents.png", documents=[500, 100, 424])
    photograph(IMAGES.parent / "audit_example.html", IMAGES / "audit.png")


# The stages of the fused core: name, what runs it, and its place in the picture.
STAGES = {
    "query, key,\nvalue, gates": ("", (0, 1)),
    "φ": ("Inductor", (1.1, 2)),
    "compressed": ("cuDNN on the fold", (2.4, 2)),
    "top-k": ("topk_scores(_sm90)\ntopk_select", (3.2, 1)),
    "index, unions": ("index_count, index_scatter\nblock_union", (5, 1)),
    "partials": ("selected_fwd_partial\n(_sm90)", (7.1, 1)),
    "union forward": ("selected_fwd_union\n(_sm90)", (7.1, 0)),
    "epilogue": ("fused_fwd_epilogue\n(_sm90): local blocks,\nwindow, gated sum", (9.1, 1)),
    "output": ("", (10.6, 1)),
}
HANDED_ON = [
    ("query, key,\nvalue, gates", "φ", ""),
    ("φ", "compressed", ""),
    ("compressed", "top-k", "log-sum-exp"),
    ("top-k", "index, unions", "blocks"),
    ("index, unions", "partials", "CSR rows"),
    ("index, unions", "union forward", "unions"),
    ("partials", "epilogue", "outputs, lse"),
    ("union forward", "epilogue", "selected rows"),
    ("compressed", "epilogue", "outputs, in the order of the fold"),
    ("epilogue", "output", ""),
]


def draw_core(path: Path) -> None:
    """The data flow of a forward of the fused core."""
    figure, axes = pyplot.subplots(figsize=(12.5, 3.4), layout="constrained")
    axes.axis("off")
    axes.set(xlim=(-0.6, 11), ylim=(-0.4, 2.3))
    boxes = {name: _box(axes, name, *stage) for name, stage in STAGES.items()}
    for source, target, what in HANDED_ON:
        ends = [STAGES[name][1] for name in (source, target)]
        patches = {"patchA": boxes[source], "patchB": boxes[target]}
        style = {"arrowstyle": "-|>", "color": "0.4", "shrinkA": 2, "shrinkB": 2}
        axes.annotate("", ends[1], ends[0], arrowprops={**style, **patches}, zorder=1)
        middle = np.mean(ends, axis=0)
        label = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
        if what:
            axes.text(*middle, what, fontsize=7, ha="center", va="center", bbox=label)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _box(axes: Axes, name: str, kernels: str, place: tuple[float, float]) -> Patch:
    colour = "#e8edf8" if kernels else "white"
    box = {"boxstyle": "round,pad=0.4", "facecolor": colour}
    text = f"{name}\n{kernels}" if kernels else name
    patch = axes.text(
        *place, text, ha="center", va="center", fontsize=8, bbox=box
    ).get_bbox_patch()
    assert patch is not None
    return patch


def draw_fold(path: Path, block: int = 4, stride: int = 2, tokens: int = 15) -> None:
    """The staircase of the compressed branch, and what the fold makes of it."""
    num_blocks = (tokens - block) // stride + 1
    query, key = np.arange(tokens)[:, None], np.arange(num_blocks)[None]
    visible = key * stride + block - 1 <= query
    figure, panels = pyplot.subplots(1, 1 + stride, figsize=(9, 4.2), layout="constrained")
    residue = (query - block + 1) % stride + 1
    _grid(
        panels[0], np.where(visible, residue, 0), "every query", [f"t={t}" for t in range(tokens)]
    )
    for r in range(stride):
        rows = np.arange(block - 1 + r, tokens, stride)
        names = [f"j={j} (t={t})" for j, t in enumerate(rows)]
        _grid(panels[1 + r], np.where(visible[rows], r + 1, 0), f"residue r={r}", names)
    figure.suptitle(
        f"l={block}, d={stride}: query t is row j = (t - {block - 1}) // {stride}", fontsize=10
    )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _grid(axes: Axes, values: np.ndarray, title: str, rows: list[str]) -> None:
    colours = matplotlib.colors.ListedColormap(["white", "#4c72b0", "#dd8452"])
    axes.pcolormesh(values[::-1], cmap=colours, vmin=0, vmax=2, edgecolors="0.8", linewidth=0.5)
    axes.set_title(title, fontsize=9)
    axes.set_xticks(np.arange(values.shape[1]) + 0.5, [f"{i}" for i in range(values.shape[1])])
    axes.set_yticks(np.arange(len(rows)) + 0.5, rows[::-1])
    axes.set_xlabel("compressed block", fontsize=8)
    axes.tick_params(labelsize=7, length=0)
    axes.set_aspect("equal")


def photograph(page: Path, picture: Path) -> None:
    """The upper part of a page as Chromium renders it."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise FileNotFoundError("install Chromium to photograph pages")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    size = "--window-size=1080,1480"
    command = [browser, *options, size, f"--screenshot={picture}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True)


if __name__ == "__main__":
    main()
