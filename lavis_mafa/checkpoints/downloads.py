"""Download weights that a config names by URL or by a name on the Hugging Face hub."""

from __future__ import annotations

import functools
import hashlib
import os
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import huggingface_hub
import requests
import torch
from huggingface_hub import snapshot_download
from lavis.common.utils import is_url
from timm.models import hub as timm_hub
from transformers.utils import cached_file

from lavis_mafa.io.processes import on_main_process

BERT = "bert-base-uncased"  # whose tokenizer LAVIS's models have

_TIMM = "timm/"  # begins the names of timm's models on the Hugging Face hub
# Published weights keep the names that LAVIS and torch cache them under, to share their cache.
_PUBLISHED = (
    "https://storage.googleapis.com/sfr-",
    "https://dl.fbaipublicfiles.com/deit/",
)
_TIMEOUT = 5.0  # seconds in which a server must answer
# One of these is enough: formats of the same weights.
_WEIGHTS = tuple(
    f"{stem}{ending}"
    for stem in ("model.safetensors", "pytorch_model.bin")
    for ending in ("", ".index.json")
)


class OfflineError(OSError):
    """A file is neither here nor can be downloaded."""


def local_file(url_or_filename: str) -> str:
    """Return the path of a file, downloaded if it is a URL and not in the cache.

    All ranks must call it.

    Raises:
        OfflineError: if it cannot be downloaded.
    """
    path = str(url_or_filename)
    if not is_url(path):
        return path
    try:
        on_main_process(lambda: _download(path))
    except OSError as error:
        raise OfflineError(
            f"{path} is not in the cache and cannot be downloaded ({error}): give a local file "
            "instead, or run once with a network"
        ) from error
    return str(_cached_path(path))


def _cached_path(url: str) -> Path:
    """Return where the file behind a URL is kept, in torch's cache."""
    name = Path(urlsplit(url).path).name
    if not url.startswith(_PUBLISHED):
        # Files of many servers are called checkpoint.pth.
        name = f"{hashlib.sha256(url.encode()).hexdigest()[:12]}_{name}"
    return Path(timm_hub.get_cache_dir()) / name


def _download(url: str) -> Path:
    """Download a file into torch's cache unless it is there; no partial file keeps its name."""
    path = _cached_path(url)
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(url, str(path), progress=True)
    return path


def hub() -> str:
    """Return the address of the Hugging Face hub, or of the one that HF_ENDPOINT names."""
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co")


@functools.lru_cache
def answers(server: str) -> bool:
    """Return whether a server can be reached, within seconds; ``HF_HUB_OFFLINE`` counts for the
    Hugging Face hub."""
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    if offline and server == hub():
        return False
    try:
        requests.head(server, timeout=_TIMEOUT)
    except requests.RequestException:
        return False
    return True


def is_timm_name(value: str) -> bool:
    """Return whether a value names a model of timm on the Hugging Face hub, and no file."""
    return value.startswith(_TIMM) and value.count("/") == 1 and not os.path.exists(value)


def weights_on_hub(name: str, key: str) -> str:
    """Return the file of the weights of a model on the Hugging Face hub, downloaded if needed.

    Args:
        key: the config key that needs them, for messages.

    Raises:
        OfflineError: if they are neither in the cache nor can be downloaded.
    """
    found = _weights_in_cache(name)
    if found is None:
        if not answers(hub()):
            raise OfflineError(
                f"{key}: {name} is not in the Hugging Face cache, and the hub cannot be reached: "
                "give a local file instead, or run once with a network"
            )
        for weights in ("*.safetensors", "*.bin"):
            snapshot_download(name, allow_patterns=["*.json", weights])
            found = _weights_in_cache(name)
            if found is not None:
                break
    if found is None:
        raise OSError(f"{key}: {name} has none of {', '.join(_WEIGHTS)} on the Hugging Face hub")
    return found


def _weights_in_cache(name: str) -> str | None:
    """Return the file of the weights of a model in the cache of the hub; None if it has none."""
    for file in _WEIGHTS:
        with suppress(OSError, ValueError):
            found = cached_file(name, file, local_files_only=True)
            if found:
                return str(found)
    return None


def go_offline() -> None:
    """Let Hugging Face's libraries use their cache without asking the hub, in this process."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # of worker processes
    huggingface_hub.constants.HF_HUB_OFFLINE = True
