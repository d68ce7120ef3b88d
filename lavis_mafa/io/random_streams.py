"""The random generators of this process: their states, and work that must not change them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def random_states() -> dict[str, Any]:
    """Return the state of every random generator of this process, as plain values and tensors."""
    python = random.getstate()
    numpy: Any = np.random.get_state()
    return {
        "python": [python[0], list(python[1]), python[2]],
        # As int64: older versions of torch have no uint32.
        "numpy": [numpy[0], torch.from_numpy(numpy[1].astype(np.int64)), *numpy[2:]],
        "torch": torch.get_rng_state(),
        # Only where CUDA is in use: asking for the state would open a context on the device.
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Restore what `random_states` returned."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"].cpu())
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"].cpu())


@contextmanager
def unchanged_random_streams() -> Iterator[None]:
    """Restore all random generators afterwards, so that what draws inside changes no training."""
    before = random_states()
    try:
        yield
    finally:
        set_random_states(before)
