"""Inference: match scores of many pairs, retrieval with re-ranking, and heat maps."""
