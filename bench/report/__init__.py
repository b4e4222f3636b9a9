"""What becomes of rows: files, tables, comparisons, plots."""
