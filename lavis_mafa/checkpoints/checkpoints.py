"""Find config files, read checkpoints, and describe what they hold."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import time
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lavis_mafa.checkpoints.downloads import local_file
from lavis_mafa.checkpoints.hub_folders import read_hub_folder, read_safetensors
from lavis_mafa.io.files import require_regular

# Types of weights.
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_FLOAT_NAMES = "float16, bfloat16, float32 or float64"
# What DDP and Lightning put in front of all names, and torch.compile into those of compiled parts.
_WRAPPERS = ("module.", "model.")
_COMPILED = "_orig_mod."
# Queues: buffers of models, which belong to the run that filled them.
RUN_STATE_KEYS = (
    "image_queue",
    "text_queue",
    "idx_queue",
    "group_queue",
    "queue_ptr",
)
# Class attribute of modules whose whole state is of that kind; and a checkpoint's list of them.
STATE_OF_RUN = "state_of_run"
_ZIP_FOLDER = 0x10  # attribute bit by which a zip marks a record as a folder
_CLOCK_RESOLUTION_NS = 1_000_000_000  # ns; file systems may store times with less precision
# Files whose checksums were found right, by path: inode, size and times at that moment.
_INTACT: dict[str, tuple[int, ...]] = {}


def read_checkpoint(url_or_filename: str, mapped: bool = False) -> dict[str, Any]:
    """Load a checkpoint to the CPU, tensors and plain values only.

    The weights may also be under ``state_dict``, and their names may have the prefixes of DDP,
    Lightning or torch.compile: they are returned under ``model`` with plain names.

    Args:
        url_or_filename: a file of ``torch.save`` or safetensors, its URL, or a folder of Hugging
            Face transformers, see `lavis_mafa.checkpoints.hub_folders`.
        mapped: map tensors from the file and read them only when used; fast where only names,
            shapes and plain values are needed. The file must not be written to meanwhile.

    Raises:
        FileNotFoundError: if the file does not exist.
        ValueError: if the file is not a checkpoint, or a pipe or device; is damaged or altered;
            or holds pickled objects, which could run code when loaded.
    """
    path = local_file(url_or_filename)
    if not os.path.exists(path):
        raise FileNotFoundError(f"no checkpoint at {path} (seen from {os.getcwd()})")
    if os.path.isdir(path):
        checkpoint = read_hub_folder(path)
    elif path.endswith(".safetensors"):
        checkpoint = {"model": read_safetensors(path)}
    else:
        require_regular(path)
        checkpoint = _read_torch_file(path, mapped)
    # Our runner saves the names of its model, whatever they begin with.
    return checkpoint if STATE_OF_RUN in checkpoint else _unwrapped(checkpoint, path)


def _unwrapped(content: dict[str, Any], origin: str) -> dict[str, Any]:
    """Return a checkpoint with its state dict under ``model`` and the plain names of weights.

    Raises:
        ValueError: if a weight occurs with and without a wrapper.
    """
    key = next((one for one in ("model", "state_dict") if isinstance(content.get(one), dict)), None)
    state = content[key] if key else content
    names = [str(name).replace(_COMPILED, "") for name in state]
    prefix = _common_wrapper(names)
    while prefix:
        names = [name.removeprefix(prefix) for name in names]
        prefix = _common_wrapper(names)
    if key != "state_dict" and names == list(map(str, state)):
        return content
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{origin} holds {twice!r} twice, with and without {_COMPILED!r}")
    logging.info("%s: the prefixes of wrappers are removed from the names of weights", origin)
    weights = dict(zip(names, state.values(), strict=True))
    return {**content, "model": weights} if key else {"model": weights}


def _common_wrapper(names: list[str]) -> str:
    """Return the wrapper's prefix that all names begin with; "" if there is none."""
    return next((one for one in _WRAPPERS if names and all(n.startswith(one) for n in names)), "")


def _read_torch_file(path: str, mapped: bool) -> dict[str, Any]:
    damage = _damage_of(path)
    if damage is not None:
        raise ValueError(
            f"{path} cannot be loaded: it is not as it was saved: {damage}. Its "
            f"{os.path.getsize(path)} bytes are cut short, damaged or repacked. Copy it again, or "
            "give another checkpoint"
        )
    try:
        checkpoint = torch.load(
            path, map_location="cpu", weights_only=True, mmap=mapped and _begins_as_zip(path)
        )
    # A damaged file makes torch raise nearly anything.
    except Exception as error:
        with open(path, "rb") as file:
            head = file.read(20)
        if not head.startswith((b"PK", b"\x80")):  # neither a zip nor an older version's pickle
            raise ValueError(
                f"{path} cannot be loaded: its {os.path.getsize(path)} bytes begin with {head!r}, "
                "expected a file of torch.save. Fetch or unpack it again"
            ) from error
        # torch's own message advises to switch off `weights_only`, which would run the code.
        called = re.search(r"GLOBAL (\S+)", str(error))
        why = "it is cut short, or holds objects other than tensors and plain values"
        if called:
            why = f"it refers to {called[1]}, which is code"
        raise ValueError(
            f"{path} cannot be loaded as tensors and plain values: {why}. If you trust its "
            "origin, load it elsewhere and save only its state dict, as {'model': state_dict}."
        ) from error
    if not isinstance(checkpoint, dict):
        raise ValueError(f"{path} holds a {type(checkpoint).__name__}, expected a dictionary")
    return checkpoint


