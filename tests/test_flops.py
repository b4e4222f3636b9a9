"""Pairs of queries and keys are those of the masks."""

from __future__ import annotations

import numpy as np
import pytest

from nsa_flex import NSAConfig
from nsa_flex.flops import attention_flops, core_parts, keys_seen
from reference import oracle

SMALL = NSAConfig(8, 4, 8, 4, window_size=16, compression="mean")


@pytest.mark.parametrize("length", [1, 7, 8, 63, 200])
def test_keys_seen_are_those_of_the_masks(length):
    num_blocks = max(1, SMALL.num_compressed_blocks(length))
    masks = {
        "dense": np.tril(np.ones((length, length), bool)),
        "compressed": oracle.compressed_mask(length, length, num_blocks, SMALL),
        "sliding": oracle.sliding_mask(length, length, SMALL),
    }
    scores = np.random.default_rng(0).random((1, 1, length, -(-length // 8)))
    chosen = oracle.choose_all(scores, SMALL)
    masks["selected"] = oracle.selected_mask(chosen, length, SMALL)
    for part, mask in masks.items():
        assert keys_seen(part, length, SMALL) == mask.sum(), part


def test_absent_branches_compute_nothing():
    def forward(branches):
        config = NSAConfig(branches=branches)
        parts = core_parts(config)
        return {part: attention_flops(part, "forward", 4096, 64, 64, config) for part in parts}

    whole = forward(("compressed", "selected", "sliding"))
    assert list(whole) == ["compressed", "choice", "selected", "sliding"]
    assert forward(("compressed", "sliding")) == {k: whole[k] for k in ("compressed", "sliding")}
    # Without the log-sum-exp of the compressed branch the choice computes its scores twice.
    alone = forward(("selected",))
    assert alone == {"choice": 2 * whole["choice"], "selected": whole["selected"]}
