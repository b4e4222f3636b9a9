"""What to do about each kind of finding."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

from nsa_flex.auditing.report import AuditFinding
from nsa_flex.auditing.sources import place_of, syntax_tree

_STAY = "keep it a tensor: operations take 0-d tensors; log values after the step"
_PAD = "keep shapes static: torch.where, masked_fill, or topk with a fixed k"

# (part of the finding's text, mend); the first that occurs counts.
_MENDS = (
    ("data-dependent branching", "compute both sides and choose by torch.where, or torch.cond"),
    ("bool(tensor)", "compute both sides and choose by torch.where, or torch.cond"),
    ("repeat_interleave", "pass output_size, known when the batch is made"),
    ("print", "print outside of what is compiled, every n-th step, from a detached copy"),
    ("formatting", "format outside of what is compiled, every n-th step"),
    ("tolist", "hand Python numbers in as arguments, from where they are known without a tensor"),
    ("item", _STAY + "; a length such as max_seqlen is known when the batch is made: pass it in"),
    ("int(tensor)", _STAY),
    ("float(tensor)", _STAY),
    ("Python index", "index with the tensor itself, or by torch.gather"),
    ("value in tensor", "(tensor == value).any(), which stays a tensor"),
    (".cpu()", "stay on the device; copy results after the step, non_blocking into pinned memory"),
    ("numpy", "use torch operations; convert after the step"),
    ("unique", "keep duplicates and mask them, or make the table when the batch is made"),
    ("nonzero", _PAD),
    ("mask", _PAD),
    ("masked_select", _PAD),
    ("bincount", "scatter_add_ into a tensor of fixed length"),
    ("dynamic shape", _PAD),
    ("from the host", "make it once, with the module or the batch: a buffer, or an argument"),
    ("from cpu to cuda", "make the tensor on the device, or copy non_blocking from pinned memory"),
    ("to cpu", "copy after the step, non_blocking into pinned memory"),
    ("synchron", "leave out the synchronisation, or do it outside of the step"),
    ("equal", "torch.eq, which stays a tensor"),
    ("Skipped function", "mark it as a custom operator (torch.library.custom_op), or rewrite it"),
    ("graph_break", "remove the call of torch._dynamo.graph_break"),
    ("local_scalar", _STAY),
)

_OF_KIND = {
    "host-sync": _STAY,
    "error": "call it yourself with this batch, then audit again",
    "data-dependent": _PAD,
    "device-copy": "make the tensor where it is used",
    "cuda-sync": "look at the line with torch.cuda.set_sync_debug_mode('error')",
    "meta-run": "make shapes depend on shapes only; give new tensors the device of an input",
    "cache-copy": "a static cache takes new tokens in place, by index_copy_; attention of grouped "
    "heads (enable_gqa) reads keys without repeating them",
    "cudagraph-skip": "see the reason; inputs must keep their addresses and live on the device",
}


def mend_of(kind: str, text: str) -> str:
    """A sentence, or torch's own first hint, or nothing.

    >>> mend_of("host-sync", "bool(tensor)")
    'compute both sides and choose by torch.where, or torch.cond'
    """
    if kind == "cache-copy":  # what its text says is an operator's name
        return _OF_KIND[kind]
    for part, mend in _MENDS:
        if part in text:
            return mend
    hints = [line.strip() for line in text.splitlines() if line.strip().startswith("Hint: ")]
    return hints[0].removeprefix("Hint: ") if hints else _OF_KIND.get(kind, "")


_GROUPED = "_grouped_mm_fallback"
_OF_EXPERTS = {
    "grouped": "under torch.compile transformers takes torch's grouped_mm for bfloat16 weights "
    "alone: compile in bfloat16, or call model.set_experts_implementation('batched_mm')",
    "loop": "call model.set_experts_implementation('grouped_mm'), or 'batched_mm'",
}


def marked(finding: AuditFinding) -> AuditFinding:
    """The finding; one inside a loop over experts with that in its message, and another mend."""
    fallback = _fallback_at(finding.location)
    if fallback is None:
        return finding
    message = f"{finding.message} (fallback of transformers: a loop over experts)"
    return replace(finding, message=message, mend=_OF_EXPERTS[fallback])


def _fallback_at(location: str) -> str | None:
    file, line, function = place_of(location)
    if "transformers" not in Path(file).parts:
        return None
    if function.startswith(_GROUPED):
        return "grouped"
    tree = syntax_tree(file)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)] if tree else []
    inside = (c.name for c in classes if c.lineno <= line <= (c.end_lineno or line))
    return "loop" if any(name.endswith("Experts") for name in inside) else None
