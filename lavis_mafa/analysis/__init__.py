"""Analyse datasets and runs: count, mine, measure and show false negatives."""
