"""A trainer of CLIP, SigLIP and the like with the losses of this package.

::

    train = numbered(train)  # columns: the model's inputs
    MinedTrainer(model, arguments, train_dataset=train, grit=Grit(train)).train()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.integrations.cross_encoders import pixels_of, tokens_of
from lavis_mafa.integrations.grit_callback import Grit, GroupedOrder, KeepLoss
from lavis_mafa.integrations.pair_loss import PairLoss, numbers_of
from lavis_mafa.integrations.rows import ROW, numbered

__all__ = ["Grit", "MinedTrainer", "PairCollator", "numbered"]


class PairCollator:
    """Makes the inputs of a CLIP or SigLIP from rows with a picture and a caption.

    Captions are padded and cut to the model's own length, which SigLIP needs. Pictures of every
    mode are read as viewers show them. Numbers of rows (`numbered`) are kept.

    Args:
        processor: of the model.
        model: its config says how long captions are.
        image, text: columns of the rows.
    """

    def __init__(self, processor: Any, model: Any, image: str = "image", text: str = "text"):
        self.processor, self.image, self.text = processor, image, text
        self.config = model.config.text_config

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return ``pixel_values``, the tokens and, if the rows have numbers, ``labels``."""
        texts = [row[self.text] for row in rows]
        batch = dict(tokens_of(self.processor, texts, self.config, "max_length"))
        batch["pixel_values"] = pixels_of(self.processor, [row[self.image] for row in rows])
        if ROW in rows[0]:
            batch["labels"] = torch.tensor([row[ROW] for row in rows])
        return batch


class MinedTrainer(Trainer):
    """transformers' Trainer for models that return ``image_embeds`` and ``text_embeds``.

    Without settings and judge the loss is the model's own (``return_loss=True``) on one process; on
    several ranks, candidates come from all ranks. It is the mean of a mini-batch, which the Trainer
    divides by ``gradient_accumulation_steps``. Checkpoints have what the loss learns. In
    evaluation, pairs are judged where the judge has their rows; otherwise the loss of an evaluation
    set is that without mining.

    Args:
        model: a ``CLIPModel``, ``SiglipModel`` or the like; with ``logit_bias`` the loss is a
            sigmoid of every pair, as SigLIP's.
        args: arguments of training.
        judge: a `lavis_mafa.integrations.cross_encoders.PairJudge` or another
            `lavis_mafa.Discriminator`; rows need the numbers of `numbered`.
        grit: groups mini-batches of ``train_dataset``.
        settings: all settings of the step; None: from plain ones.
        rest, named: of ``Trainer``; other names are plain settings, such as ``rule`` and ``high``,
            see `lavis_mafa.integrations.pair_loss.settings_of`.

    Raises:
        TypeError, ValueError: if the settings are wrong, the model has no scale of its logits, or
            ``grit`` has other rows than ``train_dataset``.
    """

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *rest: Any,
        settings: StepSettings | None = None,
        judge: Any = None,
        grit: Grit | None = None,
        **named: Any,
    ) -> None:
        known = signature(Trainer.__init__).parameters
        options = {name: named.pop(name) for name in [*named] if name not in known}
        super().__init__(model, args, *rest, **named)
        if self.compute_loss_func is not None or self.args.label_smoothing_factor:
            raise ValueError(
                "MinedTrainer has a loss of its own, without compute_loss_func and "
                "label_smoothing_factor: leave them out; label_smoothing=0.1 is a setting of it"
            )
        strategy = getattr(self.args, "train_sampling_strategy", "random")
        if grit is not None and strategy != "random":
            raise ValueError(f"got grit and train_sampling_strategy={strategy!r}: give one of them")
        if isinstance(self.data_collator, PairCollator):
            self.args.remove_unused_columns = False  # pictures are no input of the model
        if not hasattr(self.model, "logit_scale"):
            raise ValueError(
                f"got {type(self.model).__name__}, expected a model with logit_scale, image_embeds "
                "and text_embeds, such as CLIPModel or SiglipModel"
            )
        self.model_accepts_loss_kwargs = False  # the Trainer divides the loss, not the model
        loss = PairLoss(
            settings,
            judge,
            grit=grit,
            all_ranks=True,
            model_bias=hasattr(self.model, "logit_bias"),
            arguments=known,
            **options,
        )
        self.mined_loss = loss.to(self.args.device)
        self.grit = grit
        # Before the callbacks of TensorBoard and the like, which record what the log has by then.
        self.callback_handler.callbacks.insert(0, KeepLoss(self.mined_loss))
        if grit is not None:
            self.add_callback(grit)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        if self.grit is None:
            return super()._get_train_sampler(train_dataset)
        dataset = self.train_dataset if train_dataset is None else train_dataset
        batches = self.grit.batch_sampler(dataset, self._train_batch_size, seed=self.args.seed)
        if not isinstance(batches.sampler, GroupedOrder):
            raise ValueError("Grit has other rows than train_dataset: give both the same data set")
        return batches.sampler

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Return the optimizer, which also has the parameters of the loss."""
        optimizer = super().create_optimizer(*args, **kwargs)
        known = {id(one) for group in optimizer.param_groups for one in group["params"]}
        learned = [one for one in self.mined_loss.parameters() if id(one) not in known]
        if learned:
            optimizer.add_param_group({"params": learned, "weight_decay": 0.0})
        return optimizer

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return the loss of a mini-batch, and the model's outputs if they are asked for."""
        inputs, loss = dict(inputs), self.mined_loss
        numbers, training = numbers_of(inputs.pop("labels", None)), model.training
        found, own = model(**inputs), self.accelerator.unwrap_model(model)
        value = loss.itc(
            (found.image_embeds, found.text_embeds),
            own.logit_scale.exp(),
            {"loaded_index": numbers},
            training,
            loss.judges(numbers, training),
            getattr(own, "logit_bias", None),
        )
        return (value, found) if return_outputs else value

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor, Any, Any]:
        """Return the loss of an evaluation mini-batch and, for ``compute_metrics``, the embeddings
        of both sides and the numbers of the rows (from 0 on in a mini-batch without numbers)."""
        with torch.no_grad(), self.compute_loss_context_manager():
            given = self._prepare_inputs(inputs)
            loss, found = self.compute_loss(model, given, return_outputs=True)
        if prediction_loss_only:
            return loss.detach(), None, None
        embeds = found.image_embeds, found.text_embeds
        unknown = torch.arange(len(embeds[0]), device=embeds[0].device)
        return loss.detach(), embeds, given.get("labels", unknown)
