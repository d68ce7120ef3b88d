"""Everything that can be Con-D, and its self-check."""
