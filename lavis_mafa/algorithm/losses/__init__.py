"""Losses of the step: functions of a `StepContext`, registered in `LOSSES`.

Each module holds the tensor functions and the losses that use them. A loss is computed if its
``model.mafa.loss_weights.<name>`` is above 0.
"""

from lavis_mafa.algorithm.labels import consistency_loss
from lavis_mafa.algorithm.losses.contrastive import contrastive_loss, itc
from lavis_mafa.algorithm.losses.language import lm
from lavis_mafa.algorithm.losses.matching import itm, matching_losses
from lavis_mafa.algorithm.losses.tcl import imc, lmi
from lavis_mafa.algorithm.registry import LOSSES

__all__ = ["LOSSES", "consistency_loss", "contrastive_loss", "matching_losses"]

# In the order of computation, which decides MLM's random masks.
LOSSES.register("itc", source="MAFA eq. 1 and 5")(itc)
LOSSES.register("imc", source="TCL")(imc)
LOSSES.register("lmi", source="TCL")(lmi)
LOSSES.register("itm", source="MAFA eq. 3")(itm)
LOSSES.register("lm", source="MAFA eq. 4")(lm)
