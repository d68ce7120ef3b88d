"""ALBEF's downstream tasks."""
