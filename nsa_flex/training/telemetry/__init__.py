"""What a training run tells: losses, backends, gates and a heartbeat, as append-only files."""

from nsa_flex.training.telemetry.rows import last_of_each_step, read_rows
from nsa_flex.training.telemetry.schemas import ARTEFACTS, schema
from nsa_flex.training.telemetry.session import Telemetry, telemetry

__all__ = ["ARTEFACTS", "Telemetry", "last_of_each_step", "read_rows", "schema", "telemetry"]
