"""The analysis as subcommands of ``lavis-mafa``: arguments and help texts.

These modules import neither torch nor LAVIS before `run`, so that ``--help`` is fast.
"""
