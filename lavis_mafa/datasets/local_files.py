"""Files and folders of LAVIS's builders that exist locally are used where they are."""

from __future__ import annotations

import os
from typing import Any


class UseLocalFiles:
    """Mixin before a builder of LAVIS, which copies annotation files into its cache.

    A copy is made once and ignores later edits. Relative paths are those of the working directory.
    """

    def build_datasets(self) -> Any:
        builder: Any = self
        info = builder.config.build_info
        for split in info.annotations.values():
            for found in (split.get("url"), split.storage):
                if isinstance(found, str) and os.path.isfile(found):
                    split.url = split.storage = os.path.abspath(found)
                    break
        if os.path.isdir(info.images.storage):
            info.images.storage = os.path.abspath(info.images.storage)
        return super().build_datasets()  # type: ignore[misc]
