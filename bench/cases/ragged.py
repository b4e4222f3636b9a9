"""Times the core on packed documents of different lengths, against equal documents as batch rows.

All lengths from a quarter to seven quarters of the mean are as likely; most are no multiple of a
block. Documents are aligned beforehand, as a model's layers find them, told the length of the
longest or not. Milliseconds of forward, and forward and backward, and what the packed row takes
for a token of a document over what the batch rows take for a token: slots that align documents
are no tokens. Some documents are held to the call on each alone, which the tests hold to float64.
bfloat16, head dim 128, mean compression, the paper's configuration.

Exit status: 0, or 1 if a result was wrong.

Example: python -m nsa_flex.bench.cases.ragged --out ragged.json
Example: python -m nsa_flex.bench.cases.ragged --heads 32/8 --documents 16 --out ragged.json
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nsa_flex import NSAConfig, nsa_attention
from nsa_flex.bench.cases.case import Case
from nsa_flex.bench.cases.core import Core
from nsa_flex.bench.cases.targets import Function, compiled, compress
from nsa_flex.bench.command_line import pair_of, row_parser
from nsa_flex.bench.measure.machine import device_name
from nsa_flex.bench.measure.timing import both_passes
from nsa_flex.bench.report.rows import Row, write_rows
from nsa_flex.documents import DocumentLayout, align_packed

CONFIG = NSAConfig()
MAX_ERROR = 2e-2  # of bfloat16, of the norm of a document's output
CHECKED = 3  # documents


def lengths_of(documents: int, tokens: int, seed: int) -> list[int]:
    """Tokens of each document, `tokens` in all."""
    generator = torch.Generator().manual_seed(seed)
    shares = 0.25 + 1.5 * torch.rand(documents, generator=generator, dtype=torch.float64)
    ends = (shares.cumsum(0) / shares.sum() * tokens).round().long()
    return ends.diff(prepend=ends.new_zeros(1)).tolist()


def inputs(heads: str, batch: int, tokens: int, device: torch.device) -> list[Tensor]:
    """Query, key, value (B, H, S, 128) and gates (B, Hq, S, 3) in (B, S, H, D) memory."""
    query_heads, kv_heads = pair_of(heads)
    case = Case("core", "nsa", False, tokens, batch, query_heads, kv_heads)
    return list(Core().prepare(case, device).arguments.values())


def core_of(layout: DocumentLayout | None) -> Function:
    """The core, on documents if there is a layout."""
    start = None if layout is None else layout.start
    longest = None if layout is None else layout.max_document_length

    def core(query: Tensor, key: Tensor, value: Tensor, gates: Tensor) -> Tensor:
        return nsa_attention(
            *(query, key, value, compress(key, CONFIG), compress(value, CONFIG), gates),
            config=CONFIG,
            document_start=start,
            max_document_length=longest,
        )

    return core


def error_of(core: Function, tensors: list[Tensor], layout: DocumentLayout, ends: Tensor) -> float:
    """Greatest relative distance of a document's output from that of the document alone."""
    with torch.no_grad():
        packed = layout.restore(core(*(layout.align(x) for x in tensors)))
        errors = []
        edges = [0, *ends.tolist()]
        for begin, end in list(itertools.pairwise(edges))[-CHECKED:]:
            want = core_of(None)(*(x[:, :, begin:end] for x in tensors)).float()
            errors.append((packed[:, :, begin:end].float() - want).norm() / want.norm())
    return float(torch.stack(errors).max())


def row_of(
    heads: str, documents: int, tokens: int, told: bool, device: torch.device, options: Any
) -> Row:
    """One packed row, measured."""
    lengths = lengths_of(documents, tokens, options.seed)
    ends = torch.tensor(lengths).cumsum(0)
    cu = torch.cat([ends.new_zeros(1), ends]).to(device, torch.int32)
    layout = align_packed(cu, tokens, CONFIG, max(lengths) if told else None)
    tensors = inputs(heads, 1, tokens, device)
    core = compiled(core_of(layout), options.compiler)
    error = error_of(core, tensors, layout, ends)
    found = both_passes(core, [layout.align(x) for x in tensors], options.milliseconds)
    return {
        "heads": heads,
        "documents": documents,
        "tokens": tokens,
        "shortest": min(lengths),
        "longest": max(lengths),
        "told": told,
        "slots": layout.source.shape[1],
        **found,
        "error": round(error, 5),
        "status": "ok" if error < MAX_ERROR else "failed",
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write rows, and say whether all were right."""
    parser = row_parser(__doc__, "64/4", "32/8", "16/16")
    parser.add_argument("--documents", nargs="+", type=int, default=[8, 16, 64])
    parser.add_argument("--tokens", type=int, default=65536, help="of all documents together")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--compiler", default="inductor", help="backend of torch.compile")
    parser.add_argument("--milliseconds", type=float, default=300, help="of each measurement")
    parser.add_argument("--seed", type=int, default=0, help="of lengths and inputs")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    about = {"device": device_name(device), "torch": torch.__version__}
    torch.manual_seed(options.seed)
    rows: list[Row] = []
    for heads, documents in itertools.product(options.heads, options.documents):
        torch.compiler.reset()
        batch = inputs(heads, documents, options.tokens // documents, device)
        equal = both_passes(compiled(core_of(None), options.compiler), batch, options.milliseconds)
        for told in (False, True):
            torch.compiler.reset()
            row = row_of(heads, documents, options.tokens, told, device, options)
            for each in ("forward", "forward_backward"):
                of_rows = equal[f"{each}_ms"]
                row[f"{each}_batch_rows_ms"] = of_rows
                row[f"{each}_over_batch_rows"] = round(row[f"{each}_ms"] / of_rows, 3)
            rows.append(about | row)
            write_rows(options.out, rows)
            print(json.dumps(rows[-1]), flush=True)
    return int(any(row["status"] != "ok" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
