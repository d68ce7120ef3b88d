"""Tasks registered with LAVIS."""

from lavis_mafa.tasks.mafa_captioning import MafaCaptionTask
from lavis_mafa.tasks.mafa_classification import MafaClassificationTask, MafaTextAssignmentTask
from lavis_mafa.tasks.mafa_grounding import MafaGroundingTask
from lavis_mafa.tasks.mafa_pretrain import MafaPretrainTask
from lavis_mafa.tasks.mafa_retrieval import MafaRetrievalTask
from lavis_mafa.tasks.mafa_vqa import MafaGQATask, MafaVQATask

__all__ = [
    "MafaCaptionTask",
    "MafaClassificationTask",
    "MafaGQATask",
    "MafaGroundingTask",
    "MafaPretrainTask",
    "MafaRetrievalTask",
    "MafaTextAssignmentTask",
    "MafaVQATask",
]
