"""Names that the command line and the search of the whole data set share; imports nothing."""

ALL = "all"  # search space: the whole data set
EXACT, FAISS = "exact", "faiss"  # ways to search it
PROBES = 32  # lists of the index that a query reads, by default
