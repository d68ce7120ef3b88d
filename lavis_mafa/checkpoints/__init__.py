"""Export checkpoints of BLIP and BLIP-2 to the format of Hugging Face transformers."""
