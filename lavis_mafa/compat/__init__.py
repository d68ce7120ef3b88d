"""Make LAVIS 1.0.2 run with newer versions of transformers.

LAVIS was written for transformers 4.26. Later versions lack names that LAVIS imports, methods that
its models inherit, and the tying of weights that it relies on. `lent_names` lends the names while
LAVIS is imported, and `adopt` gives its models a base class with the rest. transformers itself
stays unchanged for other code, and nothing is done if nothing is missing. `deferred_modules` keeps
LAVIS from importing modules that are hardly ever used.
"""
