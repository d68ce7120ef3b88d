"""Upload an exported folder to a Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
UNAUTHORISED = (401, 403)


class PushError(OSError):
    """The hub cannot be used; the message is one sentence."""


def require_hub(repository: str) -> None:
    """Check that there is a token, and that the hub answers and accepts it.

    The hub is huggingface.co, or the one that the environment variable HF_ENDPOINT names. The token
    is that of ``hf auth login``, or HF_TOKEN.

    Args:
        repository: ``USER/NAME``.

    Raises:
        PushError: if one of them is not so, or ``repository`` is no such name.
    """
    import huggingface_hub

    if not re.fullmatch(f"{PART}/{PART}", repository):
        raise PushError(f"--push {repository}: expected USER/NAME of a repository on the hub")
    if huggingface_hub.get_token() is None:
        raise PushError(
            f"--push {repository}: no token of the hub was found; run `hf auth login` or set "
            "HF_TOKEN"
        )
    with _explained(repository):
        huggingface_hub.HfApi().whoami()


def push_folder(folder: Path, repository: str, private: bool = False) -> str:
    """Upload a folder to a repository, which is created if it does not exist.

    Args:
        private: make a new repository private.

    Returns:
        The URL of the repository.

    Raises:
        PushError: if the hub refuses it or does not answer.
    """
    import huggingface_hub

    api = huggingface_hub.HfApi()
    with _explained(repository):
        created = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message="Export by lavis_mafa"
        )
    return str(created)


@contextmanager
def _explained(repository: str) -> Iterator[None]:
    """Turn what the hub's client raises into one sentence."""
    from huggingface_hub import constants

    try:
        yield
    # Its versions raise errors of different HTTP libraries.
    except Exception as error:
        status: Any = getattr(getattr(error, "response", None), "status_code", None)
        hub = constants.ENDPOINT
        if status in UNAUTHORISED:
            why = f"{hub} refuses the token ({status}); it needs the right to write to {repository}"
        elif status is not None:
            why = f"{hub} answers with an error ({status})"
        elif constants.HF_HUB_OFFLINE:
            why = "HF_HUB_OFFLINE is set, so that the hub is not asked; unset it"
        else:
            why = f"{hub} cannot be reached ({type(error).__name__})"
        raise PushError(f"--push {repository}: {why}") from error
