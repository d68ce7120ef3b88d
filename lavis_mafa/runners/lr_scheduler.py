"""A learning rate that is lowered twice (FNE)."""

from __future__ import annotations

from lavis.common.optims import LinearWarmupStepLRScheduler, warmup_lr_schedule
from lavis.common.registry import registry

_DROPS = (1, 5), (3, 5)  # shares of the epochs after which it drops: 5 and 15 of FNE's 25


@registry.register_lr_scheduler("linear_warmup_drops_lr")
class LinearWarmupDropsLRScheduler(LinearWarmupStepLRScheduler):
    """``init_lr``, times ``lr_decay_rate`` (default 0.1) after 1/5 and again after 3/5 of the
    epochs, at least ``min_lr``; with the linear warm-up of LAVIS's schedulers."""

    def step(self, cur_epoch: int, cur_step: int) -> None:
        if cur_epoch == 0:
            warmup_lr_schedule(
                self.optimizer, cur_step, self.warmup_steps, self.warmup_start_lr, self.init_lr
            )
            return
        drops = sum(cur_epoch * whole >= part * self.max_epoch for part, whole in _DROPS)
        rate = 0.1 if self.decay_rate is None else self.decay_rate
        for group in self.optimizer.param_groups:
            group["lr"] = max(self.min_lr, self.init_lr * rate**drops)
