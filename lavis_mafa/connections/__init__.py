"""Connections: hard negatives, Con-D's verdict on them, and what becomes of it (ECM)."""
