"""Find the weights in checkpoints of other training tools: other keys, names with prefixes."""

from __future__ import annotations

import functools
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

# Keys under which tools save a state dict (DeepSpeed: module); of several, the first is read.
# Averaged weights (EMA) come last: they are read where a file has no others.
_STATES = (
    *("model", "state_dict", "model_state_dict", "module", "net", "weights", "params"),
    *("model_ema", "ema", "state_dict_ema", "ema_state_dict", "shadow"),
)
# What torch.compile, FSDP, activation checkpointing and Lightning put into names, anywhere.
_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}
# Attributes that hold the model in DDP, in a LightningModule and the like.
_HOLDERS = re.compile(r"(?:(?:module|model|net|network|student)\.)*")
# A weight of a LAVIS model: group 1 is what stands in front of its own name.
_OF_LAVIS = re.compile(r"(?:(.+?)\.)??(?:visual_encoder|text_encoder|Qformer)\.")


def unwrapped(content: dict[str, Any], origin: str) -> dict[str, Any]:
    """Return a checkpoint with the model's state dict under ``model`` and plain names.

    A checkpoint that has that form already is returned unchanged. What is renamed or left out is
    logged.

    Args:
        content: of the file, of any training tool.
        origin: its path, for messages.

    Raises:
        ValueError: if it holds several models, and none has a known name; or a weight twice.
    """
    flat = any("." in str(key) and isinstance(value, Tensor) for key, value in content.items())
    states = {} if flat else dict(_states_in(content))
    known = [name for one in _STATES for name in states if name.split(".")[0] == one]
    place = _only(known[:1] or list(states), origin, "keys") if states else None
    state: Mapping[str, Any] = states[place] if place else content
    names = {key: _without_wrappers(str(key)) for key in state}
    start = _start_of(list(names.values()), origin)
    weights = {
        name.removeprefix(start): state[key]
        for key, name in names.items()
        if name.startswith(start)
    }
    if len(weights) < sum(name.startswith(start) for name in names.values()):
        twice = next(n for n, c in Counter(names.values()).items() if c > 1)
        raise ValueError(
            f"{origin} holds {twice[:120]!r} twice, with and without a prefix of torch.compile or "
            "FSDP. Save the weights of one model as {'model': state_dict}"
        )
    words = [f"the weights are those of key {place!r}"] if place not in (None, "model") else []
    if weights.keys() != state.keys():
        example = next(str(key) for key in state if key not in weights)
        words.append(f"names such as {example[:120]!r} are read without their prefixes")
    if words:
        _log(logging.INFO, f"{origin}: {', and '.join(words)}")
    unread = [one for one in states if one != place]
    unread += [name for name in names.values() if not name.startswith(start)]
    if unread:
        shown = ", ".join(one[:120] for one in unread[:5])
        _log(logging.WARNING, f"{origin}: {len(unread)} entries are not read, such as {shown}")
    return {**(content if place else {}), "model": weights} if words else content


def _states_in(content: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the state dicts below a mapping, by their keys."""
    for key, value in content.items():
        if not isinstance(value, Mapping):
            continue
        if any("." in str(name) and isinstance(one, Tensor) for name, one in value.items()):
            yield f"{above}{key}", value
        elif key in _STATES and above.count(".") < 2:  # such as {"ema": {"shadow": weights}}
            yield from _states_in(value, f"{above}{key}.")


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _start_of(names: list[str], origin: str) -> str:
    """Return what stands in front of all names of a model; "" if nothing does."""
    found = {match[1] for match in map(_OF_LAVIS.match, names) if match}
    if found and None not in found:
        usual = [one for one in sorted(found) if _HOLDERS.fullmatch(f"{one}.")]
        return _only(usual if len(usual) == 1 else sorted(found), origin, "models") + "."
    if found or not names:
        return ""
    # A model of other parts: what all its names begin with.
    held = _HOLDERS.match(os.path.commonprefix(names))
    return held[0] if held else ""


def _only(found: list[str], origin: str, what: str) -> str:
    if len(found) > 1:
        raise ValueError(
            f"{origin} holds several {what}: {', '.join(found)[:300]}. Expected the weights of one "
            "model. Save those that you mean as {'model': state_dict}"
        )
    return found[0]


@functools.lru_cache  # a file is read several times before training
def _log(level: int, text: str) -> None:
    logging.log(level, "%s", text)
