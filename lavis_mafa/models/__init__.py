"""Models registered with LAVIS."""

from lavis_mafa.models.albef_mafa import AlbefMafa

__all__ = ["AlbefMafa"]
