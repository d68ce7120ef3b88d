"""Measure Con-D's accuracy against ground truth, human labels and another Con-D."""
