"""The subcommands of ``lavis-mafa``; `lavis_mafa.cli` lists them."""
