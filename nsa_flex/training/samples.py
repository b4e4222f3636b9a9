"""What the model writes at evaluations, for samples.jsonl."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from nsa_flex.training.packing import Row
from nsa_flex.training.telemetry.callback import TelemetryCallback
from nsa_flex.training.tokenization import Tokenizer, plain_ids
from nsa_flex.training.trainer import Trainer

PROMPT_TOKENS = 32


class SampleCallback(TrainerCallback):
    """Goes on from the start of a held-out row, always with the likeliest token.

    Args:
        trainer: whose model writes, as it trains: under autocast, sharded or not.
        telemetry: writes the row.
        row: the held-out one; the prompt is its first `PROMPT_TOKENS` tokens.
        num_tokens: at most so many new ones, and no more than the model has positions for.
    """

    def __init__(
        self,
        trainer: Trainer,
        telemetry: TelemetryCallback,
        tokenizer: Tokenizer,
        row: Row,
        num_tokens: int,
    ) -> None:
        self.trainer, self.telemetry, self.tokenizer = trainer, telemetry, tokenizer
        self.prompt = plain_ids(row.ids[: min(PROMPT_TOKENS, row.real)])
        self.num_tokens = num_tokens

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Rank 0 writes; of a sharded model every rank computes the same."""
        if not (state.is_world_process_zero or self.trainer.is_fsdp_enabled):
            return
        prompt = torch.from_numpy(self.prompt)[None].to(args.device)
        new = self._written(prompt)
        if self.telemetry.session is not None:
            decode = self.tokenizer.decode
            self.telemetry.session.sample(decode(self.prompt.tolist()), decode(new))

    def _written(self, prompt: Tensor) -> list[int]:
        """Without a cache, through the modules that train."""
        model: Any = self.trainer.accelerator.unwrap_model(
            self.trainer.model, keep_torch_compile=False
        )
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", math.inf)
        room = positions - prompt.shape[1] + 1  # the last new token is not read
        with torch.no_grad(), self.trainer.compute_loss_context_manager():
            ids = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=min(self.num_tokens, room),
                do_sample=False,
                use_cache=False,
                pad_token_id=self.tokenizer.end,
            )
        return ids[0, prompt.shape[1] :].tolist()
