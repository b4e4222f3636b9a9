"""Held-out loss of a dense checkpoint patched in many ways: blocks, rules, layers; no training.

    python -m nsa_flex.bench.quality.block_choices --corpus corpus --out block_choices.json \\
        --checkpoint runs/conversion/dense-0/pretraining/model

One row a choice: losses at both lengths of the study of conversion and what the selected blocks
hold of dense attention. "exact" selects by the dense attention itself: what it loses no better
scores win back. "layer I" patches that layer alone; "dense I J" leaves those dense that lost most.
With --times what the core takes with each choice's blocks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nsa_flex import NSAConfig, nsa_attention, selected_attention
from nsa_flex.bench.cases.ragged import inputs
from nsa_flex.bench.cases.targets import compress
from nsa_flex.bench.command_line import parser_of
from nsa_flex.bench.measure import machine
from nsa_flex.bench.measure.timing import both_passes
from nsa_flex.bench.quality.build import digest, sha256
from nsa_flex.bench.quality.conversion import Recipe, Study
from nsa_flex.bench.quality.evaluation import losses_by_length
from nsa_flex.bench.report.rows import Row, earlier_rows, merged, write_rows
from nsa_flex.patching import NSALayer
from nsa_flex.selection import best_blocks
from nsa_flex.training.alignment import recalls, what_it_attends
from nsa_flex.training.block_mass import dense_block_mass
from nsa_flex.training.config import DataSection, ModelSection
from nsa_flex.training.models import build_model
from nsa_flex.training.tokenization import BYTES

TOKENS = 32768  # of a forward
QUERIES = 512  # whose exact blocks are found at once
PROBES = 4  # rows that recall is measured on
HEADS, CORE_TOKENS, BUDGET_MS = "32/8", 32768, 600.0  # of the times


@dataclass(frozen=True)
class Choice:
    """One way to patch; `nsa` are sizes that differ from `NSAConfig(compression="mean")`.

    Args:
        exact: blocks by the mass of dense attention in place of the compressed scores.
        dense_layers: as of `ModelSection`.
    """

    name: str
    nsa: dict[str, Any] = field(default_factory=dict)
    exact: bool = False
    dense_layers: tuple[int, ...] = ()

    @property
    def config(self) -> NSAConfig:
        """What `patch` gets."""
        return NSAConfig(**{"compression": "mean", **self.nsa})


def _blocks(size: int, selected: int, compressed: int, **more: Any) -> dict[str, Any]:
    """`selected` tokens in blocks of `size`, scored by means of `compressed` tokens."""
    return {
        "compress_block_size": compressed,
        "compress_stride": max(compressed // 2, 8),
        "select_block_size": size,
        "num_selected_blocks": selected // size,
        "num_local_blocks": 128 // size,
        **more,
    }


MAX = {"selection": "max_pool"}
CHOICES = (
    Choice("n=16"),
    Choice("n=16 exact", exact=True),
    Choice("l'=32 l=8", _blocks(32, 1024, 8)),
    Choice("l=8", _blocks(64, 1024, 8)),
    Choice("l=16", _blocks(64, 1024, 16)),
    Choice("l'=32 l=16", _blocks(32, 1024, 16)),
    Choice("n=32", _blocks(64, 2048, 32)),
    Choice("l=8 max-pool", _blocks(64, 1024, 8, **MAX)),
    Choice("l'=32 exact", _blocks(32, 1024, 8), exact=True),
    Choice("n=16 max-pool", MAX),
    Choice("l'=16 l=8", _blocks(16, 1024, 8)),
)


LAYER_BLOCKS: dict[str, Any] = {}  # of the choices of layers


@dataclass(frozen=True)
class Bench:
    """A dense checkpoint and the text that it is measured on.

    Args:
        corpus: digest of that which `rows` are of.
        rows: int64 (rows, S), S the longer of `lengths`.
    """

    checkpoint: Path
    corpus: str
    rows: Tensor
    lengths: tuple[int, int]
    device: torch.device

    @functools.cached_property
    def digest(self) -> str:
        """Tells checkpoints apart."""
        weights = sorted(self.checkpoint.glob("*.safetensors"))
        return " ".join(sha256(path)[:12] for path in weights)

    def model(self, **section: Any) -> Any:
        """Built anew from the checkpoint."""
        given = ModelSection(checkpoint=str(self.checkpoint), init="dense", **section)
        return build_model(given, DataSection(files=()), BYTES).to(self.device)

    def row(self, choice: Choice) -> Row:
        """What a choice loses."""
        model = self.model(nsa=choice.config, dense_layers=choice.dense_layers)
        if choice.exact:  # whose cost grows with the square of the length
            with exact_blocks(model):
                row = self._row(choice.name, model, self.lengths[:1])
        else:
            row = self._row(choice.name, model, self.lengths)
        row |= {"nsa": choice.config.to_dict(), "dense_layers": list(choice.dense_layers)}
        return row if choice.exact else row | self._held(model)

    def dense_row(self) -> Row:
        """What all are compared with."""
        return self._row("dense", self.model(attention="dense"), self.lengths)

    def _row(self, name: str, model: Any, lengths: Sequence[int]) -> Row:
        return {
            "case": f"block choices/{name}",
            "target": "block_choices",
            "choice": name,
            "checkpoint": self.digest,
            "corpus": self.corpus,
            **machine.describe(self.device),
            "status": "ok",
            "losses": losses_by_length(model, self.rows, lengths, TOKENS, self.device),
        }

    def _held(self, model: Any) -> dict[str, Any]:
        """Share of the dense attention's mass in the selected blocks, by length and layer."""
        held = {}
        for length in self.lengths:
            probes = self.rows.reshape(-1, length)[:PROBES].to(self.device).split(1)
            scores = [[each["score_recall"] for each in recalls(model, row)] for row in probes]
            held[str(length)] = [round(float(value), 4) for value in np.mean(scores, 0)]
        return {"held_mass": held}


