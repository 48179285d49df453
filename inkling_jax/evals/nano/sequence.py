"""An example as the token ids that a model is trained on: rendered and processed by the same code as what it is served."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
from jaxtyping import Bool, Float32, Int32

from inkling_jax.config import preset
from inkling_jax.evals.nano.example import Example
from inkling_jax.inputs import chat
from inkling_jax.inputs.images import ImageConfig
from inkling_jax.inputs.messages import check_messages
from inkling_jax.inputs.processor import Processor
from inkling_jax.inputs.segments import Control, Segment
from inkling_jax.inputs.tokenizer import Tokenizer

_OPENS, _ENDS = Control("<|message_model|>"), Control("<|content_model_end_sampling|>")


@dataclasses.dataclass(frozen=True)
class TrainingSequence:
    """Token ids, those that are the model's to write, and the media whose rows the placeholders stand for, in order."""

    token_ids: Int32[np.ndarray, " T"]
    loss_mask: Bool[np.ndarray, " T"]  # tokens to be predicted: those of the assistant after its first opening, ends included
    images: list[Float32[np.ndarray, "N 2 40 40 3"]]
    audios: list[Int32[np.ndarray, "T 80"]]


def training_sequence(example: Example, tokenizer: Tokenizer) -> TrainingSequence:
    """The whole conversation of an example, with its answers."""
    processor = _processor(tokenizer)
    shown = check_messages(example.messages)
    ids: list[int] = []
    mask: list[bool] = []
    images, audios = [], []
    answering = False  # between an assistant's first opening, which the prompt ends with, and its end of sampling
    for segment in chat.render(shown, tools=example.tools, effort=example.effort, add_generation_prompt=False):
        part = processor.encode([segment])
        ids += part.token_ids
        mask += [answering] * len(part.token_ids)
        images += part.images
        audios += part.audios
        answering = _answering(answering, segment)
    return TrainingSequence(np.asarray(ids, np.int32), np.asarray(mask, bool), images, audios)


def _answering(before: bool, segment: Segment) -> bool:
    return segment == _OPENS or (before and segment != _ENDS)


@functools.lru_cache(maxsize=4)
def _processor(tokenizer: Tokenizer) -> Processor:
    """What prepares media for the nano model: with the released towers' sizes of patches and bins, and no growth of images."""
    return Processor(preset("inkling-small"), tokenizer, frozenset({"vision", "audio"}), ImageConfig(rescale_frac=None))
