"""BLIP-2, stage 1 and stage 2."""
