"""One module a backend; each offers some of `compressed`, `selected` and `sliding`.

Every function takes a `Branch` and returns `(output, lse)`: output (B, Hq, Sq, Dv) in the query's
dtype, natural log-sum-exp float32 (B, Hq, Sq) or None where it was not asked for. A query that
sees nothing gets output 0 and -inf.
"""
