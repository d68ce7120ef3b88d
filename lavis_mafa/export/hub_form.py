"""The forms in which Hugging Face transformers can load a LAVIS model."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, ClassVar

import torch
from lavis.processors.blip_processors import BlipImageBaseProcessor
from torch import Tensor, nn

from lavis_mafa.io.hub_names import HubNames, State
from lavis_mafa.models.families.base import image_size_of

Outputs = dict[str, Tensor]
# The class that transformers had last of those needed here.
NEWEST = "Blip2ForImageTextRetrieval"


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
        generates: it generates texts.
        generation_defaults: those of LAVIS's ``generate``.
    """

    to: ClassVar[str] = "hf"
    family: ClassVar[str]
    class_name: ClassVar[str]
    names: ClassVar[HubNames]
    dropped: ClassVar[tuple[str, ...]] = ()
    in_float32: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[tuple[str, ...]] = ()
    generates: ClassVar[bool] = False
    generation_defaults: ClassVar[dict[str, Any]] = {}

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

        if not hasattr(transformers, NEWEST):
            raise ImportError(
                f"transformers {transformers.__version__} has no {NEWEST}: 4.46 or later is needed "
                "(run_scripts/requirements/modern.txt)"
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

    def generation(self, config: Any) -> Any:
        """Return the settings of generation with which it equals LAVIS's ``generate``."""
        from transformers import GenerationConfig

        names = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
        known = {name: getattr(config.text_config, name, None) for name in names}
        return GenerationConfig(**known, **self.generation_defaults)

    def adapt(self, state: State, config: Any) -> None:
        """Change weights and config in place where they depend on each other."""

    def inputs(self, count: int, length: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return random images ``(B, 3, S, S)`` and texts: ids and mask ``(B, T)``."""
        generator = torch.Generator().manual_seed(seed)
        size: Any = image_size_of(self.model)
        pixels = torch.randn(count, 3, size, size, generator=generator)
        ids = torch.randint(self.words(), (count, length), generator=generator)
        return pixels, ids, torch.ones(count, length, dtype=torch.long)

    def words(self) -> int:
        """Return the number of ids that stand for text."""
        raise NotImplementedError

    def ours(self, pixels: Tensor, ids: Tensor, mask: Tensor) -> Outputs:
        """Return the outputs of LAVIS's model."""
        raise NotImplementedError

    def theirs(self, model: Any, pixels: Tensor, ids: Tensor, mask: Tensor) -> Outputs:
        """Return the same outputs of the exported model."""
        raise NotImplementedError

    def note(self) -> str:
        """Return what a user of the exported model has to know; empty if nothing."""
        return ""

    def cause(self) -> str:
        """Return what may explain a small difference; empty if nothing is known."""
        return ""

    def image_processor(self) -> Any:
        """Return the processor of LAVIS's ``blip_image_eval``."""
        from transformers import BlipImageProcessor

        size: Any = image_size_of(self.model)
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
        *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
        *("hidden_act", "hidden_dropout_prob", "attention_probs_dropout_prob"),
        *("max_position_embeddings", "initializer_range", "layer_norm_eps", "pad_token_id"),
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


def load_exported(form: type[HubForm], folder: Path) -> Any:
    """Load an exported folder by transformers, in float32.

    Raises:
        ValueError: if a weight is missing, unexpected or of another shape.
    """
    model, info = form.model_cls().from_pretrained(
        folder, torch_dtype=torch.float32, output_loading_info=True
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            raise ValueError(f"{folder} does not load completely: {kind} {info[kind]}")
    loaded: nn.Module = model.eval()
    return loaded
