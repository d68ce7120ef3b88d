"""Building blocks of several families: tokenizers, ViT, prompts, beam search."""