def is_intact(path: str | os.PathLike[str]) -> bool:
    """Return whether a file of ``torch.save`` exists and its checksums are right."""
    try:
        return os.path.isfile(path) and _begins_as_zip(path) and _damage_of(path) is None
    except OSError:
        return False


def _damage_of(path: str | os.PathLike[str]) -> str | None:
    """Describe what is wrong with a checkpoint's file; None if nothing is.

    ``torch.save`` writes a zip with a CRC32 of every record, which ``torch.load`` does not check:
    a flipped bit loads as another weight. Files without checksums (torch's format before 1.6, or
    ``torch.serialization.set_crc32_options(False)``) are accepted.

    The file is read once, in chunks, and not again while its size and times stay the same.
    """
    if not _begins_as_zip(path):
        return None
    stat = os.stat(path)
    stamp = (stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    name = os.path.abspath(path)
    if _INTACT.get(name) == stamp:
        return None
    began = time.time_ns()
    try:
        with zipfile.ZipFile(path) as file:
            records = file.infolist()
            # For a folder torch would return uninitialised memory.
            if any(record.external_attr & _ZIP_FOLDER for record in records):
                return "a record is marked as a folder"
            # A compressed record could unpack to any size, and cannot be memory-mapped.
            if any(record.compress_type != zipfile.ZIP_STORED for record in records):
                return "its records are compressed, which torch.save does not do"
            damaged = file.testzip() if any(record.CRC for record in records) else None
            if damaged:
                return f"Bad CRC-32 for file {damaged!r}"
    except Exception as error:  # a damaged directory can raise nearly anything
        return str(error) or type(error).__name__
    # A file written within the clock's resolution could change again without a new time.
    if began - max(stamp[2:]) > _CLOCK_RESOLUTION_NS:
        _INTACT[name] = stamp
    return None


def _begins_as_zip(path: str | os.PathLike[str]) -> bool:
    """Return whether a file has the first bytes of ``torch.save``'s format."""
    with open(path, "rb") as file:
        return file.read(4) == b"PK\x03\x04"


def problem_of_types(state: dict[str, Tensor], own: dict[str, Tensor]) -> str | None:
    """Return a message about the first weight that is not floating-point but is in the model.

    Args:
        own: the model's state dict.
    """
    for key, value in state.items():
        if key in own and own[key].dtype in _FLOATS and value.dtype not in _FLOATS:
            name = str(value.dtype).removeprefix("torch.")
            return f"{key} is of type {name}, expected {_FLOAT_NAMES} (Tensor.float())"
    return None


def run_state_of(model: nn.Module) -> list[str]:
    """Return the prefixes of the names of a model's weights that are state of a run.

    They are those of its modules, however deep, with a true attribute ``state_of_run``.
    """
    modules = model.named_modules()
    return [f"{name}." for name, one in modules if name and getattr(one, STATE_OF_RUN, False)]


def weights_of(content: dict[str, Any], of_run: Sequence[str] = ()) -> Any:
    """Return the weights of a checkpoint, without the state of the run that saved them.

    Anything other than a state dict is returned unchanged, for `load_state` to refuse.

    Args:
        content: of the file.
        of_run: prefixes of further names to leave out, see `run_state_of`; those that the
            checkpoint lists are left out in any case.
    """
    state = content.get("model", content)
    if not isinstance(state, dict):
        return state
    listed = content.get(STATE_OF_RUN)
    listed = [one for one in listed if isinstance(one, str)] if isinstance(listed, list) else []
    left_out = (*RUN_STATE_KEYS, *listed, *of_run)
    return {key: value for key, value in state.items() if not str(key).startswith(left_out)}


def vocabulary_of(tokenizer: Any) -> str | None:
    """Return a hash of a tokenizer's words and ids, which checkpoints record."""
    if not hasattr(tokenizer, "get_vocab"):
        return None
    words = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(words.encode()).hexdigest()[:16]


def model_config(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``model`` config recorded in a checkpoint; empty if there is none."""
    config = content.get("config")
    model = config.get("model") if isinstance(config, dict) else None
    return model if isinstance(model, dict) else {}


def problem_of_state(state: Any, origin: str) -> str | None:
    """Return a message if a checkpoint's content is not a state dict, else None."""
    if not isinstance(state, dict):
        found = f"a {type(state).__name__}"
    else:
        wrong = (key for key, value in state.items() if not isinstance(value, Tensor))
        other = next((key for key in state if not isinstance(key, str)), next(wrong, None))
        if other is None:
            return None
        found = f"a {type(state[other]).__name__} as {str(other)[:80]!r}"
    return (
        f"{origin} holds no state dict, but {found}: expected names of weights with tensors. Save "
        "the weights as {'model': state_dict}"
    )


def not_resumable_message(origin: str) -> str:
    """Return the message that a checkpoint cannot be resumed from, and how it can be used."""
    return (
        f"{origin} holds weights, but no state of a run of this runner; give it as "
        "model.pretrained to start from its weights"
    )
