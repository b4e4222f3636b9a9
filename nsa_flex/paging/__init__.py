"""NSA over keys and values in pages that an engine hands out: continuous batching.

A page holds `page_size` neighbouring tokens of one layer, and next to their keys and values the
compressed rows whose last token is among them. A page is therefore whole in itself: an engine that
shares, copies, moves or drops pages does the same to the compressed rows without knowing of them.
"""

from nsa_flex.paging.attend import NewTokens, PagedLayer, attend
from nsa_flex.paging.batch import Length, PagedBatch
from nsa_flex.paging.pages import LayerPages, Slots, rows_per_page

__all__ = [
    "LayerPages",
    "Length",
    "NewTokens",
    "PagedBatch",
    "PagedLayer",
    "Slots",
    "attend",
    "rows_per_page",
]
