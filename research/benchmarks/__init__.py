"""Benchmarks behind the project's speed claims: every ratio compares two sides timed in the same
run."""
