"""Dual encoders without fusion (FNE)."""
