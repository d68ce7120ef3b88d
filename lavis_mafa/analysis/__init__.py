"""What is in the data and in a run: counting, mining, measuring, showing."""
