"""Draws the pictures in docs/images: `python docs/make_images.py`.

Needs matplotlib and Chromium.
"""

from __future__ import annotations

import shutil
import subprocess
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
    photograph(IMAGES.parent / "audit_example.html", IMAGES / "audit.png")


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
