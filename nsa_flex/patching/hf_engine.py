"""transformers' engine of continuous batching, with pages that hold NSA's compressed rows too.

The engine asks an allocator, by the type of a layer's attention, how many bytes a page takes and
where its tokens lie. For a patched model that allocator is `NSAPages`, so that what the engine
plans memory for, shares between requests, copies for forks and moves to the host are whole pages.
Importing this module registers it. Models that are not patched get transformers' allocator.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.generation.continuous_batching.cache import ATTN_TYPE_TO_ALLOCATOR
from transformers.generation.continuous_batching.cache_allocators import (
    FullAttentionCacheAllocator,
)
from transformers.generation.continuous_batching.continuous_api import (
    ContinuousBatchingManager,
)
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.generation.continuous_batching.utils import (
    find_head_dim,
    find_num_key_value_heads,
)

from nsa_flex.config import NSAConfig
from nsa_flex.paging import LayerPages, Length, rows_per_page
from nsa_flex.patching.hf_layers import IMPLEMENTATION, IMPLEMENTATIONS, PAGED_IMPLEMENTATION
from nsa_flex.patching.layer import NSALayer


class NSAPages(FullAttentionCacheAllocator):
    """The pages of all layers of a patched model.

    Attributes:
        layers: by layer index, its `LayerPages`.
        batches: gives the inputs of the engine, which know the requests of a batch; its manager
            sets it.
    """

    def __init__(self, *, config: Any, page_size: int, layer_indices: list[int], **kwargs: Any):
        super().__init__(config=config, page_size=page_size, layer_indices=layer_indices, **kwargs)
        self.nsa = NSAConfig.from_dict(config.nsa_flex["config"])
        self.rows_of_page = rows_per_page(page_size, self.nsa)
        self.bytes_per_page = (
            self.rows_of_page * self.num_key_value_heads * self.head_dim
        ) * self.cache_dtype.itemsize
        self.bytes_per_block = self.bytes_per_page * self.pages_per_block
        # From a token's place in one block to the same in the next.
        self.block_physical_stride = self.rows_of_page * self.pages_per_block
        self.layers: dict[int, LayerPages] = {}
        self.batches: Callable[[], Any] | None = None

    def register_cache_tensor(
        self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: Tensor, pool: Any
    ) -> None:
        """Carve the pages of each layer out of the engine's memory."""
        self.bytes_per_sector = bytes_per_sector
        self._copy_view = cache_tensor.view(-1, self.bytes_per_block)
        rows = cache_tensor.view(self.cache_dtype).view(
            -1, self.num_key_value_heads, self.head_dim
        )
        self._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, rows, pool)
        for index, layer_idx in enumerate(self.layer_indices):
            first = index * self.rows_of_page
            self.layers[layer_idx] = LayerPages.carve(
                rows, first, self.block_physical_stride, self.tokens_per_page, self.nsa
            )

    def lengths(self) -> tuple[Length, ...]:
        """Of each request of the batch that was prepared last, as the host knows them."""
        assert self.batches is not None
        batches = self.batches()
        if hasattr(batches, "io_pairs"):  # one is prepared while another runs
            batches = batches.io_pairs[batches.current_pair].host_io
        return tuple(
            Length(request.state.position_offset - request.query_length, request.query_length)
            for request in batches.requests_in_batch
        )

    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """The request's blocks in order: one number a page, where others read one a token."""
        num_pages = -(-(past_length + query_length) // self.tokens_per_page)
        return self.block_table[request_id][:num_pages]

    def fill_block_table(
        self, request_id: str, past_length: int, query_length: int, block_table: Tensor
    ) -> None:
        """Write the request's blocks into its row of the table, as their numbers."""
        blocks = torch.tensor(self.block_table[request_id], dtype=block_table.dtype)
        block_table[: len(blocks)].copy_(blocks, non_blocking=True)

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refused: it gathers all tokens of all requests."""
        raise ValueError(
            "NSA reads its pages by itself: an attention layer that is not patched cannot run in "
            "the continuous batching of a patched model"
        )

    def get_cache_for_block_table(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Refused, likewise."""
        return self.update()


class _FullAttention(FullAttentionCacheAllocator):
    """What the engine makes for full attention: by the model's config, NSA's pages or its own."""

    def __new__(cls, *, config: Any, **kwargs: Any) -> Any:
        runs_nsa = config._attn_implementation in IMPLEMENTATIONS
        kind = NSAPages if runs_nsa else FullAttentionCacheAllocator
        return kind(config=config, **kwargs)


ATTN_TYPE_TO_ALLOCATOR[FullAttentionCacheAllocator.layer_type] = _FullAttention


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

    runs_nsa = True
    batch_processor: Any

    def __init__(self, model: Any, generation: Any, batching: Any, hints: Any) -> None:
        table_width = batching.max_blocks_per_request
        if table_width is None:
            table_width = _table_width(model, batching.page_size)
        # The engine gives tables to FlashAttention's kernels alone: it is asked afterwards.
        batching.max_blocks_per_request = 0
        try:
            super().__init__(model, generation, batching, hints)
        except Exception:
            _switch_back(model)
            raise
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
        _switch_back(self.model)

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
        stream = inputs.compute_stream
        if stream is not None:
            # The engine (transformers 5.23) has just cleared its inputs on the current stream, for
            # which those that write and read them do not wait.
            torch.cuda.current_stream(stream.device).synchronize()
            if type(inputs) is ContinuousBatchingIOs:
                compute = functools.partial(type(runner).compute_batch, runner)
                runner.compute_batch = functools.partial(_in_order, compute, stream)
        scheduler = self.batch_processor.scheduler
        add = type(scheduler).add_waiting_request
        scheduler.add_waiting_request = functools.partial(_add, scheduler, add, self._limits())
        return self.batch_processor


def _switch_back(model: Any) -> None:
    """NSA's usual name, unless the model was unpatched or runs another attention by now."""
    config = model.config.get_text_config()
    if config._attn_implementation == PAGED_IMPLEMENTATION:
        config._attn_implementation_internal = IMPLEMENTATION


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
