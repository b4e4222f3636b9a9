"""A report as one page of HTML: verdict, a drawing of each sweep, findings with their sources."""

from __future__ import annotations

import functools
import re
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa_flex.auditing.excerpts import excerpt, place_of, shortened
from nsa_flex.auditing.phases import Recompile
from nsa_flex.auditing.text import seconds, size, skips

if TYPE_CHECKING:
    from nsa_flex.auditing import report as _report

_TEMPLATES = Path(__file__).parent / "templates"
_CAUSES = {  # text, and class of the style
    "code": ("caused by the code", "bad"),
    "length": ("first change of a size", "note"),
    "number": ("first change of a number", "note"),
    "size-one": ("a size of 0 or 1", "note"),
    "same-size": ("two sizes were equal", "note"),
}
_SYNCS = ("host-sync", "cuda-sync", "data-dependent")


def page(*reports: _report.AuditReport) -> str:
    """All reports on one page; it loads nothing from anywhere.

    Raises:
        ModuleNotFoundError: jinja2 is missing; the message names the extra that brings it.
    """
    return environment().get_template("page.html").render(reports=reports)


@functools.cache
def environment() -> Any:
    """The templates and what they call; raises as `page` does."""
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the page of an audit needs jinja2, which is not installed; install it with: "
            "pip install 'nsa-flex[audit]'",
            name="jinja2",
        ) from error
    made = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.globals.update(causes=_CAUSES, sync_kinds=_SYNCS)
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


def alike(recompiles: tuple[Recompile, ...]) -> list[list[Recompile]]:
    """Those of one cause and place whose guards differ in numbers alone, together."""
    groups: dict[tuple[str, str, str], list[Recompile]] = {}
    for each in recompiles:
        key = each.cause, re.sub(r"\d+", "#", each.guard), each.location
        groups.setdefault(key, []).append(each)
    return list(groups.values())


def _code(text: str) -> Any:
    """Names and calls of torch set as code, the rest escaped."""
    from markupsafe import Markup

    return Markup(re.sub(r"(torch\.[\w.]*\w(?:\([^)]*\))?)", r"<code>\1</code>", escape(text)))
