"""Training runs: `nsa-flex train`, its artefacts, and telemetry for other loops.

`Telemetry` needs nothing beyond torch; the rest the extras hf and train.
"""

from typing import TYPE_CHECKING, Any

from nsa_flex.training.errors import TrainingError
from nsa_flex.training.telemetry import Telemetry, read_rows, schema

if TYPE_CHECKING:
    from nsa_flex.training.telemetry.callback import TelemetryCallback

__all__ = [
    "Telemetry",
    "TelemetryCallback",
    "TrainingError",
    "read_rows",
    "schema",
]


def __getattr__(name: str) -> Any:
    if name == "TelemetryCallback":  # imports transformers
        from nsa_flex.training.telemetry.callback import TelemetryCallback

        return TelemetryCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
