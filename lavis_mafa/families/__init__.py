"""The model families that are registered with LAVIS."""

from lavis_mafa.families.albef_mafa import AlbefMafa
from lavis_mafa.families.blip2_mafa import Blip2Mafa
from lavis_mafa.families.blip_mafa import BlipMafa
from lavis_mafa.families.fne_retrieval import FneRetrieval

__all__ = [
    "AlbefMafa",
    "Blip2Mafa",
    "BlipMafa",
    "FneRetrieval",
]
