"""Files, checksums, identities of folders, processes and checkpoints."""
