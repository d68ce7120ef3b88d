"""Subcommands of ``lavis-mafa`` that no other room holds; `lavis_mafa.cli` lists all of them."""
