"""Times the core with and without the kernels for Hopper and the packed launcher.

As a version of Triton that nsa_flex does not know switches them off; both in one process, in
turn. bfloat16, batch 1, head dim 128, the paper's configuration. Rows of JSON: milliseconds of the
device, kernels back to back, and until the result of one call is there, from an idle device.

Example: python -m nsa_flex.bench.cases.hopper_off --out bench/results/hopper_off_h100.json
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from nsa_flex import NSAConfig, nsa_attention
from nsa_flex.bench.cases.host_time import CONFIG, WARM_UP, make
from nsa_flex.bench.command_line import row_parser
from nsa_flex.bench.measure.machine import describe
from nsa_flex.bench.measure.timing import Call, milliseconds
from nsa_flex.fallback_kernels.common import arch
from nsa_flex.fallback_kernels.launch import plans

BUDGET_MS = 2000.0


@contextmanager
def off() -> Iterator[None]:
    """Within, the version of Triton is one that nsa_flex does not know."""
    known, arch.TRITON_VERSIONS = arch.TRITON_VERSIONS, ("0.0.",)
    _forget()
    try:
        yield
    finally:
        arch.TRITON_VERSIONS = known
        _forget()


def _forget() -> None:
    arch.forget_answers()
    plans.forget_plans()


def calls_of(leaves: list[Tensor], config: NSAConfig = CONFIG) -> dict[str, Call]:
    """A forward without gradients, and one with its backward."""
    grad = torch.ones_like(leaves[0])

    def forward() -> Any:
        with torch.no_grad():
            return nsa_attention(*leaves, config=config)

    def forward_backward() -> Any:
        return torch.autograd.grad(nsa_attention(*leaves, config=config), leaves, grad)

    return {"forward": forward, "forward_backward": forward_backward}


def rows_of(heads: str, tokens: int, device: torch.device) -> list[dict[str, Any]]:
    """Two rows, with the kernels for Hopper and without."""
    leaves, rows = make(heads, tokens, device.type), []
    for hopper in (True, False):
        row: dict[str, Any] = {"heads": heads, "tokens": tokens, "hopper": hopper}
        with nullcontext() if hopper else off():
            for name, call in calls_of(leaves).items():
                for _ in range(WARM_UP):
                    call()
                row |= milliseconds(name, call, device, BUDGET_MS)
        rows.append(row)
    return rows


def main() -> None:
    parser = row_parser(__doc__, "64/4", "32/8")
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048, 65536])
    arguments = parser.parse_args()
    device = torch.device("cuda")
    found: list[Any] = []
    for shape in itertools.product(arguments.heads, arguments.tokens):
        found += rows_of(*shape, device)
        print(json.dumps(found[-2:]))
    about = str(__doc__).partition("Rows of")[0]
    head = json.dumps({"about": about, **describe(device)})[:-1]
    lines = ",\n".join(json.dumps(row) for row in found)
    arguments.out.write_text(f'{head}, "rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
