"""Retrieval: scores by ITC and ITM re-ranking, and recall against pairs or full truth."""
