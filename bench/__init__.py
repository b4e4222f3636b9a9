"""Benchmarks: one registry of cases, one runner, rows of JSON.

The folder is the subpackage `nsa_flex.bench`, so that `nsa-flex bench` works from a wheel too.
`case` says what can be measured, `targets` computes it, `runner` measures, `rows` keeps what was
measured, `compare`, `table` and `plots` show it.
"""
