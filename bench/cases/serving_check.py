"""Whether tokens that an engine gave are those of the model by itself."""

from __future__ import annotations

from typing import Any

import torch

from nsa_flex.bench.cases.serving_engine import Prompt
from nsa_flex.bench.report.rows import Row

# In standard deviations of the logits. Rounding to bfloat16 moves logits by some hundredths; a
# token that has nothing to do with the model lies as far below the best as that from the mean.
MAX_GAP = 0.25


@torch.no_grad()
def check_tokens(
    model: Any, prompts: list[Prompt], tokens: list[list[int]], *, exact: bool = False
) -> Row:
    """Columns of a row: how the engine's tokens compare with two other ways to them.

    With `generate`, token by token: equal in exact arithmetic, while rounding may decide between
    two of the best, after which texts differ. And with one forward pass over prompt and tokens,
    which tells for each token how far below the best it was.

    Raises:
        RuntimeError: a token was further below the best one than rounding explains; or, if
            `exact`, some are not those of `generate`.
    """
    equal, in_common, all_gaps = 0, 0, []
    for prompt, found in zip(prompts, tokens, strict=True):
        expected = _generated(model, prompt, len(found))
        equal += expected == found
        in_common += _common(expected, found)
        all_gaps += _gaps(model, prompt, found)
    worst = max(all_gaps, default=0.0)
    if not all(gap < MAX_GAP for gap in all_gaps):  # NaN is not
        raise RuntimeError(f"a token is {worst:.3f} standard deviations below the best one")
    if exact and equal < len(tokens):
        raise RuntimeError(f"{equal} of {len(tokens)} requests have the tokens of generate")
    return {
        "requests_checked": len(tokens),
        "requests_equal_to_generate": equal,
        "tokens_until_generate_differs": in_common,
        "tokens_checked": len(all_gaps),
        "tokens_best": sum(gap == 0 for gap in all_gaps),
        "worst_gap": round(worst, 4),
    }


def _generated(model: Any, prompt: Prompt, num_new: int) -> list[int]:
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(ids, max_new_tokens=num_new, do_sample=False)
    return out[0, len(prompt) :].tolist()


def _common(one: list[int], other: list[int]) -> int:
    """Tokens until the first that differs."""
    for place, (a, b) in enumerate(zip(one, other, strict=True)):
        if a != b:
            return place
    return len(one)


def _gaps(model: Any, prompt: Prompt, tokens: list[int]) -> list[float]:
    """How far each token's logit was below the greatest, in standard deviations of the logits."""
    ids = torch.tensor([prompt + tokens[:-1]], device=model.device)
    logits = model(ids, use_cache=False, logits_to_keep=len(tokens)).logits[0].float()
    chosen = logits.gather(1, torch.tensor(tokens, device=model.device)[:, None])[:, 0]
    return ((logits.amax(1) - chosen) / logits.std(1)).tolist()
