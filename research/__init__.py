"""Studies, measurements and figures behind the documentation; not part of the installed package.

    python -m research --help

Nothing in ``lavis_mafa`` imports it, but for the command ``lavis-mafa demo`` of a checkout.
"""

# Before LAVIS: it imports names that the newest transformers lack, and this package lends them.
import lavis_mafa  # noqa: F401
