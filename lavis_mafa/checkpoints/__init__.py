"""Checkpoints: read, rename and resize; to and from Hugging Face."""
