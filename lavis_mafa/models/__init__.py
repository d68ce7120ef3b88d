"""Models registered with LAVIS."""

from lavis_mafa.models.downstream.albef_nlvr_mafa import AlbefNlvrMafa, AlbefNlvrPretrainMafa
from lavis_mafa.models.downstream.albef_ve_mafa import AlbefVeMafa
from lavis_mafa.models.downstream.albef_vqa_mafa import AlbefVqaMafa
from lavis_mafa.models.families.albef.albef_mafa import AlbefMafa
from lavis_mafa.models.families.blip.blip_mafa import BlipMafa
from lavis_mafa.models.families.blip2.blip2_mafa import Blip2Mafa
from lavis_mafa.models.families.blip2.blip2_opt_mafa import Blip2OptMafa
from lavis_mafa.models.families.blip2.blip2_t5_mafa import Blip2T5Mafa
from lavis_mafa.models.families.dual.fne_retrieval import FneRetrieval

__all__ = [
    "AlbefMafa",
    "AlbefNlvrMafa",
    "AlbefNlvrPretrainMafa",
    "AlbefVeMafa",
    "AlbefVqaMafa",
    "Blip2Mafa",
    "Blip2OptMafa",
    "Blip2T5Mafa",
    "BlipMafa",
    "FneRetrieval",
]
