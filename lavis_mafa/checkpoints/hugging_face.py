"""Export BLIP and BLIP-2 as a folder that Hugging Face transformers loads without this package.

A BLIP becomes ``BlipForImageTextRetrieval``, a BLIP-2 of stage 1 ``Blip2ForImageTextRetrieval``.
These classes have no language head and no temperature, so both are omitted, and ITC logits are
cosines. The exported tokenizer does not clean captions like LAVIS's ``blip_caption`` (no
punctuation, at most 50 words).
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from lavis.common.registry import registry
from lavis.models.eva_vit import VisionTransformer
from lavis.processors.blip_processors import BlipImageBaseProcessor
from omegaconf import OmegaConf
from torch import nn
from transformers import AutoTokenizer, BlipConfig, BlipImageProcessor, BlipProcessor

from lavis_mafa.checkpoints.checkpoints import (
    RUN_STATE_KEYS,
    model_config,
    read_checkpoint,
    run_state_of,
    vocabulary_of,
    weights_of,
)
from lavis_mafa.checkpoints.hub_folders import BLIP, BLIP2, RECORD, VOCABULARY, HubNames
from lavis_mafa.checkpoints.recorded_sizes import recorded_type_of, shareable_model
from lavis_mafa.checkpoints.weight_loading import config_of, load_state, random_weights
from lavis_mafa.compat.traits import image_size_of, shipped_config, traits_of
from lavis_mafa.io.files import write_json, write_text


def export_hugging_face(
    checkpoint: str,
    out: Path,
    *,
    arch: str | None = None,
    model_type: str | None = None,
    options: Sequence[str] = (),
    dtype: str = "float32",
) -> str:
    """Write the folder ``out``: config, weights, tokenizer and image processor.

    Args:
        checkpoint: file or URL of a BLIP or BLIP-2 of LAVIS or of this package.
        arch, model_type: for a checkpoint without config; default: the recorded ones.
        options: ``key=value`` of the ``model`` config, which override the recorded ones.
        dtype: of the saved weights; a Q-Former's stay float32.

    Returns:
        A text that says what was written.

    Raises:
        OSError, ValueError: if the model cannot be built or expressed, or weights would be random;
            no files remain then.
        ImportError: if transformers is too old.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} exists and is not an empty folder")
    if not hasattr(transformers, _NEWEST):
        raise ImportError(
            f"transformers {transformers.__version__} has no {_NEWEST}: 4.46 or later is needed "
            "(run_scripts/requirements/modern.txt)"
        )
    model, random, record = _build(checkpoint, arch, model_type, options)
    form = _form_of(model)
    dropped = (*form.dropped, *run_state_of(model))
    random = [name for name in random if not name.startswith(dropped)]
    if random:
        raise ValueError(
            f"{len(random)} weights of {type(model).__name__}, such as {random[0]}, are neither in "
            f"{checkpoint} nor loaded from elsewhere: random weights are not exported"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    unfinished.mkdir()
    try:
        _write_folder(form, unfinished, getattr(torch, dtype), dropped)
        write_json(unfinished / RECORD, record)
        unfinished.rename(out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return "\n".join(filter(None, (f"wrote {out}: {form.class_name}, {dtype}", form.note)))


def _build(
    checkpoint: str, arch: str | None, model_type: str | None, options: Sequence[str]
) -> tuple[nn.Module, list[str], dict[str, Any]]:
    """Build the model of a checkpoint, with its weights.

    The config in the checkpoint gives the model and its sizes, and no files.

    Returns:
        The model; the names of its random weights, which are neither in the checkpoint nor loaded
        from elsewhere; what transformers has no place for, and with which this package reads the
        folder.
    """
    content = read_checkpoint(checkpoint)
    recorded = model_config(content)
    arch = arch or recorded.get("arch")
    model_cls = registry.get_model_class(arch) if isinstance(arch, str) else None
    if model_cls is None or arch is None:
        raise ValueError(
            f"{checkpoint}: no model named {arch!r}; give --arch, one of "
            f"{', '.join(registry.list_models())}"
        )
    model_type = model_type or recorded_type_of(content, arch)
    known = model_cls.PRETRAINED_MODEL_CONFIG_DICT
    if model_type not in known:
        raise ValueError(
            f"{arch} has no type {model_type!r}: give --model-type, one of {', '.join(known)}"
        )
    keys = sorted({*map(str, recorded), *map(str, shipped_config(model_cls, model_type).model)})
    for option in options:
        name, sign, _ = option.partition("=")
        if not sign:
            raise ValueError(f"--options {option}: expected KEY=VALUE")
        if name.split(".")[0] not in keys:
            raise ValueError(f"--options {name}: {arch} has no such setting; it has {keys}")
    given: Any = OmegaConf.to_container(OmegaConf.from_dotlist(list(options)), resolve=True)
    cfg = config_of(arch, model_type, checkpoint, content, given)
    built: Any = OmegaConf.to_container(cfg)
    try:
        model: Any = model_cls.from_config(cfg)
    except RuntimeError as error:
        raise ValueError(f"{checkpoint} does not fit {model_cls.__name__}: {error}") from error
    said = traits_of(model).loads_with_our_loader  # as the model was built
    loaded = load_state(model, weights_of(content), checkpoint, say_dropped=not said)
    record: dict[str, Any] = {
        "family": traits_of(model).family,
        "vocabulary": vocabulary_of(getattr(model, "tokenizer", None)),
        "config": {"model": shareable_model(built, arch)},
    }
    if hasattr(model, "temp"):
        record["temp"] = model.temp.item()
    return model.eval(), random_weights(model, loaded.missing_keys), record


def _form_of(model: Any) -> _Form:
    """Return the form of a built LAVIS model.

    Raises:
        ValueError: if it has none.
    """
    family = traits_of(model).family
    for form in (_Blip2, _Blip):
        # A family that is not known shows by its parts.
        parts = (getattr(model, name, None) for name in form.needs)
        if family in ("", form.family) and all(part is not None for part in parts):
            return form(model)
    raise ValueError(
        f"{type(model).__name__} cannot be exported, which takes a BLIP or BLIP-2 (stage 1) with "
        "ITC and ITM"
    )


def _write_folder(form: _Form, folder: Path, dtype: torch.dtype, dropped: tuple[str, ...]) -> None:
    """Write a LAVIS model, whose weights are rounded to ``dtype``; see `export_hugging_face`.

    Args:
        dropped: prefixes of weights to leave out.
    """
    rounded = {
        name: value.float() if name.startswith(form.in_float32) else value.to(dtype)
        for name, value in form.model.state_dict().items()
    }
    state = form.names.state_to_hub(rounded, dropped)
    # Without memory: `assign` then takes over the tensors themselves.
    with torch.device("meta"):
        hf_model = getattr(transformers, form.class_name)(form.config())
    try:
        hf_model.load_state_dict(state, strict=True, assign=True)
    except RuntimeError as error:
        raise ValueError(f"{form.class_name} cannot hold this model: {error}") from error
    hf_model.save_pretrained(folder)
    # save_pretrained records the type of one weight, which may be one kept in float32.
    hf_model.config.torch_dtype = dtype
    hf_model.config.save_pretrained(folder)
    processor = form.processor()
    processor.save_pretrained(folder)
    _write_vocabulary(processor.tokenizer, folder / VOCABULARY)
    for file in folder.glob("*.safetensors"):  # some versions make them readable only by the owner
        file.chmod((folder / "config.json").stat().st_mode)


def _write_vocabulary(tokenizer: Any, file: Path) -> None:
    """Write BERT's words without the tokens that BLIPs add; newer versions do not."""
    words = {number: word for word, number in tokenizer.get_vocab().items()}
    lines = [words.get(number, "") for number in range(tokenizer.vocab_size)]
    if all(lines) and getattr(tokenizer, "do_lower_case", True):
        write_text(file, "\n".join(lines) + "\n")


# The class that transformers had last of those needed here.
_NEWEST = "Blip2ForImageTextRetrieval"
_MOMENTUM = tuple(
    f"{part}_m." for part in ("visual_encoder", "text_encoder", "vision_proj", "text_proj")
)


class _Form:
    """A class of transformers, and how a LAVIS model is expressed as it.

    Args:
        model: the LAVIS model.

    Attributes:
        family: of the LAVIS models that it takes.
        class_name: of transformers.
        names: of the weights.
        dropped: prefixes of LAVIS's weights that the class has no use for.
        in_float32: prefixes of LAVIS's weights that both libraries compute in float32, whatever the
            precision of the others.
        needs: attributes of a LAVIS model without which it has no such form.
        note: what a user of the exported model has to know.
    """

    family: ClassVar[str]
    class_name: ClassVar[str]
    names: ClassVar[HubNames]
    dropped: ClassVar[tuple[str, ...]]
    in_float32: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[tuple[str, ...]]
    note: ClassVar[str] = ""

    def __init__(self, model: Any) -> None:
        self.model = model

    def config(self) -> Any:
        """Return the config of transformers, with the sizes of the LAVIS model."""
        raise NotImplementedError

    def processor(self) -> Any:
        """Return the processor of transformers: images and texts to inputs."""
        raise NotImplementedError


class _Blip(_Form):
    family, names, class_name = "blip", BLIP, "BlipForImageTextRetrieval"
    dropped = ("text_decoder.", "temp", *_MOMENTUM, *RUN_STATE_KEYS)
    needs = ("itm_head", "vision_proj", "text_proj", "text_encoder")
    note = (
        "for ITM, texts begin with [ENC] as in LAVIS: inputs['input_ids'][:, 0] = "
        "processor.tokenizer.convert_tokens_to_ids('[ENC]'); for ITC (use_itm_head=False) with "
        "[CLS], as the tokenizer writes them"
    )

    def config(self) -> Any:
        tokenizer, bert = self.model.tokenizer, self.model.text_encoder
        text = {
            **_bert_config(bert.config),
            "vocab_size": bert.embeddings.word_embeddings.num_embeddings,
            "is_decoder": True,  # it has cross-attention
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.sep_token_id,
            "sep_token_id": tokenizer.sep_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        }
        return BlipConfig(
            text_config=text,
            vision_config=_vision_config(self.model),
            image_text_hidden_size=self.model.vision_proj.out_features,
        )

    def processor(self) -> Any:
        return BlipProcessor(_image_processor(self.model), _tokenizer_of(self.model))


class _Blip2(_Form):
    family, names, class_name = "blip2", BLIP2, _NEWEST
    in_float32 = ("query_tokens", "Qformer.")
    dropped = ("Qformer.cls.", "temp", "Qformer.bert.embeddings.position_ids")
    needs = ("itm_head", "vision_proj", "text_proj", "Qformer")

    def config(self) -> Any:
        from transformers import Blip2Config

        model: Any = self.model
        vit, bert = model.visual_encoder, model.Qformer.bert
        if not isinstance(vit, VisionTransformer):
            raise ValueError(
                f"the image encoder {type(vit).__name__} cannot be exported: Hugging Face's BLIP-2 "
                "has EVA's only, and neither CLIP's first norm nor its QuickGELU"
            )
        query = {
            **_bert_config(bert.config),
            "cross_attention_frequency": bert.config.cross_attention_freq,
            "encoder_hidden_size": bert.config.encoder_width,
            "vocab_size": bert.embeddings.word_embeddings.num_embeddings,
            "use_qformer_text_input": True,
        }
        return Blip2Config(
            vision_config={
                **_vision_config(model),
                "qkv_bias": vit.blocks[0].attn.q_bias is not None,
            },
            qformer_config=query,
            num_query_tokens=model.query_tokens.shape[1],
            image_text_hidden_size=model.vision_proj.out_features,
        )

    def processor(self) -> Any:
        from transformers import Blip2Processor

        # Captions go to the Q-Former without placeholder tokens for the image.
        return Blip2Processor(
            _image_processor(self.model), _tokenizer_of(self.model), num_query_tokens=0
        )


def _image_processor(model: Any) -> Any:
    """Return the processor of LAVIS's ``blip_image_eval``."""
    size: Any = image_size_of(model)
    normalize = BlipImageBaseProcessor().normalize
    return BlipImageProcessor(
        size={"height": size, "width": size},
        image_mean=list(normalize.mean),
        image_std=list(normalize.std),
    )


def _vision_config(model: Any) -> dict[str, Any]:
    """Return the sizes of LAVIS's image encoder under the names of both BLIPs' configs."""
    vit = model.visual_encoder
    block = vit.blocks[0]
    return {
        "hidden_size": vit.embed_dim,
        "intermediate_size": block.mlp.fc1.out_features,
        "num_hidden_layers": len(vit.blocks),
        "num_attention_heads": block.attn.num_heads,
        "image_size": image_size_of(model),
        "patch_size": vit.patch_embed.patch_size[0],
        "hidden_act": "gelu",
        "layer_norm_eps": block.norm1.eps,
    }


def _bert_config(config: Any) -> dict[str, Any]:
    """Return what a config of LAVIS's BERT and one of Hugging Face's BLIPs have in common."""
    same = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "hidden_act",
        "hidden_dropout_prob",
        "attention_probs_dropout_prob",
        "max_position_embeddings",
        "initializer_range",
        "layer_norm_eps",
        "pad_token_id",
    )
    return {key: getattr(config, key) for key in same}


def _tokenizer_of(model: Any) -> Any:
    """Return the fast version of a model's tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        model.tokenizer.save_pretrained(folder)
        return AutoTokenizer.from_pretrained(folder)
