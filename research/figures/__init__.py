"""Figures of ``docs/figures``, drawn from the recorded results: ``python -m research figures``."""
