"""The file of a discriminator's calibrated thresholds.

`lavis-mafa label quality --output` writes it, and ``model.mafa.connections.calibration`` of a
config names it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, FiniteFloat, ValidationError, model_validator

from lavis_mafa.io.files import write_json

_Share = Annotated[FiniteFloat, Field(ge=0, le=1)]
_Count = Annotated[int, Field(ge=1)]


class CalibratedThresholds(BaseModel, strict=True, frozen=True, extra="forbid"):
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

    kind: Literal["lavis_mafa calibration"] = "lavis_mafa calibration"
    version: Literal[1] = 1
    high: _Share
    low: _Share | None
    wanted: _Share
    wanted_low: _Share | None
    precision: _Share
    precision_from: _Share
    precision_to: _Share
    recall: _Share
    pairs_above: _Count
    pairs: _Count
    base_rate: _Share
    name: str
    truth: str

    @model_validator(mode="after")
    def _check_order(self) -> CalibratedThresholds:
        if self.low is not None and self.low > self.high:
            raise ValueError(f"low: {self.low:g}, expected at most high, {self.high:g}")
        return self

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file atomically."""
        write_json(Path(path), self.model_dump())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CalibratedThresholds:
        """Read the file.

        Raises:
            OSError: if it cannot be read.
            ValueError: if it is another file, or damaged.
        """
        try:
            return cls.model_validate_json(Path(path).read_bytes())
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            raise ValueError(
                "is no calibration, which `lavis-mafa label quality --output` writes: "
                f"{where}: {first['msg']}, got {first['input']!r:.80}"
            ) from error
