"""What the commands count, mine, label, features and report do; nothing is trained."""

ALL = "all"  # search space: the whole data set
