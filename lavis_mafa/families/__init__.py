"""Models registered with LAVIS."""

from lavis_mafa.models.families.albef.albef_mafa import AlbefMafa
from lavis_mafa.models.families.blip.blip_mafa import BlipMafa
from lavis_mafa.models.families.blip2.blip2_mafa import Blip2Mafa
from lavis_mafa.models.families.dual.fne_retrieval import FneRetrieval

__all__ = [
    "AlbefMafa",
    "Blip2Mafa",
    "BlipMafa",
    "FneRetrieval",
]
