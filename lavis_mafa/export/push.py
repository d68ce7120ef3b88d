"""Upload an exported folder to a Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub
from huggingface_hub.utils import HFValidationError, validate_repo_id


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
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise PushError(f"--push {repository}: expected USER/NAME: {error}") from error
    if "/" not in repository:
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
    try:
        yield
    except Exception as error:  # its versions raise errors of different HTTP libraries
        status = getattr(getattr(error, "response", None), "status_code", None)
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        why = f"an error ({status})" if status else "no answer"
        hub = huggingface_hub.constants.ENDPOINT
        raise PushError(f"--push {repository}: {hub} gives {why}: {text}") from error
