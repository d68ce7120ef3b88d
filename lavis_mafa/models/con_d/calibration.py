"""The file of a discriminator's calibrated thresholds.

`lavis-mafa label quality --precision` writes it, and ``model.mafa.connections.calibration`` of a
config names it.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lavis_mafa.io.files import is_number, write_json

_KIND = "lavis_mafa calibration"
_VERSION = 1


@dataclass(frozen=True)
class CalibratedThresholds:
    """Thresholds of a discriminator that reach a wanted precision, and what they stand on.

    Attributes:
        high: the smallest threshold above which the share of matches is at least ``wanted``.
        low: the same for ``wanted_low``; None: not calibrated.
        wanted, wanted_low: precision, above 0 and at most 1.
        precision, recall: at ``high``; ``precision_from`` and ``precision_to`` are the 95 %
            interval of the precision.
        pairs_above: number of pairs above ``high``; pairs: number of pairs with known truth.
        base_rate: share of matches among the pairs.
        name: of the discriminator; truth: origin of the truth.
    """

    high: float
    low: float | None
    wanted: float
    wanted_low: float | None
    precision: float
    precision_from: float
    precision_to: float
    recall: float
    pairs_above: int
    pairs: int
    base_rate: float
    name: str
    truth: str

    def __post_init__(self) -> None:
        shares = {
            one.name: getattr(self, one.name)
            for one in fields(self)
            if one.name not in ("pairs_above", "pairs", "name", "truth")
        }
        for name, value in shares.items():
            may_lack = name in ("low", "wanted_low")
            if not (may_lack and value is None) and not _is_share(value):
                raise ValueError(f"{name}: {value!r}, expected a number from 0 to 1")
        if self.low is not None and self.low > self.high:
            raise ValueError(f"low: {self.low:g}, expected at most high, {self.high:g}")
        for name in ("pairs_above", "pairs"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}: {value!r}, expected a whole number from 1")
        for name in ("name", "truth"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name}: {getattr(self, name)!r}, expected text")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file atomically."""
        write_json(Path(path), {"kind": _KIND, "version": _VERSION, **asdict(self)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CalibratedThresholds:
        """Read the file.

        Raises:
            OSError: if it cannot be read.
            ValueError: if it is another file, or damaged.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"is not JSON: {error}") from error
        head = {"kind": _KIND, "version": _VERSION}
        found = {key: content.get(key) for key in head} if isinstance(content, dict) else None
        if found != head:
            raise ValueError(
                f"is no calibration: it has {found}, expected {head}; `lavis-mafa label "
                "quality --precision` writes one"
            )
        values = {key: value for key, value in content.items() if key not in head}
        known = {one.name for one in fields(cls)}
        if values.keys() != known:
            missing, unknown = sorted(known - values.keys()), sorted(values.keys() - known)
            raise ValueError(f"is damaged: missing keys {missing}, unknown keys {unknown}")
        try:
            return cls(**values)
        except ValueError as error:
            raise ValueError(f"is damaged: {error}") from error


def _is_share(value: Any) -> bool:
    return is_number(value) and 0 <= value <= 1
