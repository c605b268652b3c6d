"""Measurements: `python -m bench.<name> [--quick] --json FILE` prints a table and writes JSON."""
