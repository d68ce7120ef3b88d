"""Studies, measurements and figures behind the documentation; not part of the installed package.

    python -m research --help

In ``lavis_mafa``, only the command ``lavis-mafa demo`` imports it, in a clone.
"""

# Before LAVIS, which imports names that this package provides if transformers lacks them.
import lavis_mafa  # noqa: F401
