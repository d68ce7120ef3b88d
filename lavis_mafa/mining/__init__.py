"""Analyses of a data set with a model and discriminators: count, mine, label, report."""

ALL = "all"  # search space: the whole data set
