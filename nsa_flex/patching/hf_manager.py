"""transformers' manager of continuous batching, for a patched model."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from transformers.generation.continuous_batching.continuous_api import (
    ContinuousBatchingManager,
)
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.generation.continuous_batching.utils import (
    find_head_dim,
    find_num_key_value_heads,
)

from nsa_flex.patching import hf_pages  # noqa: F401 -- registers NSA's pages
from nsa_flex.patching.hf_layers import IMPLEMENTATION, PAGED_IMPLEMENTATION
from nsa_flex.patching.layer import NSALayer

MAX_TABLE_WIDTH = 4096  # pages of a request; longer ones take another path of the engine


def check_heads(model: Any) -> None:
    """That the engine, which reads the config, plans for the heads that the layers have.

    Raises:
        ValueError: a family whose config counts its key-value heads otherwise.
    """
    config = model.config.get_text_config()
    planned = find_num_key_value_heads(config), find_head_dim(config)
    for name, module in model.named_modules():
        if isinstance(module, NSALayer):
            found = module.shape.num_kv_heads, module.shape.head_dim
            if planned != found:
                raise ValueError(
                    f"the engine plans pages for {planned[0]} key-value heads of {planned[1]} "
                    f"dimensions, and {name} has {found[0]} of {found[1]}: use generate()"
                )


class NSAManager(ContinuousBatchingManager):
    """Runs the engine with NSA's pages. Made by `model.init_continuous_batching`."""

    batch_processor: Any

    def __init__(self, model: Any, generation: Any, batching: Any, hints: Any) -> None:
        table_width = batching.max_blocks_per_request
        if table_width is None:
            table_width = _table_width(model, batching.page_size)
        # The engine gives tables to FlashAttention's kernels alone: it is asked afterwards.
        batching.max_blocks_per_request = 0
        super().__init__(model, generation, batching, hints)
        self.continuous_batching_config.max_blocks_per_request = table_width

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """Name NSA's attention as one that the engine needs no masks for; until `stop`."""
        model.config.get_text_config()._attn_implementation_internal = PAGED_IMPLEMENTATION

    def start(self) -> None:
        """Start the engine; what cannot be set up raises here, not in its thread."""
        if self.batch_processor is None:
            self.batch_processor = self._create_batch_processor()
        super().start()

    def stop(self, *args: Any, **kwargs: Any) -> None:
        """Stop the engine, and give NSA's attention its usual name again."""
        super().stop(*args, **kwargs)
        self.model.config.get_text_config()._attn_implementation_internal = IMPLEMENTATION

    def max_request_tokens(self) -> int:
        """Tokens that one request can have in all, by the cache and by the model."""
        return min(limit for _, limit in self._limits())

    def _limits(self) -> list[tuple[str, int]]:
        processor, config = self.batch_processor, self.model.config.get_text_config()
        limits = [("the cache", processor.cache.max_tokens_read)]
        positions = getattr(config, "max_position_embeddings", None)
        return limits if positions is None else [*limits, ("max_position_embeddings", positions)]

    def _create_batch_processor(self) -> Any:
        self.batch_processor = super()._create_batch_processor()
        for pages in self.batch_processor.cache.cache_allocators.values():
            # The processor drops its inputs, and the graphs in them, before its cache.
            pages.batches = weakref.ref(self.batch_processor.inputs_and_outputs)
        inputs, runner = self.batch_processor.inputs_and_outputs, self.batch_processor.model_runner
        if type(inputs) is ContinuousBatchingIOs and inputs.compute_stream is not None:
            runner.compute_batch = functools.partial(
                _in_order, runner.compute_batch, inputs.compute_stream
            )
        scheduler = self.batch_processor.scheduler
        add = type(scheduler).add_waiting_request
        scheduler.add_waiting_request = functools.partial(_add, scheduler, add, self._limits())
        return self.batch_processor


def _in_order(compute: Any, stream: Any, *args: Any) -> None:
    """Compute a batch after what was written for it, and before what is written for the next.

    Without asynchronous batching the engine (transformers 5.23) writes a batch's inputs on the
    current stream and computes on another one, which does not wait.
    """
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    compute(*args)
    current.wait_stream(stream)


def _table_width(model: Any, page_size: int) -> int:
    """Pages of the longest request that the model is made for, within reason."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return min(MAX_TABLE_WIDTH, -(-(positions or MAX_TABLE_WIDTH) // page_size))


def _add(scheduler: Any, add: Any, limits: list[tuple[str, int]], state: Any) -> None:
    """Queue a request, unless it could never be finished: that would stop the engine for all.

    Raises:
        ValueError: its prompt and the tokens it asks for are too many. The engine fails this
            request with the message, and goes on.
    """
    prompt, new = len(state.initial_tokens), state.max_new_tokens or 0
    for name, limit in limits:
        if prompt + new - 1 > limit:
            raise ValueError(
                f"a prompt of {prompt} tokens with max_new_tokens={new} does not fit into {limit} "
                f"tokens ({name}): shorten the prompt or ask for fewer tokens"
            )
    add(scheduler, state)
