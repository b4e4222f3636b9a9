"""Former names of modules' contents and of arguments: they work, and warn where they are used."""

from __future__ import annotations

import sys
import types

import pytest

import nsa_flex
from nsa_flex.renaming import former_arguments, former_names


def test_a_former_name_gives_what_there_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("nsa_flex.example")
    module.__getattr__ = former_names("nsa_flex.example", {"Config": "nsa_flex.NSAConfig"})  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "nsa_flex.example", module)
    text = r"example\.Config is now nsa_flex\.NSAConfig; the former name goes with the next minor"
    with pytest.warns(DeprecationWarning, match=text) as caught:
        assert module.Config is nsa_flex.NSAConfig
    assert caught[0].filename == __file__  # the caller's line, not the helper's
    with pytest.raises(AttributeError, match=r"module 'nsa_flex\.example' has no attribute 'Oth"):
        _ = module.Other
    with pytest.warns(DeprecationWarning, match=text):
        from nsa_flex.example import Config  # noqa: F401


def test_a_former_argument_is_taken() -> None:
    @former_arguments(block="block_size")
    def rows(tokens: int, *, block_size: int = 1) -> int:
        """Rows of blocks."""
        return tokens // block_size

    assert rows.__doc__ == "Rows of blocks."
    text = "the argument block of rows is now block_size; the former name goes"
    with pytest.warns(DeprecationWarning, match=text) as caught:
        assert rows(8, block=4) == rows(8, block_size=4) == 2
    assert [each.filename for each in caught] == [__file__]
    with pytest.raises(TypeError, match="rows got block_size and block, its former name: pass"):
        rows(8, block=4, block_size=4)
