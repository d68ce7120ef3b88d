"""Advice from a sample of a data set and a checkpoint; see `lavis_mafa.commands.advise`."""
