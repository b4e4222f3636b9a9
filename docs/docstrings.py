"""For mkdocstrings: examples in docstrings are code; to Markdown `>>>` is a quotation."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

EXAMPLE = re.compile(r"^>>> .+(?:\n.+)*", re.M)


class Examples(Extension):
    """Fences them."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Of whatever has a docstring."""
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
