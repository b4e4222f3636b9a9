"""For mkdocs: links that leave the pages become names of files in the checkout."""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"(!?)\[([^\]]*)\]\((\.\./[^)\s#]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links to files outside docs/ become their names; the site holds the pages alone."""

    def replace(match: re.Match[str]) -> str:
        image, text, path, _ = match.groups()
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), path))
        if not target.startswith(".."):
            return match[0]
        return f"*{text}*" if image else f"{text} (`{target.removeprefix('../')}`)"

    return LINK.sub(replace, markdown)