@contextlib.contextmanager
def exact_blocks(model: Any) -> Iterator[None]:
    """Within, NSA layers answer with attention to the blocks of most dense mass."""

    def attend(layer: NSALayer, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> Tensor:
        query, key, value, scale = what_it_attends(args, kwargs)
        blocks = _best(query, key, layer.config, scale)
        found = selected_attention(query, key, value, blocks, config=layer.config, scale=scale)
        assert isinstance(found, Tensor)
        return found

    handles = [
        module.register_forward_hook(attend, with_kwargs=True)
        for module in model.modules()
        if isinstance(module, NSALayer)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _best(query: Tensor, key: Tensor, config: NSAConfig, scale: float) -> Tensor:
    """int32 (B, Hkv, S, n)."""
    found = []
    for positions in torch.arange(query.shape[2], device=query.device).split(QUERIES):
        mass = dense_block_mass(query[:, :, positions], key, positions, config, scale)
        found.append(best_blocks(mass, positions[None], None, config))
    return torch.cat(found, 2)


def run(bench: Bench, out: Path) -> list[Row]:
    """Every choice that `out` does not hold yet; each layer alone; the worst layers left dense."""
    rows = earlier_rows(out)
    done = {row["choice"]: row for row in rows if row["target"] == "block_choices"}
    measured = {(row["checkpoint"], row.get("corpus")) for row in done.values()}
    if measured - {(bench.digest, bench.corpus)}:
        raise ValueError(f"{out} holds rows of another checkpoint or corpus; choose another --out")

    def measure(choice: Choice | None) -> Row:
        nonlocal rows
        name = "dense" if choice is None else choice.name
        if name not in done:
            done[name] = bench.dense_row() if choice is None else bench.row(choice)
            rows = merged(rows, [done[name]])
            write_rows(out, rows)
            losses = [found["loss"] for found in done[name]["losses"].values()]
            print(name, *losses, flush=True)
        return done[name]

    measure(None)
    for choice in CHOICES:
        measure(choice)
    layers, short = range(len(bench.model(attention="dense").model.layers)), str(bench.lengths[0])
    lost = []
    for layer in layers:
        others = tuple(each for each in layers if each != layer)
        alone = measure(Choice(f"layer {layer}", LAYER_BLOCKS, dense_layers=others))
        lost.append(alone["losses"][short]["loss"])
    worst = [int(layer) for layer in np.argsort(lost)[::-1]]
    for number in (1, 2, 3, 5):
        kept = tuple(sorted(worst[:number]))
        if number < len(layers):
            measure(Choice("dense " + " ".join(map(str, kept)), LAYER_BLOCKS, dense_layers=kept))
    return rows


def times(out: Path) -> list[Row]:
    """What the core takes with the blocks of each choice: milliseconds on a GPU of its own."""
    device = torch.device("cuda")
    query, key, value, gates = inputs(HEADS, 1, CORE_TOKENS, device)
    rows = earlier_rows(out)
    for choice in CHOICES:
        if choice.exact:
            continue
        compressed = (compress(x, choice.config) for x in (key, value))
        core = functools.partial(nsa_attention, config=choice.config)
        row: Row = {"target": "block_times", "choice": choice.name, **machine.describe(device)}
        row |= both_passes(core, [query, key, value, *compressed, gates], BUDGET_MS)
        rows = merged(rows, [{"case": f"block times/{choice.name}", "status": "ok", **row}])
        write_rows(out, rows)
        print({name: value for name, value in row.items() if name.endswith("_ms")}, flush=True)
    return rows


def main() -> None:
    """Measure."""
    parser = parser_of(__doc__)
    parser.add_argument("--checkpoint", type=Path, help="dense, of transformers")
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--times", action="store_true", help="of the core instead of losses")
    parser.add_argument("--work", type=Path, default=Path("runs/conversion"), help="of cut text")
    parser.add_argument("--out", type=Path, required=True, help="file of rows")
    given = parser.parse_args()
    if given.times:
        times(given.out)
        return
    if given.checkpoint is None or given.corpus is None:
        parser.error("losses need --checkpoint and --corpus")
    recipe = Recipe()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = Study(given.corpus, given.work, seed=0, recipe=recipe).held_out()
    lengths = (recipe.length, recipe.long_length)
    run(Bench(given.checkpoint, digest(given.corpus), rows, lengths, device), given.out)


if __name__ == "__main__":
    main()
