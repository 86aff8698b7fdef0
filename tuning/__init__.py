"""Choose Triton autotuning configs without a stopwatch."""
