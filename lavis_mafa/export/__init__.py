"""Export checkpoints to the formats of other programs: LAVIS's own models and Hugging Face's."""
