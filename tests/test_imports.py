"""No module is in a circle of imports; which layer imports which, `lint-imports` sees to."""

from __future__ import annotations

import pytest

grimp = pytest.importorskip("grimp")


def circles(graph: grimp.ImportGraph) -> list[set[str]]:
    """Sets of modules that import one another, inside functions or for a type alone included."""
    below = {module: graph.find_upstream_modules(module) for module in graph.modules}
    found = []
    for module, imported in below.items():
        circle = {module} | {other for other in imported if module in below[other]}
        if len(circle) > 1 and circle not in found:
            found.append(circle)
    return found


def test_no_circles() -> None:
    graph = grimp.build_graph("nsa_flex", exclude_type_checking_imports=False, cache_dir=None)
    assert len(graph.modules) > 200
    assert circles(graph) == []


def test_a_circle_is_found() -> None:
    graph = grimp.ImportGraph()
    for importer, imported in (("a", "b"), ("b", "c"), ("c", "b")):
        graph.add_import(importer=importer, imported=imported)
    assert circles(graph) == [{"b", "c"}]
