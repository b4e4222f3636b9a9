"""Draws the pictures in docs/images: `python docs/make_images.py`, needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from nsa_flex import NSAConfig
from nsa_flex.masks import show

IMAGES = Path(__file__).parent / "images"

# Small enough that blocks can be told apart.
CONFIG = NSAConfig(num_selected_blocks=6, window_size=192)


def main() -> None:
    """Write every picture."""
    IMAGES.mkdir(exist_ok=True)
    show(CONFIG, 1024, path=IMAGES / "masks.png")
    show(CONFIG, 1024, path=IMAGES / "documents.png", documents=[500, 100, 424])


if __name__ == "__main__":
    main()
