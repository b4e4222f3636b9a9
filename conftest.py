"""Modules that need what may not be installed hold no examples to collect then."""

from __future__ import annotations

import importlib.util


def _is_missing(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is None
    except ModuleNotFoundError:
        return True


_ENGINE = "transformers.generation.continuous_batching.cache_allocators"

collect_ignore = []
if _is_missing(_ENGINE):
    collect_ignore += ["nsa_flex/patching/hf_manager.py", "nsa_flex/patching/hf_pages.py"]
if _is_missing(_ENGINE) or any(map(_is_missing, ("fastapi", "openai", "uvicorn"))):
    collect_ignore += ["nsa_flex/cli/serve_app.py"]
