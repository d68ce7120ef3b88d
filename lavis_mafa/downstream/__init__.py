"""Downstream tasks: NLVR2, visual entailment, VQA, grounding, captioning, and BLIP-2's stage 2.

Importing this package registers its models, tasks and data sets with LAVIS. LAVIS's registry does
so when it is asked for a name that is not registered, see `lavis_mafa.compat.registration`; nothing
else in this package imports it.
"""

# ruff: noqa: F401

from lavis_mafa.downstream.albef_nlvr_mafa import AlbefNlvrMafa, AlbefNlvrPretrainMafa
from lavis_mafa.downstream.albef_ve_mafa import AlbefVeMafa
from lavis_mafa.downstream.albef_vqa_mafa import AlbefVqaMafa
from lavis_mafa.downstream.blip2_opt_mafa import Blip2OptMafa
from lavis_mafa.downstream.blip2_t5_mafa import Blip2T5Mafa
from lavis_mafa.downstream.lavis_data import NlvrMafaBuilder, VgVqaMafaBuilder
from lavis_mafa.downstream.mafa_captioning import MafaCaptionTask
from lavis_mafa.downstream.mafa_classification import MafaClassificationTask, MafaTextAssignmentTask
from lavis_mafa.downstream.mafa_grounding import MafaGroundingTask
from lavis_mafa.downstream.mafa_vqa import MafaGQATask, MafaVQATask
from lavis_mafa.downstream.refcoco import RefCocoPlusBuilder
