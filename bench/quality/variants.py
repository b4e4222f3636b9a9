"""The models that are compared: a size's config of `nsa-flex train`, and what a variant changes.

    python -m nsa_flex.bench.quality.variants mean --size 30m

prints the whole config, which `nsa-flex train` takes. What no config can say, `windows_by_chunks`
does: windows by chunks instead of a mask over S × S.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

import yaml

from nsa_flex.bench.command_line import parser_of
from nsa_flex.config import BRANCHES, BranchName, CompressionKind
from nsa_flex.training.config import TrainConfig, read_config
from nsa_flex.training.config_reading import from_mapping
from nsa_flex.training.flops import num_parameters
from nsa_flex.training.models import build_model
from nsa_flex.training.tokenization import BYTES

LayerKind = Literal["nsa", "dense", "window"]
STEP = 8  # of the width that makes parameters equal


@dataclass(frozen=True)
class Variant:
    """What differs from the config of a size.

    Args:
        attention: "nsa" patches the layers that `layers` does not name otherwise.
        compression: φ.
        layers: kinds of the layers, repeated. Empty for all of the one kind that `attention` says.
        branches: of NSA. Without the compressed one its keys still choose the blocks.
        nsa: other sizes of NSA than the config's.
        parameters_of: a variant; the MLP is widened until this one has as many parameters.
    """

    attention: Literal["nsa", "dense"] = "nsa"
    compression: CompressionKind = "mlp"
    layers: tuple[LayerKind, ...] = ()
    branches: tuple[BranchName, ...] = BRANCHES
    nsa: dict[str, Any] = field(default_factory=dict)
    parameters_of: str | None = None

    def kinds(self, count: int) -> tuple[LayerKind, ...]:
        """Of `count` layers; none where all are of one kind."""
        return tuple(each for each, _ in zip(cycle(self.layers), range(count), strict=False))

    def dense_layers(self, count: int) -> tuple[int, ...]:
        """As of `ModelSection`: numbers of those of `count` layers beside NSA's that are dense."""
        return tuple(i for i, kind in enumerate(self.kinds(count)) if kind == "dense")


@cache
def variants() -> dict[str, Variant]:
    """All of them by name, in the order in which they are trained."""
    values = yaml.safe_load((_configs() / "variants.yaml").read_text())
    return {name: from_mapping(Variant, value, name) for name, value in values.items()}


def sizes() -> list[str]:
    """Names of the sizes."""
    return sorted(path.stem for path in _configs().glob("*.yaml") if path.stem != "variants")


def config_of(name: str, size: str, overrides: tuple[str, ...] = ()) -> TrainConfig:
    """The config of a run.

    Args:
        overrides: as of `nsa-flex train`; they come before what the variant changes.

    Raises:
        ValueError: there is no such size or variant.
    """
    for what, value, known in (("size", size, sizes()), ("variant", name, list(variants()))):
        if value not in known:
            raise ValueError(f"{what} is {value!r}; expected one of {', '.join(known)}")
    variant = variants()[name]
    config = read_config(str(_configs() / f"{size}.yaml"), overrides)
    nsa = dataclasses.replace(
        config.model.nsa,
        compression=variant.compression,
        branches=variant.branches,
        **variant.nsa,
    )
    model = dataclasses.replace(
        config.model,
        attention=variant.attention,
        nsa=nsa,
        dense_layers=variant.dense_layers(_num_layers(config)),
        config={**(config.model.config or {}), **_layer_types(variant, config)},
    )
    config = dataclasses.replace(config, model=model)
    if variant.parameters_of is None:
        return config
    return _widened(config, parameters(config_of(variant.parameters_of, size, overrides)))


def parameters(config: TrainConfig) -> int:
    """How many the model has; none gets a value."""
    return num_parameters(build_model(config.model, config.data, BYTES, values="none"))


def _layer_types(variant: Variant, config: TrainConfig) -> dict[str, Any]:
    """What transformers calls them. `patch` leaves layers with a window as they are."""
    if "window" not in variant.layers:
        return {}
    kinds = variant.kinds(_num_layers(config))
    names = ["sliding_attention" if kind == "window" else "full_attention" for kind in kinds]
    window = config.model.nsa.window_size
    return {"layer_types": names, "use_sliding_window": True, "sliding_window": window}


def _num_layers(config: TrainConfig) -> int:
    return (config.model.config or {})["num_hidden_layers"]


def _widened(config: TrainConfig, wanted: int) -> TrainConfig:
    """With as wide an MLP as comes nearest to the parameters that are wanted."""
    sizes = config.model.config or {}
    each = 3 * sizes["hidden_size"] * sizes["num_hidden_layers"]
    more = round((wanted - parameters(config)) / each / STEP) * STEP
    wide = {**sizes, "intermediate_size": sizes["intermediate_size"] + more}
    return dataclasses.replace(config, model=dataclasses.replace(config.model, config=wide))


def _configs() -> Path:
    return Path(str(resources.files("nsa_flex.bench.quality") / "configs"))


def main() -> None:
    """Print one."""
    parser = parser_of(__doc__)
    parser.add_argument("variant", choices=variants())
    parser.add_argument("--size", choices=sizes(), default="30m")
    parser.add_argument("--set", action="append", default=[], help="as of nsa-flex train")
    given = parser.parse_args()
    config = config_of(given.variant, given.size, tuple(given.set))
    print(yaml.safe_dump(config.to_dict(), sort_keys=False), end="")


if __name__ == "__main__":
    main()
