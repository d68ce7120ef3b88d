"""Configuration: keys (`schema`, `registered`), their checks (`check`) and loading (`load`).

The names below are loaded on first use, so that importing a module of this room loads no other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lavis_mafa.io.problems import ConfigError
    from lavis_mafa.settings.load import MafaConfig, format_config, load_config

__all__ = ["ConfigError", "MafaConfig", "format_config", "load_config"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lavis_mafa.settings import load

    return getattr(load, name)
