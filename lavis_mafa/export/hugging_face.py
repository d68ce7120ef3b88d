"""BLIP-2 of LAVIS as a folder that Hugging Face transformers loads without this package.

Stage 1 (Q-Former with ITC and ITM) becomes ``Blip2ForImageTextRetrieval``, stage 2 (with OPT or T5)
``Blip2ForConditionalGeneration``. These classes have neither a language head of stage 1 nor a
temperature, so both are omitted, and their ITC logits are plain cosines. The exported tokenizer
does not clean captions like LAVIS's ``blip_caption`` (no punctuation, at most 50 words).
"""

from __future__ import annotations

import copy
import inspect
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lavis.common.registry import registry
from lavis.models.eva_vit import VisionTransformer
from lavis.processors.blip_processors import BlipImageBaseProcessor
from torch import Tensor, nn

from lavis_mafa.export.compare import compare
from lavis_mafa.export.source import build_model, language_model
from lavis_mafa.io.checkpoints import model_config, read_checkpoint
from lavis_mafa.models.families.base import image_size_of
from lavis_mafa.models.traits import traits_of

# LAVIS's defaults of Blip2OPT.generate and Blip2T5.generate.
GENERATION = {"num_beams": 5, "max_new_tokens": 30, "length_penalty": 1.0, "do_sample": False}
# Hugging Face and LAVIS compute these in float32, whatever the precision of the other weights.
KEPT_IN_FLOAT32 = ("query_tokens", "Qformer.")
DROPPED = ("Qformer.cls.", "temp", "Qformer.bert.embeddings.position_ids")
# LAVIS's prefix and Hugging Face's; the first matching one applies.
PREFIXES = (
    ("visual_encoder.cls_token", "vision_model.embeddings.class_embedding"),
    ("visual_encoder.pos_embed", "vision_model.embeddings.position_embedding"),
    ("visual_encoder.patch_embed.proj.", "vision_model.embeddings.patch_embedding."),
    ("visual_encoder.blocks.", "vision_model.encoder.layers."),
    ("ln_vision.", "vision_model.post_layernorm."),
    ("query_tokens", "query_tokens"),
    ("Qformer.bert.embeddings.LayerNorm.", "qformer.layernorm."),
    ("Qformer.bert.embeddings.", "embeddings."),
    ("Qformer.bert.", "qformer."),
    ("vision_proj.", "vision_projection."),
    ("text_proj.", "text_projection."),
    ("itm_head.", "itm_head."),
    ("opt_proj.", "language_projection."),
    ("t5_proj.", "language_projection."),
    ("opt_model.", "language_model."),
    ("t5_model.", "language_model."),
)
INSIDE = {
    "visual_encoder.blocks.": (
        (".norm1.", ".layer_norm1."),
        (".norm2.", ".layer_norm2."),
        (".attn.qkv.", ".self_attn.qkv."),
        (".attn.proj.", ".self_attn.projection."),
    ),
    "Qformer.bert.": (("attention.self.", "attention.attention."),),
}
Q_BIAS, V_BIAS = ".attn.q_bias", ".attn.v_bias"


