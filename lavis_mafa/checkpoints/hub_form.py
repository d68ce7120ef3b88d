"""The forms in which Hugging Face transformers can load a LAVIS model."""

from __future__ import annotations

import tempfile
from typing import Any, ClassVar

import torch
from lavis.processors.blip_processors import BlipImageBaseProcessor

from lavis_mafa.checkpoints.hub_names import HubNames, State
from lavis_mafa.compat.traits import image_size_of

# The class that transformers had last of those needed here.
_NEWEST = "Blip2ForImageTextRetrieval"


class HubForm:
    """One class of transformers, and how a LAVIS model is expressed as it.

    Attributes:
        to: value of ``--to``.
        family: of the LAVIS models that it takes.
        class_name: of transformers.
        names: of the weights.
        dropped: prefixes of LAVIS's weights that the class has no use for.
        in_float32: prefixes of LAVIS's weights that both libraries compute in float32, whatever the
            precision of the others.
        needs: attributes of a LAVIS model without which it has no such form.
        generation: the defaults of LAVIS's ``generate``; {} if it generates no texts.
    """

    to: ClassVar[str] = "hf"
    family: ClassVar[str]
    class_name: ClassVar[str]
    names: ClassVar[HubNames]
    dropped: ClassVar[tuple[str, ...]] = ()
    in_float32: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[tuple[str, ...]] = ()
    generation: ClassVar[dict[str, Any]] = {}

    @classmethod
    def takes(cls, model: Any) -> bool:
        """Return whether a built model of the family has what the form needs."""
        return all(getattr(model, name, None) is not None for name in cls.needs)

    @classmethod
    def model_cls(cls) -> Any:
        """Return the class of transformers.

        Raises:
            ImportError: if transformers is too old to have it.
        """
        import transformers

        if not hasattr(transformers, _NEWEST):
            raise ImportError(
                f"transformers {transformers.__version__} has no {_NEWEST}: 4.46 or later is "
                "needed (run_scripts/requirements/modern.txt)"
            )
        return getattr(transformers, cls.class_name)

    def __init__(self, model: Any) -> None:
        """
        Args:
            model: the LAVIS model, its weights in float32.
        """
        self.model = model

    def state(self, dtype: torch.dtype) -> State:
        """Return the weights under Hugging Face's names.

        Raises:
            ValueError: if there is one that the class has no place for.
        """
        own = self.model.state_dict()
        state = {k: v if k.startswith(self.in_float32) else v.to(dtype) for k, v in own.items()}
        return self.names.state_to_hub(state, self.dropped)

    def config(self) -> Any:
        """Return the config of transformers."""
        raise NotImplementedError

    def processor(self) -> Any:
        """Return the processor of transformers: images and texts to inputs."""
        raise NotImplementedError

    def adapt(self, state: State, config: Any) -> None:
        """Change weights and config in place where they depend on each other."""

    def note(self) -> str:
        """Return what a user of the exported model has to know."""
        if not self.generation:
            return ""
        return (
            "equivalent of LAVIS's generate(): model.generate(**processor(images=..., "
            f"text={getattr(self.model, 'prompt', '')!r}), "
            "generation_config=model.generation_config)"
        )


def image_processor(model: Any) -> Any:
    """Return the processor of LAVIS's ``blip_image_eval``."""
    from transformers import BlipImageProcessor

    size: Any = image_size_of(model)
    normalize = BlipImageBaseProcessor().normalize
    return BlipImageProcessor(
        size={"height": size, "width": size},
        image_mean=list(normalize.mean),
        image_std=list(normalize.std),
    )


def vision_config(model: Any) -> dict[str, Any]:
    """Return the sizes of LAVIS's image encoder under the names of both BLIPs' configs."""
    vit = model.visual_encoder
    block = vit.blocks[0]
    return {
        "hidden_size": vit.embed_dim,
        "intermediate_size": block.mlp.fc1.out_features,
        "num_hidden_layers": len(vit.blocks),
        "num_attention_heads": block.attn.num_heads,
        "image_size": image_size_of(model),
        "patch_size": vit.patch_embed.patch_size[0],
        "hidden_act": "gelu",
        "layer_norm_eps": block.norm1.eps,
    }


def bert_config(config: Any) -> dict[str, Any]:
    """Return what a config of LAVIS's BERT and one of Hugging Face's BLIPs have in common."""
    same = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "hidden_act",
        "hidden_dropout_prob",
        "attention_probs_dropout_prob",
        "max_position_embeddings",
        "initializer_range",
        "layer_norm_eps",
        "pad_token_id",
    )
    return {key: getattr(config, key) for key in same}


def tokenizer_of(model: Any, side: str = "right") -> Any:
    """Return the fast version of a model's tokenizer.

    Args:
        side: on which it pads.
    """
    from transformers import AutoTokenizer

    own = next(
        getattr(model, name)
        for name in ("opt_tokenizer", "t5_tokenizer", "tokenizer")
        if hasattr(model, name)
    )
    with tempfile.TemporaryDirectory() as folder:
        own.save_pretrained(folder)
        return AutoTokenizer.from_pretrained(folder, padding_side=side)
