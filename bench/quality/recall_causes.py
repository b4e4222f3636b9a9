"""Why an answer came or did not: were its blocks selected, and how stood the gates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nsa_flex.bench.quality.recall_tasks import Batch
from nsa_flex.training.telemetry.observe import Observation, observe


def causes_of(model: Any, call: Callable[[], Any], batch: Batch) -> list[dict[str, float]]:
    """What each question's query saw; nothing of a model without a selected branch.

    selected: share of the needles whose block some layer and KV head selected. Of a needle in
    several heads, gate is the largest share of the selected branch in the gates of these heads;
    gate_anywhere that of all heads and layers, 0 where nothing was selected.

    Args:
        call: runs the model on the batch.

    Returns:
        one entry a question, in the order of `np.nonzero(batch.places >= 0)`.
    """
    seen = [each for each in observe(model, call) if each.blocks is not None]
    if not seen:
        return []
    rows, number = np.nonzero(batch.places >= 0)
    device = seen[0].gates.device
    row = torch.from_numpy(rows).to(device)
    place = torch.from_numpy(batch.places[rows, number]).to(device)
    needles = torch.from_numpy(batch.needles[rows, number]).to(device)  # [N, M]
    shares, hits = zip(*(_layer(each, row, place, needles) for each in seen), strict=True)
    share, hit = torch.cat(shares, 1), torch.cat(hits, 1)  # [N, heads], [N, heads, M]
    real = needles >= 0
    found = hit.any(1) & real
    let_through = torch.where(hit, share[..., None], 0.0).amax(1)  # [N, M]
    count = real.sum(1)
    columns = {
        "selected": found.sum(1) / count,
        "gate": torch.where(real, let_through, 0.0).sum(1) / count,
        "gate_anywhere": share.amax(1),
    }
    values = torch.stack(list(columns.values()), 1).tolist()
    return [dict(zip(columns, each, strict=True)) for each in values]


def _layer(
    seen: Observation, row: Tensor, place: Tensor, needles: Tensor
) -> tuple[Tensor, Tensor]:
    """The selected branch's share in the gates (N, Hkv), and which needles it saw (N, Hkv, M)."""
    assert seen.blocks is not None
    blocks = seen.blocks[row, :, place]  # [N, Hkv, n]
    wanted = needles // seen.config.select_block_size
    hit = (blocks[..., None] == wanted[:, None, None]).any(2) & (needles >= 0)[:, None]
    gates = seen.gates[row, :, place].float().abs()  # [N, Hq, C]
    own = gates[..., seen.config.branches.index("selected")] / gates.sum(-1).clamp(min=1e-9)
    return own.unflatten(1, (blocks.shape[1], -1)).amax(2), hit
