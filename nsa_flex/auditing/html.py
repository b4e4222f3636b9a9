"""A report as one page of HTML: verdict, a drawing of each sweep, findings with their sources."""

from __future__ import annotations

import functools
import re
from html import escape
from pathlib import Path
from typing import Any

from nsa_flex.auditing.sources import excerpt, place_of, shortened

TEMPLATES = Path(__file__).parent / "templates"
_CAUSES = {  # text, and class of the style
    "code": ("caused by the code", "bad"),
    "length": ("first change of a size", "note"),
    "number": ("first change of a number", "note"),
    "size-one": ("a size of 0 or 1", "note"),
    "same-size": ("two sizes were equal", "note"),
}
_SYNCS = ("host-sync", "cuda-sync", "data-dependent")


def page(*reports: Any) -> str:
    """Each `AuditReport` on one page; it loads nothing from anywhere.

    Raises:
        ModuleNotFoundError: jinja2 is missing; the message names the extra that brings it.
    """
    return environment(TEMPLATES).get_template("page.html").render(reports=reports)


@functools.cache
def environment(*folders: Path) -> Any:
    """The templates of these folders and what they call; raises as `page` does."""
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
        from markupsafe import Markup
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the page needs jinja2, which is not installed; install it with: "
            "pip install 'nsa-flex[audit]'",
            name="jinja2",
        ) from error
    loader = FileSystemLoader(folders)
    made = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )

    def verbatim(name: str) -> Any:
        """A file that is no template, as it is."""
        return Markup(loader.get_source(made, name)[0])

    made.globals.update(causes=_CAUSES, sync_kinds=_SYNCS, verbatim=verbatim)
    made.filters.update(
        alike=alike,
        code=_code,
        excerpt=excerpt,
        place_of=place_of,
        seconds=seconds,
        shortened=shortened,
        size=size,
        skips=skips,
    )
    return made


def alike(recompiles: tuple[Any, ...]) -> list[list[Any]]:
    """Recompilations of one cause and place whose guards differ in numbers alone, together."""
    groups: dict[tuple[str, str, str], list[Any]] = {}
    for each in recompiles:
        key = each.cause, re.sub(r"\d+", "#", each.guard), each.location
        groups.setdefault(key, []).append(each)
    return list(groups.values())


def _code(text: str) -> Any:
    """Names and calls of torch set as code, the rest escaped."""
    from markupsafe import Markup

    return Markup(re.sub(r"(torch\.[\w.]*\w(?:\([^)]*\))?)", r"<code>\1</code>", escape(text)))


def skips(count: int | None) -> str:
    """How CUDA graphs fared.

    >>> skips(0), skips(2), skips(None)
    ('taken', '2 skipped', 'not tried')
    """
    if count is None:
        return "not tried"
    return f"{count} skipped" if count else "taken"


def seconds(value: float | None) -> str:
    """`1.2 s`, `3.4 ms`, or a dash."""
    if value is None:
        return "-"
    return f"{value:.1f} s" if value >= 1 else f"{1e3 * value:.2f} ms"


def size(value: float | None) -> str:
    """`3.2 MiB`, or a dash."""
    if value is None:
        return "-"
    return f"{value / 2**20:.1f} MiB" if value < 2**30 else f"{value / 2**30:.2f} GiB"
