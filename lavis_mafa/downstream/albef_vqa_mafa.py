"""ALBEF for visual question answering, fine-tuned from a checkpoint of this package."""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from lavis.common.registry import registry
from lavis.models.albef_models.albef_vqa import AlbefVQA
from lavis.models.med import BertLMHeadModel
from torch import Tensor
from transformers.models.bert.configuration_bert import BertConfig

from lavis_mafa.algorithm.losses.language import IGNORED, LM_SMOOTHING
from lavis_mafa.algorithm.options import Checked, option
from lavis_mafa.downstream.albef_downstream import AlbefDownstream
from lavis_mafa.downstream.yamls import model_yamls
from lavis_mafa.families.family import tokenize

# Pairs of a question and an answer at once; their logits over the vocabulary are large.
_PAIRS_PER_PASS = 512
_LAYER = re.compile(r"encoder\.layer\.(\d+)\.(.*)")


@dataclass(frozen=True)
class _AnswerOptions(Checked):
    """How answers enter the loss and the ranking.

    Raises:
        ValueError: if a value is out of range.
    """

    label_smoothing: float = option(
        LM_SMOOTHING,
        "share of an answer's tokens that is spread over the vocabulary in the loss; ALBEF: 0",
        source="LAVIS",
        low=0,
        high=1,
    )
    answer_sep_tokens: int = option(
        1, "number of [SEP] at the end of an answer; ALBEF's code: 2", source="LAVIS", low=1, high=2
    )


