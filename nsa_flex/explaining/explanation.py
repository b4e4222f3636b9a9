"""What `explain` returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from nsa_flex.dispatch import BranchName, Choice

if TYPE_CHECKING:
    from nsa_flex.fallback_kernels.fused.route import Route
    from nsa_flex.parallel.sent import SentBytes


class KernelRun(NamedTuple):
    """A Triton kernel of nsa_flex, and how many times one call launches it.

    name: as profilers show it. stage: its folder in `fallback_kernels`.
    """

    name: str
    stage: str
    launches: int


@dataclass(frozen=True)
class Kernels:
    """The Triton kernels of nsa_flex that a call launches, each where it first does.

    Kernels of cuDNN, FlexAttention and PyTorch run besides: the backends of the branches say so.

    route: of the core operator; None where the branches run one by one.
    passed_over: what was asked and could not run, and why: "topk: the Gluon kernels need ...".
    """

    forward: tuple[KernelRun, ...] = ()
    backward: tuple[KernelRun, ...] = ()
    passed_over: tuple[str, ...] = ()
    route: Route | None = None

    @property
    def names(self) -> frozenset[str]:
        """Names of the kernels of forward and backward."""
        return frozenset(run.name for run in (*self.forward, *self.backward))

    def __str__(self) -> str:
        lines = [] if self.route is None else str(self.route).splitlines()
        for phase, runs in (("forward", self.forward), ("backward", self.backward)):
            lines += [f"kernels of the {phase}:"] if runs else []
            lines += [f"  {run.stage:<10} {run.name} x{run.launches}" for run in runs]
        lines += ["passed over:"] if self.passed_over else []
        return "\n".join([*lines, *(f"  {line}" for line in self.passed_over)])


@dataclass(frozen=True)
class Explanation:
    """Which backend takes each branch and why, and the kernels; prints as a table.

    ranks: that share the tokens of each row. sent: bytes that each of them sends in the call.
    """

    choices: dict[BranchName, Choice]
    find_kernels: Callable[[], Kernels] = field(default=Kernels, repr=False, compare=False)
    ranks: int = 1
    sent: SentBytes | None = None

    @cached_property
    def kernels(self) -> Kernels:
        """Looked for when first asked for, which takes a second or so; none but on CUDA."""
        return self.find_kernels()

    def __getitem__(self, branch: BranchName) -> Choice:
        return self.choices[branch]

    def __str__(self) -> str:
        lines = [str(choice) for choice in self.choices.values()]
        if self.sent is not None:
            lines.append(
                f"{self.ranks} ranks share each row; each sends {self.sent.forward / 1e9:.3g} GB "
                f"forward, {self.sent.backward / 1e9:.3g} GB backward"
            )
        return "\n".join([*lines, *filter(None, [str(self.kernels)])])

    def to_dict(self) -> dict[str, Any]:
        """JSON-able: branch -> backend and reason; kernels of each phase; what was passed over."""
        kernels = self.kernels
        shared = {"ranks": self.ranks, "sent": self.sent._asdict()} if self.sent else {}
        return {
            **shared,
            **{n: {"backend": c.backend, "reason": c.reason} for n, c in self.choices.items()},
            "forward": [run._asdict() for run in kernels.forward],
            "backward": [run._asdict() for run in kernels.backward],
            "passed_over": list(kernels.passed_over),
            "route": None if kernels.route is None else asdict(kernels.route),
        }
