"""BLIP-2's stage 2 with OPT: generates captions and answers to questions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from lavis.common.registry import registry
from lavis.models.blip2_models.blip2_opt import Blip2OPT
from lavis.models.blip2_models.modeling_opt import OPTForCausalLM
from torch import Tensor
from transformers.models.auto.tokenization_auto import AutoTokenizer

from lavis_mafa.algorithm.losses.language import IGNORED
from lavis_mafa.downstream.language_model import Blip2Llm, check_prompt
from lavis_mafa.downstream.tiny_language_models import tiny_opt
from lavis_mafa.downstream.yamls import model_yamls
from lavis_mafa.families.beams import OneRowPerBeam
from lavis_mafa.families.blip2_parts import Parts

_PRECISIONS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class _PromptedOPT(OneRowPerBeam, OPTForCausalLM):
    """LAVIS's OPT, made to generate with every supported version of transformers.

    It reuses keys and values of earlier tokens, which LAVIS's own recomputes for every token.
    """


@registry.register_model("blip2_opt_mafa")
class Blip2OptMafa(Blip2Llm, Blip2OPT):
    """BLIP-2 with OPT under this package's runner; state-dict names of LAVIS's ``blip2_opt``.

    In addition it answers questions, generates from prompts of unequal length, and runs on a CPU.

    Args:
        prompt: put before every caption, in training and generation.
        max_txt_len: longest caption in training, in tokens, including prompt and line break.
        llm_precision: type of OPT's weights: ``fp16`` (LAVIS's), ``bf16`` or ``fp32``.
        Others: as of `Blip2Llm`.

    Supported model types:
        - pretrain_opt2.7b, pretrain_opt6.7b: LAVIS's published weights of stage 2.
        - caption_coco_opt2.7b, caption_coco_opt6.7b: LAVIS's weights, fine-tuned for captions.
        - tiny: small parts from its config; ``model.opt_model`` must name a folder with an OPT.

    Usage:
        >>> from lavis_mafa import load_model
        >>> model = load_model("blip2_opt_mafa", "pretrain_opt2.7b")
    """

    PRETRAINED_MODEL_CONFIG_DICT = model_yamls(
        "blip2_opt_mafa",
        "pretrain_opt2.7b",
        "pretrain_opt6.7b",
        "caption_coco_opt2.7b",
        "caption_coco_opt6.7b",
        "tiny",
    )
    llm_key, llm_proj, llm_tokenizer = "opt_model", "opt_proj", "opt_tokenizer"
    write_tiny_llm = staticmethod(tiny_opt)
    llm_options = ("llm_precision",)

    def __init__(self, parts: Parts | None = None, **options: Any) -> None:
        super().__init__(parts, **options)
        # LAVIS trains OPT to end a caption by a line break.
        self.eos_token_id = self._ids("\n", add_special_tokens=False)[0]
        self.prompt_length = len(self._ids(self.prompt))

    def _language_loaders(self, llm_precision: str = "fp16") -> tuple[Any, Any]:
        load = partial(_PromptedOPT.from_pretrained, torch_dtype=_PRECISIONS[llm_precision])
        return partial(AutoTokenizer.from_pretrained, use_fast=False), load

    def _ids(self, text: str, **options: Any) -> list[int]:
        return list(self.opt_tokenizer(text, **options).input_ids)

    def _tokens(self, texts: Sequence[str], side: str, **options: Any) -> Any:
        self.opt_tokenizer.padding_side = side
        return self._encode(texts, **options)

    def forward(self, samples: dict[str, Any]) -> dict[str, Tensor]:
        """Language modelling of captions after their image (BLIP-2 3.2).

        Args:
            samples: ``image`` ``(B, 3, H, W)`` and ``text_input``, B captions. The model's prompt
                is put before those that do not begin with it; its tokens have no loss.

        Returns:
            ``loss``, per token.
        """
        seen, seen_mask = self._soft_prompts(samples["image"])
        # LAVIS's text processors may have added the prompt already.
        texts = [
            f"{caption}\n" if caption.startswith(self.prompt) else f"{self.prompt} {caption}\n"
            for caption in samples["text_input"]
        ]
        # Padded on the right, so that the prompt's tokens are the first of every row.
        tokens = self._tokens(texts, side="right", truncation=True, max_length=self.max_txt_len)
        targets = tokens.input_ids.masked_fill(tokens.attention_mask == 0, IGNORED)
        if self.prompt:
            targets[:, : self.prompt_length] = IGNORED
        embeds = self.opt_model.get_input_embeddings()(tokens.input_ids)
        with self._llm_autocast():
            output = self.opt_model(
                inputs_embeds=torch.cat([seen, embeds], dim=1),
                attention_mask=torch.cat([seen_mask, tokens.attention_mask], dim=1),
                labels=torch.cat([seen_mask * IGNORED, targets], dim=1),
                return_dict=True,
            )
        return {"loss": output.loss}

    @torch.no_grad()
    def generate(
        self,
        samples: dict[str, Any],
        use_nucleus_sampling: bool = False,
        num_beams: int = 5,
        max_length: int = 30,
        min_length: int = 1,
        top_p: float = 0.9,
        repetition_penalty: float = 1.0,
        length_penalty: float = 1.0,
        num_captions: int = 1,
        temperature: float = 1,
    ) -> list[str]:
        """Generate captions by beam search or nucleus sampling.

        Args:
            samples: ``image`` ``(B, 3, H, W)``, and optionally ``prompt``, for all images;
                default: the model's own.
            max_length: maximum number of tokens after the prompt.
            min_length: minimum number of tokens; those of the prompt count as well, as in LAVIS.
            num_captions: captions per image.
            Others: as in LAVIS.

        Returns:
            ``B * num_captions`` texts, image by image, without prompt.
        """
        images = samples["image"]
        options: dict[str, Any] = {"num_beams": 1 if use_nucleus_sampling else num_beams}
        if use_nucleus_sampling:
            options.update(do_sample=True, top_p=top_p, temperature=temperature)
        return self._continue(
            images,
            [samples.get("prompt", self.prompt) for _ in images],
            as_given=True,
            max_new_tokens=max_length,
            min_length=min_length,
            repetition_penalty=repetition_penalty,
            length_penalty=length_penalty,
            num_return_sequences=num_captions,
            **options,
        )

    @torch.no_grad()
    def predict_answers(
        self,
        samples: dict[str, Any],
        num_beams: int = 5,
        inference_method: str = "generate",
        max_len: int = 10,
        min_len: int = 1,
        num_ans_candidates: int = 128,
        answer_list: Sequence[str] | None = None,
        prompt: str = "",
        length_penalty: float = -1,
        **others: Any,
    ) -> list[str]:
        """Answer questions about images, zero-shot (BLIP-2 4.1).

        An answer depends only on its own image and question, not on the rest of the mini-batch.

        Args:
            samples: ``image`` ``(B, 3, H, W)`` and ``text_input``, B questions.
            max_len, min_len: numbers of tokens of an answer.
            prompt: words around a question, such as ``Question: {} Answer:`` (the paper's for OPT);
                empty: only the question.
            length_penalty: of beam search; below 0: shorter answers.
            num_ans_candidates, answer_list, others: ignored, because answers are generated.

        Returns:
            B texts: the generated text up to its first line break.

        Raises:
            ValueError: for another inference method, or a prompt without ``{}``.
        """
        if inference_method != "generate":
            raise ValueError(
                f"run.inference_method is {inference_method!r}; {type(self).__name__} generates: "
                "use generate"
            )
        questions = samples["text_input"]
        questions = [questions] if isinstance(questions, str) else questions
        check_prompt(prompt)
        texts = self._continue(
            samples["image"],
            [prompt.format(question) if prompt else question for question in questions],
            as_given=False,
            num_beams=num_beams,
            max_new_tokens=max_len,
            min_length=min_len,
            length_penalty=length_penalty,
        )
        return [text.partition("\n")[0].strip() for text in texts]

    def _continue(
        self,
        images: Tensor,
        prompts: Sequence[str],
        as_given: bool,
        min_length: int,
        **options: Any,
    ) -> list[str]:
        """Generate text after images and prompts.

        Prompts are padded on the left, so that each ends where its continuation begins.

        Args:
            as_given: pass prompts to ``generate`` as tokens. Their number, including padding, then
                counts in its lengths and (in some versions) length penalties. Otherwise it gets
                their embeddings, and only the last token as a token.
        """
        seen, seen_mask = self._soft_prompts(images)
        tokens = self._tokens(prompts, side="left")
        kept = tokens.input_ids.shape[1] if as_given else 1
        before = self.opt_model.get_input_embeddings()(tokens.input_ids[:, :-kept])
        if options.get("num_beams") == 1:
            # It belongs to beams; transformers warns of it without them.
            del options["length_penalty"]
        with self._llm_autocast():
            written = self.opt_model.generate(
                input_ids=tokens.input_ids[:, -kept:],
                query_embeds=torch.cat([seen, before], dim=1),
                attention_mask=torch.cat([seen_mask, tokens.attention_mask], dim=1),
                eos_token_id=self.eos_token_id,
                min_length=min_length if as_given else min_length + kept,
                **options,
            )
        texts = self.opt_tokenizer.batch_decode(written[:, kept:], skip_special_tokens=True)
        return [text.strip() for text in texts]
