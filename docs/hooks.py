"""For mkdocs: pages and plots of the checkout outside docs/ that pages link to are in the site."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
# Names in the site, which has an index.html of its own, and files of the checkout.
OUTER = {name.lower(): name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")}
OUTER |= {
    f"results/{plot.name}": f"bench/results/{plot.name}"
    for plot in ROOT.glob("bench/results/*.png")
}
IN_SITE = {path: name for name, path in OUTER.items()}

LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=(#[^)\s]*)?\))")


def on_files(files: Any, config: Any) -> Any:
    """Adds them."""
    for name, path in OUTER.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links are those of the checkout, on the way to and from such a file too."""
    here = page.file.src_uri
    folder = posixpath.dirname(OUTER.get(here, f"docs/{here}"))

    def replace(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[1]))
        if (ROOT / path / "README.md").is_file():
            path += "/README.md"
        name = IN_SITE.get(path, path.removeprefix("docs/"))
        if name == path or not (ROOT / path).is_file():
            return match[0]
        return posixpath.relpath(name, posixpath.dirname(here) or ".")

    return LINK.sub(replace, markdown)
