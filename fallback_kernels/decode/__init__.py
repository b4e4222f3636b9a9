"""One decode step: append, compress, select, attend, combine."""
