"""Text as it is written, and how fast."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Stream:
    """What `generate` tells of each token: a streamer of transformers.

    Args:
        decode: from token ids, and whether they are the last, to the characters they complete.
        write: gets each piece of text.
        stop: ids that end a text, and are no part of it.
    """

    decode: Callable[[list[int], bool], str]
    write: Callable[[str], None]
    stop: frozenset[int] = frozenset()
    ids: list[int] = field(default_factory=list)
    text: str = ""
    times: list[float] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)
    _prompt_seen: bool = False

    def put(self, tokens: Tensor) -> None:
        """The prompt first, then each new token."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        new = tokens.flatten().tolist()
        self.times += [time.perf_counter()] * len(new)
        self.ids += new
        self._tell(self.decode([token for token in new if token not in self.stop], False))

    def end(self) -> None:
        """A character that was begun is all that may be left."""
        self._tell(self.decode([], True))

    def _tell(self, piece: str) -> None:
        self.text += piece
        self.write(piece)

    @property
    def seconds_to_first(self) -> float | None:
        """From the call to the first new token."""
        return self.times[0] - self.started if self.times else None

    @property
    def tokens_per_second(self) -> float | None:
        """After the first new token; None if there is no other."""
        if len(self.times) < 2 or self.times[-1] == self.times[0]:
            return None
        return (len(self.times) - 1) / (self.times[-1] - self.times[0])