@registry.register_model("albef_vqa_mafa")
class AlbefVqaMafa(AlbefDownstream, AlbefVQA):
    """LAVIS's ``albef_vqa``: a decoder that starts as a copy of the fusion layers (ALBEF 4.2).

    Unlike LAVIS's model it starts from a checkpoint without momentum encoders, also trains without
    distillation (``use_distill: False``), and does not update its momentum encoders in evaluation.
    By default its losses are LAVIS's; ``label_smoothing`` and ``answer_sep_tokens`` select those of
    ALBEF's code. It ranks answers by their log-likelihood, LAVIS by the label-smoothed loss.

    Supported model types:
        - vqav2: ViT-B/16 at 384 px; by default with LAVIS's published weights for VQA v2.
        - tiny: built only from its config, for small images and tests.

    Usage:
        >>> from lavis_mafa import load_model
        >>> model = load_model("albef_vqa_mafa", "tiny")
    """

    PRETRAINED_MODEL_CONFIG_DICT = model_yamls("albef_vqa_mafa", "vqav2", "tiny")
    model_options = _AnswerOptions
    options = (
        "use_distill",
        "momentum",
        "alpha",
        "max_txt_len",
        "label_smoothing",
        "answer_sep_tokens",
    )
    heads = ("text_decoder.",)

    def __init__(
        self,
        label_smoothing: float = _AnswerOptions.label_smoothing,
        answer_sep_tokens: int = _AnswerOptions.answer_sep_tokens,
        **arguments: Any,
    ) -> None:
        """
        Args:
            label_smoothing, answer_sep_tokens: see `_AnswerOptions`.
            arguments: of `AlbefDownstream` and of LAVIS's class.
        """
        super().__init__(**arguments)
        self.answer_options = _AnswerOptions(label_smoothing, answer_sep_tokens)

    @classmethod
    def _language_parts(cls, config: BertConfig) -> dict[str, Any]:
        decoder = deepcopy(config)
        decoder.num_hidden_layers = config.num_hidden_layers - config.fusion_layer
        decoder.fusion_layer = 0  # every layer attends to the question
        # It attends to the states of the question, not to those of the image.
        decoder.encoder_width = config.hidden_size
        return {**super()._language_parts(config), "text_decoder": BertLMHeadModel(config=decoder)}

    def _convert_pretrained(self, state: dict[str, Tensor], origin: str) -> dict[str, Tensor]:
        fusion_layer = self.text_encoder.config.fusion_layer
        return {**state, **_decoder_from_fusion(state, fusion_layer)}

    def forward_decoder(
        self, samples: dict[str, Any], encoder_out: tuple[Any, Any], **_: Any
    ) -> tuple[Tensor, Any, Tensor]:
        """Compute the loss of all answers to B questions (ALBEF 4.2: VQA).

        An answer's loss is the sum of its tokens' cross-entropies, the first token excepted. With
        distillation a share of it is the cross-entropy to the momentum decoder's probabilities.

        Args:
            samples: ``answer``, the A answers to all questions; ``weight`` ``(A,)``; ``n_answers``
                ``(B,)``, the number of answers to each question; and the keys that
                `forward_encoder` added.
            encoder_out: states of the questions, of the model and of its momentum encoders.

        Returns:
            The loss, weighted over answers and averaged over questions; the decoder's output; its
            targets.
        """
        states, states_m = encoder_out
        answers = self._tokenized_answers(samples["answer"])
        targets = answers.input_ids.masked_fill(answers.attention_mask == 0, IGNORED)
        question_mask = samples["tokenized_text"].attention_mask
        question_of = torch.arange(len(question_mask), device=self.device)
        question_of = question_of.repeat_interleave(samples["n_answers"].to(self.device))
        if self.use_distill:
            with torch.no_grad():
                logits_m = self.text_decoder_m(
                    answers.input_ids,
                    attention_mask=answers.attention_mask,
                    encoder_hidden_states=states_m.last_hidden_state[question_of],
                    encoder_attention_mask=question_mask[question_of],
                    return_logits=True,
                )
        output = self.text_decoder(
            answers.input_ids,
            attention_mask=answers.attention_mask,
            encoder_hidden_states=states.last_hidden_state[question_of],
            encoder_attention_mask=question_mask[question_of],
            use_cache=False,
            return_dict=True,
        )
        logits, following = output.logits[:, :-1], targets[:, 1:]
        losses = F.cross_entropy(
            logits.flatten(0, 1),
            following.flatten(),
            reduction="none",
            label_smoothing=self.answer_options.label_smoothing,
        )
        losses = losses.view_as(following).sum(dim=1)
        if self.use_distill:
            soft = -(F.log_softmax(logits, dim=-1) * F.softmax(logits_m, dim=-1)).sum(dim=-1)
            soft = (soft * (following != IGNORED)).sum(dim=1)
            steps = samples["num_iters_per_epoch"]
            weight = self.alpha * self._rampup_factor(samples["epoch"], samples["iters"], steps)
            losses = (1 - weight) * losses + weight * soft
        output.loss = losses
        loss = (samples["weight"] * output.loss).sum() / len(question_mask)
        return loss, output, targets

    def predict_answers(
        self,
        samples: dict[str, Any],
        answer_list: Sequence[str] | None = None,
        num_ans_candidates: int = 128,
        inference_method: str = "rank",
        **_: Any,
    ) -> list[str]:
        """Return the likeliest answer to each of B questions (GRIT-VLP, supplement: VQA).

        Args:
            samples: ``image`` ``(B, 3, H, W)`` and ``text_input``, B questions.
            answer_list: the candidates.
            num_ans_candidates: number of candidates to rank: those with the likeliest first tokens.

        Raises:
            ValueError: if there is nothing to rank, or for another ``inference_method``.
        """
        if inference_method != "rank" or not answer_list or num_ans_candidates < 1:
            raise ValueError(
                f"albef_vqa_mafa ranks a list of answers, but got {inference_method!r} and "
                f"{len(answer_list or ())} answers; use run.inference_method: rank"
            )
        answers: list[str] = super().predict_answers(samples, list(answer_list), num_ans_candidates)
        return answers

    @torch.no_grad()
    def rank_answers(
        self, samples: dict[str, Any], answer_list: list[str], num_ans_candidates: int
    ) -> list[str]:
        """Rank candidates as in `predict_answers`, at most as many as the list has."""
        answers = self._tokenized_answers(answer_list)
        states, mask = self._encode_questions(samples)
        start = answers.input_ids[:1, :1].expand(len(states), -1)
        first = self._decode(start, torch.ones_like(start), states, mask)[:, 0]
        picked = first[:, answers.input_ids[:, 1]].topk(num_ans_candidates, dim=1).indices
        question_of = torch.arange(len(states), device=self.device)
        question_of = question_of.repeat_interleave(num_ans_candidates)
        scores = [
            self._log_likelihood(
                answers.input_ids[answer],
                answers.attention_mask[answer],
                states[question],
                mask[question],
            )
            for question, answer in zip(
                torch.split(question_of, _PAIRS_PER_PASS),
                torch.split(picked.flatten(), _PAIRS_PER_PASS),
                strict=True,
            )
        ]
        best = torch.cat(scores).view_as(picked).argmax(dim=1, keepdim=True)
        return [answer_list[number] for number in picked.gather(1, best).flatten().tolist()]

    def _tokenized_answers(self, answers: Sequence[str]) -> Any:
        """Return the tokens of A answers, ``input_ids`` and ``attention_mask`` ``(A, L)``."""
        # The tokenizer adds one [SEP].
        more = self.tokenizer.sep_token * (self.answer_options.answer_sep_tokens - 1)
        ended = [f"{answer}{more}" for answer in answers]
        return self.tokenizer(ended, padding="longest", return_tensors="pt").to(self.device)

    def _encode_questions(self, samples: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the states ``(B, L, D)`` of questions fused with their images, and their mask."""
        questions = tokenize(self, samples["text_input"], None)
        images = self.visual_encoder.forward_features(samples["image"])
        output = self.text_encoder.forward_automask(questions, images)
        return output.last_hidden_state, questions.attention_mask

    def _decode(self, ids: Tensor, ids_mask: Tensor, states: Tensor, mask: Tensor) -> Tensor:
        """Return log-probabilities ``(P, L, V)`` of the token after each of ``ids`` ``(P, L)``."""
        output = self.text_decoder(
            ids,
            attention_mask=ids_mask,
            encoder_hidden_states=states,
            encoder_attention_mask=mask,
            return_dict=True,
        )
        return F.log_softmax(output.logits.float(), dim=-1)

    def _log_likelihood(
        self, ids: Tensor, ids_mask: Tensor, states: Tensor, mask: Tensor
    ) -> Tensor:
        """Return the log-likelihoods ``(P,)`` of answers ``(P, L)``, given their first token."""
        log_p = self._decode(ids, ids_mask, states, mask)[:, :-1]
        of_tokens = log_p.gather(2, ids[:, 1:, None]).squeeze(2)
        return (of_tokens * ids_mask[:, 1:]).sum(dim=1)


def _decoder_from_fusion(state: dict[str, Tensor], fusion_layer: int) -> dict[str, Tensor]:
    """Return the initial weights of an answer decoder, copied from a pre-trained text encoder.

    These are its fusion layers, embeddings and language head (ALBEF 4.2; GRIT-VLP, supplement).

    Args:
        state: of a pre-trained model, with or without momentum encoders.
        fusion_layer: the first layer that attends to images.

    Returns:
        ``text_decoder.*``, and ``text_decoder_m.*`` if there is a momentum encoder.
    """
    decoder = {}
    for key, value in state.items():
        part, _, name = key.partition(".")
        if part not in ("text_encoder", "text_encoder_m"):
            continue
        inner = name.removeprefix("bert.")
        layer = _LAYER.fullmatch(inner)
        if layer and int(layer[1]) < fusion_layer:
            continue
        if layer:
            inner = f"encoder.layer.{int(layer[1]) - fusion_layer}.{layer[2]}"
        within = "" if inner.startswith("cls.") else "bert."
        decoder[f"{part.replace('encoder', 'decoder')}.{within}{inner}"] = value
    return decoder
