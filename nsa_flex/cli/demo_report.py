"""What the demo leaves behind: its verdict, a JSON report and a picture of the losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# The held-out loss of an untrained model falls by this share at least, or something is wrong.
VISIBLE_FALL = 0.1


def verdict(report: dict[str, Any]) -> list[str]:
    """What is wrong, in sentences; empty if the demo shows what it promises."""
    wrong = []
    for name, losses in report["losses"].items():
        before, after = losses["held_out_before"], losses["held_out_after"]
        # Written so that NaN counts as wrong.
        if not after <= (1 - VISIBLE_FALL) * before:
            wrong.append(
                f"the held-out loss of {name} did not fall visibly ({before:.3f} before, "
                f"{after:.3f} after {report['sizes']['steps']} steps; raise --steps)"
            )
    count = len(report["audit"]["findings"])
    if count:
        wrong.append(f"the audit found {count} thing{'s' if count > 1 else ''} (listed above)")
    return wrong


def draw_losses(losses: dict[str, dict[str, Any]], path: Path) -> None:
    """PNG of training and held-out loss of each model against the step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for color, (name, each) in zip(("tab:blue", "tab:orange"), losses.items(), strict=True):
        steps = range(1, len(each["training"]) + 1)
        axes.plot(steps, each["training"], color=color, alpha=0.3, linewidth=0.8)
        held_out = each["held_out"]
        axes.plot(
            [int(step) for step in held_out],
            list(held_out.values()),
            "o-",
            color=color,
            label=f"{name}, held out",
        )
    axes.set_xlabel("training step")
    axes.set_ylabel("loss, nats a byte")
    axes.set_title("Python's standard library, byte by byte (thin: training loss)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
