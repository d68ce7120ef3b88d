"""Make LAVIS 1.0.2 run with versions of transformers that are newer than it.

LAVIS was written for transformers 4.26. Later versions lack names that LAVIS imports, methods that
its models inherit, and the tying of weights that it relies on. `lent_names` lends the names while
LAVIS is imported, and `adopt` gives its models a base class with the rest. Nothing of transformers
is changed for others, and where nothing is missing nothing is done.
`deferred_modules` keeps LAVIS's import from importing what hardly anyone uses.
"""
