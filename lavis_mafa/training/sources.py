"""Which weights and tokenizers a model's config fetches from elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from lavis.common.registry import registry
from lavis.common.utils import is_url
from omegaconf import OmegaConf

from lavis_mafa.checkpoints.checkpoints import read_checkpoint
from lavis_mafa.checkpoints.downloads import BERT, HubFiles, UrlFile
from lavis_mafa.checkpoints.weight_loading import config_of
from lavis_mafa.compat.traits import shipped_config, traits_of
from lavis_mafa.judges.discriminators import DISCRIMINATORS
from lavis_mafa.judges.frozen import FROZEN_MODELS

Source: TypeAlias = UrlFile | HubFiles
# LAVIS's models of these families have BERT's tokenizer, by name.
_WITH_BERT = ("albef", "blip", "blip2")


def sources_of_model(cfg: Any, key: str = "model") -> Iterator[Source]:
    """Yield what building a ``model`` config fetches, if it is not there already.

    Args:
        cfg: a ``model`` config.
        key: its place in the whole config.
    """
    cls = registry.get_model_class(cfg.arch)
    traits = traits_of(cls)
    finetuned = cfg.get("finetuned") if cfg.get("load_finetuned", False) else None
    pretrained = cfg.get("pretrained") if cfg.get("load_pretrained", True) else None
    if traits.loads_with_our_loader:
        yield from _tokenizer_source(f"{key}.tokenizer", cfg.get("tokenizer"))
        checkpoint = finetuned or pretrained
        if checkpoint and is_url(checkpoint):
            yield UrlFile(f"{key}.{'finetuned' if finetuned else 'pretrained'}", checkpoint)
        published: Any = getattr(cls, "published_parts", None)
        if published is not None:
            yield from published(cfg, checkpoint, key)
    else:
        if traits.family in _WITH_BERT:
            yield from _tokenizer_source(f"{key}.arch", None)
        # LAVIS's own classes load the fine-tuned weights by default.
        chosen = "finetuned" if cfg.get("load_finetuned", True) else "pretrained"
        url = cfg.get("finetuned") if cfg.get("load_finetuned", True) else pretrained
        if isinstance(url, str) and is_url(url):
            yield UrlFile(f"{key}.{chosen}", url)
    mafa = cfg.get("mafa") or {}
    for name in FROZEN_MODELS:
        if mafa.get(name):
            yield from _sources_of_frozen(mafa[name], f"{key}.mafa.{name}", cfg)


def _sources_of_frozen(cfg: Mapping[str, Any], key: str, known: Any) -> Iterator[Source]:
    """Yield what building Con-D or the encoder of hard negatives fetches.

    `lavis_mafa.judges.build` builds them.

    Args:
        known: the ``model`` config that it belongs to.
    """
    arch, checkpoint = cfg.get("arch"), cfg.get("checkpoint")
    if arch in DISCRIMINATORS:
        if (
            checkpoint
            and getattr(DISCRIMINATORS[str(arch)], "checkpoint_path", "") == "path or name"
        ):
            yield HubFiles(f"{key}.checkpoint", str(checkpoint), weights=True)
        return
    cls = registry.get_model_class(arch or "")
    if cls is None:
        return
    model = shipped_config(cls, cfg.get("model_type")).model
    if checkpoint and is_url(checkpoint):
        yield UrlFile(f"{key}.checkpoint", checkpoint)
        return  # only its content says what else it needs
    if checkpoint and not os.path.exists(checkpoint):
        return  # the config check reports it
    given = cfg.get("model") or {}
    if checkpoint:
        try:
            content = read_checkpoint(checkpoint, mapped=True)
            model = config_of(str(arch), cfg.get("model_type"), checkpoint, content, given, known)
        except (ValueError, ImportError):
            return  # the config check reports it, or building it
    yield from sources_of_model(OmegaConf.merge(model, given), key)


def _tokenizer_source(key: str, name: str | None) -> Iterator[Source]:
    """Yield a tokenizer of the hub; nothing for a ``vocab.txt`` or a folder."""
    if not (name and (name.endswith(".txt") or os.path.isdir(name))):
        yield HubFiles(key, name or BERT)
