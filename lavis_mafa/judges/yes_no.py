"""Con-D as a vision-language model that answers a question with Yes or No."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lavis_mafa.algorithm.options import Checked, option
from lavis_mafa.judges.discriminators import DISCRIMINATORS
from lavis_mafa.judges.pair_reader import PLACE, Pair, PairReader, checkpoint_of, explain_not_loaded

_NAME = "yes_no"
_CAPTION, _QUESTION = "{caption}", "{question}"


@dataclass(frozen=True)
class _YesNoSettings(Checked):
    """Settings of `_YesNo`."""

    question: str = option(
        'Does this caption describe the image: "{caption}"? Answer Yes or No.',
        "what the model is asked; {caption} stands for the caption",
    )
    prompt: str | None = option(
        None,
        "the whole prompt, with {question} and the model's image token; null: the processor's "
        "chat template",
    )
    yes: str = option("Yes", "the answer that means match, a single token")
    no: str = option("No", "the other answer, a single token")
    batch_size: int = option(16, "pairs in one forward pass", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, place in (("question", _CAPTION), ("prompt", _QUESTION)):
            given = getattr(self, name)
            if given is not None and place not in given:
                raise ValueError(
                    f"{PLACE}.{_NAME}.{name}: has no {place}, which stands for the "
                    f"{place.strip('{}')}; add it"
                )


@DISCRIMINATORS.register(_NAME, settings=_YesNoSettings, source="lavis_mafa")
class _YesNo(PairReader):
    """Any vision-language model of Hugging Face, asked whether the caption describes the picture.

    P(match) is the probability of Yes among the answers Yes and No: the softmax of their two
    logits at the first position of the answer.

    Args:
        model: with language-model head.
        processor: of the model, with image processor and tokenizer.
        settings: question and answers.
        precision, longest: see `PairReader`.

    Raises:
        ValueError: if the processor cannot ask the question or read the answers.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        settings: _YesNoSettings,
        precision: str = "fp32",
        longest: int | None = None,
    ) -> None:
        self.answers = _check_processor(processor, settings)
        super().__init__(model, precision, longest, settings.batch_size)
        self.settings, self.reader = settings, processor
        processor.tokenizer.padding_side = "left"  # the answer follows the last position
        if processor.tokenizer.pad_token is None:
            processor.tokenizer.pad_token = processor.tokenizer.eos_token
        accepted = inspect.signature(model.forward).parameters
        # Without it the logits of all positions are computed: gigabytes with a large vocabulary.
        self._only_last = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}

    @classmethod
    def from_config(cls, cfg: Mapping[str, Any], settings: _YesNoSettings) -> _YesNo:
        """Load model and processor of a ``model.mafa.con_d`` config.

        Raises:
            ValueError: if they cannot be loaded, or weights are missing.
        """
        path = checkpoint_of(cfg)
        processor = _load_processor(path)
        _check_processor(processor, settings)
        model = _load_model(path)
        return cls(model, processor, settings, cfg.get("precision", "fp32"), cfg.get("image_size"))

    def _prompt_of(self, caption: str) -> str:
        """Return the text that the model reads, with its image token."""
        question = self.settings.question.replace(_CAPTION, caption)
        if self.settings.prompt is not None:
            return self.settings.prompt.replace(_QUESTION, question)
        content = [{"type": "image"}, {"type": "text", "text": question}]
        message = {"role": "user", "content": content}
        text: str = self.reader.apply_chat_template([message], add_generation_prompt=True)
        return text

    def probabilities(self, pairs: Sequence[Pair]) -> Tensor:
        """Return P(Yes) ``(P,)`` of the pairs."""
        inputs = self.reader(
            text=[self._prompt_of(caption) for _, caption in pairs],
            images=[[picture] for picture, _ in pairs],
            return_tensors="pt",
            padding=True,
        )
        device = next(self.model.parameters()).device
        inputs = {name: value.to(device) for name, value in inputs.items()}
        logits = self.model(**inputs, **self._only_last).logits[:, -1].float()
        return torch.softmax(logits[:, list(self.answers)], dim=1)[:, 0]


def _load_processor(path: str) -> Any:
    """Load the processor of a model; code that comes with it is never run.

    Raises:
        ValueError: if there is none, or it has no image processor or tokenizer.
    """
    from transformers import AutoProcessor

    problem = "has no processor of images and text that transformers can load"
    cure = "; name a vision-language model with its processor"
    with explain_not_loaded(path, problem, cure), _without_old_timm():
        processor = AutoProcessor.from_pretrained(path, trust_remote_code=False)
    if not (hasattr(processor, "image_processor") and hasattr(processor, "tokenizer")):
        raise ValueError(
            f"{PLACE}.checkpoint: {path} has a {type(processor).__name__}, which reads no images "
            f"with text{cure}"
        )
    return processor


def _check_processor(processor: Any, settings: _YesNoSettings) -> tuple[int, int]:
    """Return the tokens of the two answers.

    Raises:
        ValueError: if an answer is not a single token, both are the same, or there is neither a
            chat template nor a prompt.
    """
    found = []
    for name, answer in (("yes", settings.yes), ("no", settings.no)):
        tokens = processor.tokenizer.encode(answer, add_special_tokens=False)
        unknown = processor.tokenizer.unk_token_id
        if len(tokens) != 1 or tokens[0] == unknown:
            what = f"{len(tokens)} tokens" if len(tokens) != 1 else "its token of unknown words"
            raise ValueError(
                f"the model's tokenizer makes {what} of the answer {answer!r}; give a word that is "
                f"a single token as {PLACE}.{_NAME}.{name}"
            )
        found.append(tokens[0])
    if found[0] == found[1]:
        raise ValueError(f"{settings.yes!r} and {settings.no!r} are the same token; give two words")
    if settings.prompt is None and not getattr(processor, "chat_template", None):
        raise ValueError(
            "the model's processor has no chat template; give the whole prompt, with {question} "
            f"and the model's image token, as {PLACE}.{_NAME}.prompt"
        )
    return found[0], found[1]


def _load_model(path: str) -> Any:
    try:
        from transformers import AutoModelForImageTextToText
    except ImportError:
        raise ValueError(
            f"{PLACE}.arch: {_NAME} needs transformers >= 4.46; install the today or modern set of "
            "packages (README, Install)"
        ) from None
    load: Any = AutoModelForImageTextToText.from_pretrained  # its types lack the second result
    problem = "is not a vision-language model that transformers can load"
    with explain_not_loaded(path, problem), _without_old_timm():
        model, about = load(path, trust_remote_code=False, output_loading_info=True)
    missing = sorted(about["missing_keys"])
    if missing:
        raise ValueError(
            f"{PLACE}.checkpoint: {path} lacks weights of {type(model).__name__}: "
            f"{', '.join(missing[:5])}; they would be random"
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"{PLACE}.checkpoint: {type(model).__name__} has a decoder of its own for answers; "
            "name a model that continues its prompt"
        )
    return model


@contextmanager
def _without_old_timm() -> Iterator[None]:
    """Hide timm from transformers in this context, if timm is too old for it.

    `AutoModel` reads the configs of all models. One of them imports names that timm 0.4.12 lacks,
    so that every model would fail.
    """
    utilities = importlib.import_module("transformers.utils.import_utils")
    try:
        too_old = not hasattr(importlib.import_module("timm.data"), "ImageNetInfo")
    except ImportError:
        too_old = False
    flag = "_timm_available"
    if not too_old or not getattr(utilities, flag, False):
        yield
        return
    setattr(utilities, flag, False)
    try:
        yield
    finally:
        setattr(utilities, flag, True)
