"""`--device` of the commands that compute something."""

from __future__ import annotations

import torch
import typer


def check_device(name: str, what_runs: str | None = None) -> torch.device:
    """A device of this machine; "auto" is CUDA if there is one.

    Args:
        what_runs: begins the sentence that refuses other devices than CPU and CUDA, as "the demo
            runs"; None takes any.

    Raises:
        typer.BadParameter: torch knows no such device, it is refused, or there is none here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise typer.BadParameter(f"{name!r} is no device", param_hint="--device") from error
    if what_runs is not None and device.type not in ("cpu", "cuda"):
        raise typer.BadParameter(f"got {name}; {what_runs} on cpu and cuda", param_hint="--device")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise typer.BadParameter(f"got {name}; torch sees {count} such", param_hint="--device")
    return device
