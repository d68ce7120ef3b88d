"""Scores of many pairs, re-ranking and heat maps."""
