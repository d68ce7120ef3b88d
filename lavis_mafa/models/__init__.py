"""Models registered with LAVIS."""

from lavis_mafa.models.albef_mafa import AlbefMafa
from lavis_mafa.models.blip2_mafa import Blip2Mafa
from lavis_mafa.models.blip2_opt_mafa import Blip2OptMafa
from lavis_mafa.models.blip2_t5_mafa import Blip2T5Mafa
from lavis_mafa.models.blip_mafa import BlipMafa

__all__ = ["AlbefMafa", "Blip2Mafa", "Blip2OptMafa", "Blip2T5Mafa", "BlipMafa"]
