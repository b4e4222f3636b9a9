"""Quality of what is trained: NSA's variants beside dense attention at equal tokens.

    python -m nsa_flex.bench.quality.build --out corpus
    python -m nsa_flex.bench.quality.run --corpus corpus --out rows.json
    python -m nsa_flex.bench.quality.report rows.json --out bench/results/quality.json

`build` makes the corpus of packages, `run` trains and evaluates with `nsa-flex train`, two runs
side by side, and `report` makes a table and a plot of the rows. `recall` and `recall_report` do
the same for generated rows that ask for what stands far back. `conversion` trains a dense model
and measures what `nsa-flex convert` makes of it.
"""
