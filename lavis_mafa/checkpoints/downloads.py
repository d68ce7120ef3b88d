"""Files that a config needs from elsewhere: find those that are missing, and download them."""

from __future__ import annotations

import functools
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import huggingface_hub
import requests
import torch
from huggingface_hub import snapshot_download
from timm.models import hub as timm_hub
from transformers.utils import cached_file

BERT = "bert-base-uncased"  # whose tokenizer LAVIS's models have

_TIMM = "timm/"  # begins the names of timm's models on the Hugging Face hub
# Published weights keep the names that LAVIS and torch cache them under, to share their cache.
_PUBLISHED = (
    "https://storage.googleapis.com/sfr-",
    "https://dl.fbaipublicfiles.com/deit/",
)
_TIMEOUT = 5.0  # seconds in which a server must answer
# One file of a group is enough: formats of the same content.
_TOKENIZER = ("tokenizer.json", "vocab.txt", "spiece.model", "vocab.json")
_WEIGHTS = tuple(
    f"{stem}{ending}"
    for stem in ("model.safetensors", "pytorch_model.bin")
    for ending in ("", ".index.json")
)


class OfflineError(OSError):
    """Files are missing that cannot be fetched; the message lists all of them."""


@dataclass(frozen=True)
class UrlFile:
    """A file behind a URL.

    Attributes:
        key: the config key that needs it.
        origin: its URL.
        stored: where it is kept; None: in torch's cache.
    """

    key: str
    origin: str
    stored: Path | None = None

    @property
    def path(self) -> Path:
        if self.stored is not None:
            return self.stored
        name = Path(urlsplit(self.origin).path).name
        if not self.origin.startswith(_PUBLISHED):
            # Files of many servers are called checkpoint.pth.
            name = f"{hashlib.sha256(self.origin.encode()).hexdigest()[:12]}_{name}"
        return Path(timm_hub.get_cache_dir()) / name

    @property
    def is_there(self) -> bool:
        return self.path.is_file()

    @property
    def server(self) -> str:
        parts = urlsplit(self.origin)
        return f"{parts.scheme}://{parts.netloc}"

    def fetch(self) -> None:
        """Download it, unless it is there; a partial file is never left under its name."""
        if self.is_there:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(self.origin, str(self.path), progress=True)


@dataclass(frozen=True)
class HubFiles:
    """A tokenizer, or a model with its config, of the Hugging Face hub.

    Attributes:
        key: the config key that needs it.
        origin: its name on the hub, or a folder.
        weights: the weights are needed, not the tokenizer.
    """

    key: str
    origin: str
    weights: bool = False

    @property
    def path(self) -> Path:
        found = self._found()
        if found is not None:
            return found
        from huggingface_hub.constants import HF_HUB_CACHE

        return Path(HF_HUB_CACHE) / f"models--{self.origin.replace('/', '--')}"

    @property
    def is_there(self) -> bool:
        return os.path.isdir(self.origin) or self._found() is not None

    @property
    def server(self) -> str:
        return hub()

    def _found(self) -> Path | None:
        for name in _WEIGHTS if self.weights else _TOKENIZER:
            try:
                found = cached_file(self.origin, name, local_files_only=True)
            except (OSError, ValueError):
                continue
            if found:
                return Path(found)
        return None

    def fetch(self) -> None:
        """Download what is needed of it into the cache."""
        small = ["*.json", "*.txt", "*.model", "*.jinja"]
        if not self.weights:
            snapshot_download(self.origin, allow_patterns=small)
            return
        snapshot_download(self.origin, allow_patterns=[*small, "*.safetensors"])
        if not self.is_there:
            snapshot_download(self.origin, allow_patterns=[*small, "*.bin"])


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
        OSError: if they are neither in the cache nor can be downloaded.
    """
    files = HubFiles(key, name, weights=True)
    if not files.is_there:
        if not answers(files.server):
            raise OSError(
                f"{key}: {name} is not in the Hugging Face cache, and the hub cannot be reached: "
                "give a local file instead, or run once with a network"
            )
        files.fetch()
    return str(files.path)


def go_offline() -> None:
    """Let Hugging Face's libraries use their cache without asking the hub, in this process."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # of worker processes
    huggingface_hub.constants.HF_HUB_OFFLINE = True


def listing(sources: list[UrlFile | HubFiles]) -> list[str]:
    """Return a line for every file: whether it is there, its config key and path."""
    lines = []
    for source in sources:
        state = "there  " if source.is_there else "MISSING"
        what = ""
        if isinstance(source, HubFiles):
            what = " (weights)" if source.weights else " (tokenizer)"
        lines.append(f"{state}  {source.key}: {source.origin}{what} -> {source.path}")
    return lines
