"""Checkpoints in the forms that other programs read: LAVIS's own models and Hugging Face's."""
