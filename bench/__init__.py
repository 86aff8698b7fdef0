"""Benchmarks of this library: ``python -m bench CASE``; see ``bench/README.md`` for the method."""
