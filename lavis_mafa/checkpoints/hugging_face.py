"""Models of LAVIS as a folder that Hugging Face transformers loads without this package.

`FORMS` lists the classes of transformers that can be exported to. The exported tokenizer does not
clean captions like LAVIS's ``blip_caption`` (no punctuation, at most 50 words).
"""

from __future__ import annotations

import inspect
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import nn
from transformers import GenerationConfig

from lavis_mafa.checkpoints.checkpoints import vocabulary_of
from lavis_mafa.checkpoints.hub_folders import RECORD, VOCABULARY
from lavis_mafa.checkpoints.hub_form import FORMS, HubForm
from lavis_mafa.checkpoints.loading import build_model
from lavis_mafa.checkpoints.recorded_sizes import shareable_model
from lavis_mafa.checkpoints.weight_loading import registered_name
from lavis_mafa.compat.traits import traits_of
from lavis_mafa.io.files import write_json, write_text


def export_hugging_face(
    checkpoint: str,
    out: Path,
    *,
    to: str = "hf",
    arch: str | None = None,
    model_type: str | None = None,
    options: Sequence[str] = (),
    dtype: str = "float32",
) -> str:
    """Write the folder ``out``: config, weights, tokenizer and image processor.

    Args:
        checkpoint: file or URL of a BLIP or BLIP-2 of LAVIS or of this package.
        to: ``hf``, or ``hf_captioning`` for BLIP's decoder of captions.
        arch, model_type, options: see `lavis_mafa.checkpoints.loading.build_model`.
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
    model, random, cfg = build_model(checkpoint, arch, model_type, options)
    form = _form_of(model, to)
    random = [name for name in random if not name.startswith(form.dropped)]
    if random:
        raise ValueError(
            f"{len(random)} weights of {type(model).__name__}, such as {random[0]}, are neither in "
            f"{checkpoint} nor loaded from elsewhere: random weights are not exported"
        )
    _round_weights(model, getattr(torch, dtype), form.in_float32)
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    unfinished.mkdir()
    try:
        _write_folder(form, unfinished, getattr(torch, dtype))
        write_json(unfinished / RECORD, _record_of(model, cfg))
        unfinished.rename(out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return "\n".join(filter(None, (f"wrote {out}: {form.class_name}, {dtype}", form.note())))


def _record_of(model: Any, cfg: Any) -> dict[str, Any]:
    """Return what transformers has no place for, and with which this package reads the folder."""
    arch = registered_name(type(model))
    built: Any = OmegaConf.to_container(cfg)
    record: dict[str, Any] = {
        "family": traits_of(model).family,
        "vocabulary": vocabulary_of(getattr(model, "tokenizer", None)),
        "config": {"model": shareable_model(built, arch)},
    }
    temperature = getattr(model, "temp", None)
    return record if temperature is None else {**record, "temp": temperature.item()}


def _form_of(model: Any, to: str) -> HubForm:
    """Return the form of a built LAVIS model.

    Raises:
        ValueError: if it has none.
    """
    family = traits_of(model).family
    for form in FORMS:
        # A family that is not known shows by its parts.
        if form.to == to and family in ("", form.family) and form.takes(model):
            form.model_cls()  # transformers may be too old to have it
            return form(model)
    others = [one for one in FORMS if one.family == family and one.takes(model)]
    cure = f": use --to {others[0].to}" if others else ""
    families = " and ".join(dict.fromkeys(one.names.title for one in FORMS if one.to == to))
    raise ValueError(
        f"{type(model).__name__} has no form --to {to}, which takes checkpoints of {families}{cure}"
    )


def _write_folder(form: HubForm, folder: Path, dtype: torch.dtype) -> None:
    """Write a LAVIS model with float32 weights; see `export_hugging_face`."""
    state, config = form.state(dtype), form.config()
    form.adapt(state, config)
    # Without memory: `assign` then takes over the tensors themselves.
    with torch.device("meta"):
        hf_model = form.model_cls()(config)
    try:
        hf_model.load_state_dict(state, strict=True, assign=True)
    except RuntimeError as error:
        raise ValueError(f"{form.class_name} cannot hold this model: {error}") from error
    _tie(hf_model)
    if form.generation:
        names = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
        known = {name: getattr(config.text_config, name, None) for name in names}
        hf_model.generation_config = GenerationConfig(**known, **form.generation)
    hf_model.save_pretrained(folder)
    # save_pretrained records the type of one weight, which may be one kept in float32.
    hf_model.config.torch_dtype = dtype
    text_config = hf_model.config.text_config
    if hasattr(text_config, "scale_decoder_outputs"):
        # Of T5, older versions read this from the name that newer ones always set to True.
        text_config.tie_word_embeddings = text_config.scale_decoder_outputs
    hf_model.config.save_pretrained(folder)
    processor = form.processor()
    processor.save_pretrained(folder)
    if not hasattr(form.model, "opt_model") and not hasattr(form.model, "t5_model"):
        _write_vocabulary(processor.tokenizer, folder / VOCABULARY)
    for file in folder.glob("*.safetensors"):  # some versions make them readable only by the owner
        file.chmod((folder / "config.json").stat().st_mode)


def _round_weights(model: nn.Module, dtype: torch.dtype, in_float32: tuple[str, ...] = ()) -> None:
    """Bring all weights to float32, rounded to what ``dtype`` can hold.

    Args:
        in_float32: prefixes of weights that are not rounded.
    """
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if value.is_floating_point():
            rounded = value.data if name.startswith(in_float32) else value.data.to(dtype)
            value.data = rounded.float()


def _write_vocabulary(tokenizer: Any, file: Path) -> None:
    """Write BERT's words without the tokens that BLIPs add; newer versions do not."""
    words = {number: word for word, number in tokenizer.get_vocab().items()}
    lines = [words.get(number, "") for number in range(tokenizer.vocab_size)]
    if all(lines) and getattr(tokenizer, "do_lower_case", True):
        write_text(file, "\n".join(lines) + "\n")


def _tie(hf_model: Any) -> None:
    """Share the weights that Hugging Face's class shares."""
    if "missing_keys" in inspect.signature(hf_model.tie_weights).parameters:
        # Newer versions would overwrite an output layer of its own, such as Flan-T5's; with this
        # argument they share only equal weights.
        hf_model.tie_weights(missing_keys=set())
    else:
        hf_model.tie_weights()
    seen = set()
    for value in hf_model.parameters():
        # LAVIS shares more than some versions, which refuse to save what they do not share.
        if value.data_ptr() in seen:
            value.data = value.data.clone()
        seen.add(value.data_ptr())
