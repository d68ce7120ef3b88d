"""What the project's speed claims rest on: each figure is a ratio, both sides timed in one run."""
