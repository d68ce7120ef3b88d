"""Configuration: the keys (`schema`), their checks (`check`) and loading (`load`)."""

from lavis_mafa.config.load import ConfigError, MafaConfig, format_config, load_config

__all__ = ["ConfigError", "MafaConfig", "format_config", "load_config"]
