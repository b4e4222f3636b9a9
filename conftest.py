"""Modules that need what may not be installed hold no examples to collect then."""

from __future__ import annotations

import importlib.util
from importlib.machinery import PathFinder


def _is_missing(name: str) -> bool:
    """Of a module within a package too, without importing the package, which takes seconds."""
    package, *parts = name.split(".")
    spec = importlib.util.find_spec(package)
    for part in parts:
        if spec is None:
            break
        spec = PathFinder.find_spec(part, spec.submodule_search_locations)
    return spec is None


_ENGINE = "transformers.generation.continuous_batching.cache_allocators"

collect_ignore = []
if _is_missing(_ENGINE):
    collect_ignore += ["nsa_flex/patching/hf_engine.py"]
if _is_missing(_ENGINE) or any(map(_is_missing, ("fastapi", "openai", "uvicorn"))):
    collect_ignore += ["nsa_flex/cli/serve_app.py"]
