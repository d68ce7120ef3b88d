"""Tasks registered with LAVIS."""

from lavis_mafa.tasks.mafa_pretrain import MafaPretrainTask
from lavis_mafa.tasks.mafa_retrieval import MafaRetrievalTask

__all__ = ["MafaPretrainTask", "MafaRetrievalTask"]
