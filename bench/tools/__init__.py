"""Commands beside the benchmark: the sanitizer, summaries, recordings."""
