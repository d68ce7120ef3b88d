"""Losses and labels, pure functions on tensors."""
