"""How processes of tests on ranks begin."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from distributed import ranks


@pytest.mark.parametrize(("has_cuda", "method"), [(False, "forkserver"), (True, "spawn")])
def test_no_fork_where_what_is_imported_may_use_the_gpu(
    has_cuda: bool, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = mock.Mock()
    monkeypatch.setattr(ranks.mp, "start_processes", start)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    ranks.start_ranks(2, print)
    assert start.call_args.kwargs["start_method"] == method
