"""Sequences whose tokens are shared out over ranks: who has which, and attention over all."""

from nsa_flex.parallel.attention import context_parallel_attention
from nsa_flex.parallel.batch import last_tokens, shard_batch, shard_sequence
from nsa_flex.parallel.cache import ShardedCache
from nsa_flex.parallel.sent import exchanged_bytes, sent_bytes
from nsa_flex.parallel.shards import SequenceShards

__all__ = [
    "SequenceShards",
    "ShardedCache",
    "context_parallel_attention",
    "exchanged_bytes",
    "last_tokens",
    "sent_bytes",
    "shard_batch",
    "shard_sequence",
]
