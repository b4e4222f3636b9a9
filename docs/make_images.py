"""Draws the pictures in docs/images: `python docs/make_images.py`.

Needs matplotlib, playwright and Chromium.
"""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from PIL import Image
from playwright.sync_api import Browser, Playwright, sync_playwright

from nsa_flex import NSAConfig
from nsa_flex.masks import show
from nsa_flex.masks.picture import Places, make_picture
from nsa_flex.selection import best_blocks

matplotlib.use("Agg")

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
IMAGES = DOCS / "images"

# Small enough that blocks can be told apart.
CONFIG = NSAConfig(num_selected_blocks=6, window_size=192)


def main() -> None:
    """Write every picture."""
    IMAGES.mkdir(exist_ok=True)
    draw_core(IMAGES / "core.png")
    draw_fold(IMAGES / "fold.png")
    draw_masks(IMAGES / "masks.png")
    show(CONFIG, 1024, path=IMAGES / "documents.png", documents=[500, 100, 424])
    draw_speed(IMAGES / "speed.png")
    with tempfile.TemporaryDirectory() as site, sync_playwright() as playwright:
        command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", site]
        subprocess.run(command, cwd=ROOT, check=True)
        handler = functools.partial(SimpleHTTPRequestHandler, directory=site)
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = chromium(playwright)
        for page, name, size, scheme, top in PHOTOGRAPHS:
            address = f"http://127.0.0.1:{server.server_port}/{page}"
            photograph(browser, address, IMAGES / name, size, scheme, top)
        browser.close()
        server.shutdown()


# Of the site: page, picture, size of the screen, colour scheme, and what is on top of it.
PHOTOGRAPHS = [
    ("index.html", "site.png", (1280, 900), "light", None),
    ("audit_example.html", "audit.png", (1080, 1480), "light", None),
    ("audit_example.html", "audit_phone.png", (360, 1100), "dark", None),
    ("report_example.html", "report.png", (1400, 1000), "light", None),
    ("report_example.html", "report_layers.png", (1400, 1000), "light", "#layers"),
    ("report_example.html", "report_phone.png", (360, 1100), "dark", None),
    ("comparison_example.html", "comparison.png", (1400, 1000), "light", None),
]


def draw_masks(path: Path, tokens: int = 1024) -> None:
    """What each query reads in the three branches."""
    places = Places.of(CONFIG, tokens, None)
    own = torch.arange(tokens)[None]
    # Scores of a block are alike for all queries, and more alike for neighbours.
    random = torch.Generator().manual_seed(2)
    blocks = tokens // CONFIG.select_block_size
    scores = torch.rand(1, 1, 1, blocks, generator=random) + 0.5 * torch.rand(
        1, 1, tokens // 32, blocks, generator=random
    ).repeat_interleave(32, 2)
    picked = best_blocks(scores, own, None, CONFIG)
    titles = {
        "compressed": f"compressed: means of {CONFIG.compress_block_size} keys",
        "selected": f"selected: {CONFIG.num_selected_blocks} blocks of "
        f"{CONFIG.select_block_size} keys",
        "sliding": f"sliding: the last {CONFIG.window_size} keys",
    }
    figure, panels = pyplot.subplots(1, 3, figsize=(11, 3.9), layout="constrained")
    for axes, (name, title) in zip(panels, titles.items(), strict=True):
        seen = make_picture(name, CONFIG, places, picked).visible
        column = np.arange(seen.shape[1])[None]
        past = column * (tokens / seen.shape[1]) <= np.arange(tokens)[:, None]
        stripe = column % 2 if name == "compressed" else 0
        colours = matplotlib.colors.ListedColormap(["white", "#e4e6f0", "#3f51b5", "#8792d3"])
        place = {"extent": (0, tokens, tokens, 0), "interpolation": "nearest"}
        axes.imshow(np.where(seen, 2 + stripe, past), colours, vmin=0, vmax=3, **place)
        axes.set_title(title, fontsize=11)
        axes.set(xlabel="key", xticks=[0, 512, 1024], yticks=[0, 512, 1024])
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("query")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


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


# What is compared on the first page, and how its line is drawn.
LINES = {"sdpa-cudnn": ("dense attention (cuDNN)", "#8a8f98"), "nsa": ("NSA", "#3f51b5")}


def draw_speed(path: Path) -> None:
    """Forward and backward of the core over tokens, from the rows of the README's table."""
    rows = json.loads((ROOT / "bench" / "results" / "headline_h200.json").read_text())
    figure, axes = pyplot.subplots(figsize=(7.5, 3.6), layout="constrained")
    for implementation, (label, color) in LINES.items():
        points = sorted(
            (row["seq_len"] / 1024, row["median_ms"])
            for row in rows
            if (row["implementation"], row["heads"], row["pass"])
            == (implementation, "64/4", "forward_backward")
        )
        axes.plot(*zip(*points, strict=True), "o-", color=color, label=label, linewidth=2)
    lengths = [length for length, _ in points]
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms, forward + backward")
    axes.set_xticks(lengths, [f"{length:.0f}k" for length in lengths])
    axes.minorticks_off()
    axes.set_yticks([10, 100, 1000], ["10", "100", "1000"])
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def chromium(playwright: Playwright) -> Browser:
    """Installed from the distribution's packages."""
    path = shutil.which("chromium")
    if path is None:
        raise FileNotFoundError("install Chromium to photograph pages")
    return playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])


def photograph(
    browser: Browser,
    address: str,
    picture: Path,
    size: tuple[int, int],
    scheme: str,
    top: str | None,
) -> None:
    """A page as Chromium renders it, from the element `top` on, in 64 colours."""
    width, height = size
    view = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    view.goto(address)
    view.wait_for_load_state("networkidle")
    if top:
        view.locator(top).evaluate("element => element.scrollIntoView({behavior: 'instant'})")
    view.screenshot(path=picture)
    view.close()
    Image.open(picture).convert("RGB").quantize(64).save(picture, optimize=True)


if __name__ == "__main__":
    main()
