"""What a model family must be able to do, one file a family."""

from lavis_mafa.backbones.albef import AlbefBackbone
from lavis_mafa.backbones.base import Backbone, Images, Texts
from lavis_mafa.backbones.match_head import MatchHead

__all__ = ["AlbefBackbone", "Backbone", "Images", "MatchHead", "Texts"]
