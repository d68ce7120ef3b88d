"""Check that an exported folder gives the same outputs as the LAVIS model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lavis_mafa.export.source import language_model
from lavis_mafa.models.families.base import image_size_of

# Relative to the largest output of a kind; the float32 noise of a deep model is well below it.
TOLERANCE = 1e-4


def compare(model: Any, folder: Path, batch: int = 2, length: int = 9, seed: int = 0) -> str:
    """Compare ITC features and ITM logits, or the language model's logits, on random input.

    Args:
        model: the LAVIS model, its weights in float32.
        folder: written by `lavis_mafa.export.hugging_face.write_folder`.
        batch, length, seed: of the random input; for stage 1 every other text is padded.

    Returns:
        A text with the largest absolute difference of each output.

    Raises:
        ValueError: if one is above `TOLERANCE` times the largest output of its kind (or 1).
    """
    from transformers import Blip2Config

    generator = torch.Generator().manual_seed(seed)
    size: Any = image_size_of(model)
    pixels = torch.randn(batch, 3, size, size, generator=generator)
    mask = torch.ones(batch, length, dtype=torch.long)
    stage_1 = language_model(model) is None
    if stage_1:
        words = model.Qformer.bert.embeddings.word_embeddings.num_embeddings
        mask[1::2, length // 2 :] = 0
    else:
        words = Blip2Config.from_pretrained(folder).image_token_index  # those below it are text
    ids = torch.randint(words, (batch, length), generator=generator)
    inputs = pixels, ids, mask
    with torch.no_grad():
        ours = (retrieval if stage_1 else logits)(model, *inputs)
        theirs = (_retrieval if stage_1 else _logits)(folder, *inputs)
    lines = []
    for name, expected in ours.items():
        # The exported vocabulary may have grown: compare the logits that LAVIS has.
        output = theirs[name][..., : expected.shape[-1]]
        difference = float((expected - output).abs().max())
        allowed = TOLERANCE * max(1.0, float(expected.abs().max()))
        if not difference <= allowed:
            raise ValueError(
                f"{name} of the exported model differ by {difference:.2g} from LAVIS's (at most "
                f"{allowed:.2g} is allowed). If the difference is small: LAVIS's ln_vision adds "
                f"{model.ln_vision.eps:g} to the variance, Hugging Face what the other "
                "normalisations of the image encoder add, which shows where its outputs are tiny."
            )
        lines.append(f"{name}: largest difference from LAVIS {difference:.2g}")
    return "\n".join(lines)


def retrieval(model: Any, pixels: Tensor, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Return the outputs of LAVIS's stage 1 for images ``(B, 3, S, S)`` and captions ``(B, T)``."""
    image, queries, attended = _queries(model, pixels)
    text = model.Qformer.bert(ids, attention_mask=mask, return_dict=True).last_hidden_state
    query_tokens = model.query_tokens.expand(len(pixels), -1, -1)
    ones = mask.new_ones(query_tokens.shape[:2])
    both = model.Qformer.bert(
        ids,
        query_embeds=query_tokens,
        attention_mask=torch.cat([ones, mask], 1),
        encoder_hidden_states=image,
        encoder_attention_mask=attended,
        return_dict=True,
    ).last_hidden_state
    return {
        "ITC image features": F.normalize(model.vision_proj(queries), dim=-1),
        "ITC text features": F.normalize(model.text_proj(text[:, 0]), dim=-1),
        "ITM logits": model.itm_head(both[:, : query_tokens.shape[1]]).mean(1),
    }


def logits(model: Any, pixels: Tensor, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Return the logits of LAVIS's stage 2; T5 gets the tokens as input and as target."""
    _, queries, _ = _queries(model, pixels)
    ones = mask.new_ones(queries.shape[:2])
    attended = torch.cat([ones, mask], 1)
    if hasattr(model, "opt_model"):
        inputs = model.opt_proj(queries)
        output = model.opt_model(ids, query_embeds=inputs, attention_mask=attended)
        return {"logits": output.logits[:, queries.shape[1] :]}
    inputs = torch.cat([model.t5_proj(queries), model.t5_model.encoder.embed_tokens(ids)], 1)
    output = model.t5_model(inputs_embeds=inputs, attention_mask=attended, decoder_input_ids=ids)
    return {"logits": output.logits}


def _queries(model: Any, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    image = model.ln_vision(model.visual_encoder(pixels))
    attended = torch.ones(image.shape[:2], dtype=torch.long)
    output = model.Qformer.bert(
        query_embeds=model.query_tokens.expand(len(pixels), -1, -1),
        encoder_hidden_states=image,
        encoder_attention_mask=attended,
        return_dict=True,
    )
    return image, output.last_hidden_state, attended


def _retrieval(folder: Path, pixels: Tensor, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
    from transformers import Blip2ForImageTextRetrieval

    model = _load(Blip2ForImageTextRetrieval, folder)
    itc = model(pixels, ids, mask)
    itm = model(pixels, ids, mask, use_image_text_matching_head=True)
    return {
        "ITC image features": itc.image_embeds,
        "ITC text features": itc.text_embeds,
        "ITM logits": itm.logits_per_image,
    }


def _logits(folder: Path, pixels: Tensor, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
    from transformers import Blip2ForConditionalGeneration

    model = _load(Blip2ForConditionalGeneration, folder)
    queries = model.config.num_query_tokens
    image = ids.new_full((len(ids), queries), model.config.image_token_index)
    inputs = torch.cat([image, ids], 1)
    attended = torch.cat([torch.ones_like(image), mask], 1)
    if model.config.use_decoder_only_language_model:
        output = model(pixels, inputs, attended).logits[:, queries:]
    else:
        output = model(pixels, inputs, attended, decoder_input_ids=ids).logits
    return {"logits": output}


def _load(model_cls: Any, folder: Path) -> Any:
    model, info = model_cls.from_pretrained(
        folder, torch_dtype=torch.float32, output_loading_info=True
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            raise ValueError(f"{folder} does not load completely: {kind} {info[kind]}")
    return model.eval()