def export_hugging_face(
    checkpoint: str,
    out: Path,
    *,
    arch: str | None = None,
    model_type: str | None = None,
    options: Sequence[str] = (),
    dtype: str = "float32",
    check: bool = True,
) -> str:
    """Write the folder ``out``: config, weights, tokenizer and image processor.

    Args:
        checkpoint: file or URL of a BLIP-2 of LAVIS or of this package.
        arch, model_type, options: see `lavis_mafa.export.source.build_model`.
        dtype: of the saved weights; the Q-Former's stay float32.
        check: load the folder again and compare its outputs with LAVIS's.

    Returns:
        A text that says what was written and how far outputs differ.

    Raises:
        OSError, ValueError: if the model cannot be built or expressed, weights would be random, or
            the outputs differ; no files remain then.
        ImportError: if transformers is too old.
    """
    _require_transformers()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} exists and is not an empty folder")
    _require_blip2(checkpoint, arch)
    model, random = build_model(checkpoint, arch, model_type, options)
    random = [name for name in random if not name.startswith(DROPPED)]
    if random:
        raise ValueError(
            f"{len(random)} weights of {type(model).__name__}, such as {random[0]}, are neither in "
            f"{checkpoint} nor loaded from elsewhere: random weights are not exported"
        )
    round_weights(model, getattr(torch, dtype))
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    unfinished.mkdir()
    try:
        name = write_folder(model, unfinished, getattr(torch, dtype))
        lines = [f"wrote {out}: {name}, {dtype}"]
        if check:
            lines.append(compare(model, unfinished))
        if language_model(model) is not None:
            lines.append(
                "equivalent of LAVIS's generate(): model.generate(**processor(images=..., "
                f"text={model.prompt!r}), generation_config=model.generation_config)"
            )
        unfinished.rename(out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return "\n".join(lines)


def write_folder(model: Any, folder: Path, dtype: torch.dtype = torch.float32) -> str:
    """Write a LAVIS model with float32 weights; see `export_hugging_face`.

    Returns:
        The name of the Hugging Face class.
    """
    from transformers import Blip2ForConditionalGeneration, Blip2ForImageTextRetrieval

    model_cls: Any = (
        Blip2ForImageTextRetrieval
        if language_model(model) is None
        else Blip2ForConditionalGeneration
    )
    tokenizer, image_token = _tokenizer(model)
    own = model.state_dict()
    state = to_hf_state(
        {k: v if k.startswith(KEPT_IN_FLOAT32) else v.to(dtype) for k, v in own.items()}
    )
    config = to_hf_config(model, None if language_model(model) is None else image_token)
    if config.image_token_index is not None:
        _make_room(state, config)
    # Without memory: `assign` then takes over the tensors themselves.
    with torch.device("meta"):
        hf_model = model_cls(config)
    hf_model.load_state_dict(state, strict=True, assign=True)
    _tie(hf_model)
    if hf_model.can_generate():
        hf_model.generation_config = _generation(config.text_config)
    hf_model.save_pretrained(folder)
    # save_pretrained records the type of one weight, which may be one kept in float32.
    hf_model.config.torch_dtype = dtype
    if hasattr(config.text_config, "scale_decoder_outputs"):
        # Of T5, older versions read this from the name that newer ones always set to True.
        hf_model.config.text_config.tie_word_embeddings = config.text_config.scale_decoder_outputs
    hf_model.config.save_pretrained(folder)
    _processor(model, tokenizer).save_pretrained(folder)
    for file in folder.glob("*.safetensors"):  # some versions make them readable only by the owner
        file.chmod((folder / "config.json").stat().st_mode)
    return str(model_cls.__name__)


def _tie(hf_model: Any) -> None:
    """Share the weights that Hugging Face's class shares."""
    if "missing_keys" in inspect.signature(hf_model.tie_weights).parameters:
        # Newer versions would overwrite an output layer of its own, such as Flan-T5's; with this
        # argument they share only equal weights.
        hf_model.tie_weights(missing_keys=set())
    else:
        hf_model.tie_weights()


def round_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Bring all weights to float32, rounded to what ``dtype`` can hold."""
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if value.is_floating_point():
            rounded = value.data if name.startswith(KEPT_IN_FLOAT32) else value.data.to(dtype)
            value.data = rounded.float()


def to_hf_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the weights of a LAVIS BLIP-2.

    Raises:
        ValueError: if there is one that Hugging Face's BLIP-2 has no place for.
    """
    renamed: dict[str, Tensor] = {}
    unknown = []
    for name, value in state.items():
        if name.startswith(DROPPED) or name.endswith(V_BIAS):
            continue
        if name.endswith(Q_BIAS):
            # EVA's keys have no bias; Hugging Face keeps one vector for all three.
            v_bias = state[name.replace(Q_BIAS, V_BIAS)]
            value = torch.cat([value, torch.zeros_like(value), v_bias])
            name = name.replace(Q_BIAS, ".attn.qkv.bias")
        new = hf_name(name)
        if new is None:
            unknown.append(name)
        else:
            renamed[new] = value
    if unknown:
        raise ValueError(
            f"Hugging Face's BLIP-2 cannot express {len(unknown)} weights, such as {unknown[0]}"
        )
    return renamed


def hf_name(name: str) -> str | None:
    """Return Hugging Face's name of a LAVIS weight; None if it has none."""
    for start, changes in INSIDE.items():
        if name.startswith(start):
            for old, new in changes:
                name = name.replace(old, new)
    for prefix, new in PREFIXES:
        if name.startswith(prefix):
            return new + name.removeprefix(prefix)
    return None


def to_hf_config(model: Any, image_token: int | None) -> Any:
    """Return Hugging Face's config of a LAVIS BLIP-2, with the sizes of the model.

    Args:
        model: stage 1 or 2.
        image_token: id of the placeholder token of image queries in a prompt; None: stage 1.
    """
    from transformers import Blip2Config

    vit, qformer = model.visual_encoder, model.Qformer.config
    if not isinstance(vit, VisionTransformer):
        raise ValueError(
            f"the image encoder is a {type(vit).__module__}.{type(vit).__name__}; Hugging Face's "
            "Blip2VisionModel can only express EVA's ViT (lavis.models.eva_vit)"
        )
    block = vit.blocks[0]
    vision = {
        "hidden_size": vit.embed_dim,
        "intermediate_size": block.mlp.fc1.out_features,
        "num_hidden_layers": len(vit.blocks),
        "num_attention_heads": block.attn.num_heads,
        "image_size": image_size_of(model),
        "patch_size": vit.patch_embed.patch_size[0],
        "hidden_act": "gelu",
        "layer_norm_eps": block.norm1.eps,
        "qkv_bias": block.attn.q_bias is not None,
    }
    same = (
        *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
        *("hidden_act", "hidden_dropout_prob", "attention_probs_dropout_prob"),
        *("max_position_embeddings", "initializer_range", "layer_norm_eps", "pad_token_id"),
    )
    query = {key: getattr(qformer, key) for key in same}
    query["cross_attention_frequency"] = qformer.cross_attention_freq
    query["encoder_hidden_size"] = qformer.encoder_width
    settings: dict[str, Any] = {"num_query_tokens": model.query_tokens.shape[1]}
    spoken = language_model(model)
    if spoken is None:
        words = model.Qformer.bert.embeddings.word_embeddings
        query.update(vocab_size=words.num_embeddings, use_qformer_text_input=True)
        settings["image_text_hidden_size"] = model.vision_proj.out_features
    else:
        settings["text_config"] = _text_config(model, spoken)
        settings["image_token_index"] = image_token
    return Blip2Config(vision_config=vision, qformer_config=query, **settings)


def _text_config(model: Any, spoken: Any) -> dict[str, Any]:
    """Return the config of OPT or T5 with LAVIS's begin and end tokens of a text."""
    config: dict[str, Any] = copy.deepcopy(spoken.config).to_dict()
    for key in ("_name_or_path", "architectures", "torch_dtype", "transformers_version"):
        config.pop(key, None)
    if hasattr(model, "opt_model"):
        config["eos_token_id"] = model.eos_token_id  # LAVIS ends a text at the newline
    else:
        # The empty prompt: LAVIS's tokenizer encodes it as T5's end token.
        config["bos_token_id"] = config["eos_token_id"]
    return config


def _generation(text_config: Any) -> Any:
    from transformers import GenerationConfig

    keys = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
    known = {key: getattr(text_config, key, None) for key in keys}
    return GenerationConfig(**known, **GENERATION)


def _tokenizer(model: Any) -> tuple[Any, int]:
    """Return the fast version of the model's tokenizer, and the id of ``<image>`` in it."""
    from transformers import AutoTokenizer

    own = next(
        getattr(model, name)
        for name in ("opt_tokenizer", "t5_tokenizer", "tokenizer")
        if hasattr(model, name)
    )
    with tempfile.TemporaryDirectory() as folder:
        own.save_pretrained(folder)
        # A decoder continues after the last token, which must not be padding.
        side = "left" if hasattr(model, "opt_model") else "right"
        tokenizer = AutoTokenizer.from_pretrained(folder, padding_side=side)
    return tokenizer, len(tokenizer)  # Blip2Processor appends it


def _make_room(state: dict[str, Tensor], config: Any) -> None:
    """Add a row for ``<image>`` to the language model if its vocabulary has no unused row.

    The new row is the mean of all rows, so its logit is the mean logit and never the highest.
    """
    rows = config.text_config.vocab_size
    if config.image_token_index < rows:
        return
    more = config.image_token_index + 1 - rows
    for key, value in state.items():
        if key.startswith("language_model.") and key.endswith(
            ("embed_tokens.weight", "shared.weight", "lm_head.weight")
        ):
            state[key] = torch.cat([value, value.mean(0, keepdim=True).expand(more, -1)])
    config.text_config.vocab_size = rows + more


def _processor(model: Any, tokenizer: Any) -> Any:
    from transformers import Blip2Processor, BlipImageProcessor

    size, normalize = image_size_of(model), BlipImageBaseProcessor().normalize
    images = BlipImageProcessor(
        size={"height": size, "width": size},
        image_mean=list(normalize.mean),
        image_std=list(normalize.std),
    )
    # In stage 1 captions go to the Q-Former without placeholder tokens for the image.
    queries = 0 if language_model(model) is None else model.query_tokens.shape[1]
    return Blip2Processor(images, tokenizer, num_query_tokens=queries)


def _require_blip2(checkpoint: str, arch: str | None) -> None:
    """Refuse a checkpoint of another family before its model is built."""
    arch = arch or model_config(read_checkpoint(checkpoint, mapped=True)).get("arch")
    model_cls = registry.get_model_class(arch) if isinstance(arch, str) else None
    family = traits_of(model_cls).family if model_cls else ""
    if family and family != "blip2":
        forms = "; --to albef_* takes checkpoints of ALBEF" if family == "albef" else ""
        raise ValueError(
            f"{checkpoint} is of {arch}, of the family {family}: --to hf takes checkpoints of "
            f"BLIP-2 only{forms}"
        )


def _require_transformers() -> None:
    import transformers

    if not hasattr(transformers, "Blip2ForImageTextRetrieval"):
        raise ImportError(
            f"transformers {transformers.__version__} has no Blip2ForImageTextRetrieval: 4.46 or "
            "later is needed (run_scripts/requirements/modern.txt)"
        )
