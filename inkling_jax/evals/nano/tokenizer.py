"""The nano model's tokenizer and processing files: byte-level BPE over the training part, one token a digit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from inkling_jax.evals.nano.tasks import TASKS, make_example
from inkling_jax.inputs import chat
from inkling_jax.inputs.control import CONTROL_TOKENS
from inkling_jax.inputs.segments import Text

VOCABULARY = 1024
EXAMPLES = 500  # of each task, whose texts decide the merges


def build_tokenizer(vocab_size: int = VOCABULARY) -> tokenizers.Tokenizer:
    """A tokenizer of at most `vocab_size` ids, the published control tokens being the last ones."""
    spellings = [token.spellings[0] for token in CONTROL_TOKENS.values()]
    backend = tokenizers.Tokenizer(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(spellings),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(_texts(), trainer)
    backend.add_special_tokens([tokenizers.AddedToken(s, special=True, normalized=False) for s in spellings])
    return backend


def write_processing_files(directory: str | Path) -> dict[str, int]:
    """Write tokenizer.json, tokenizer_config.json and processor_config.json.

    Returns the fields that config.json needs: "eos_token_id", "image_token_id", "audio_token_id".
    """
    directory = Path(directory)
    backend = build_tokenizer()
    backend.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, content in (("tokenizer_config.json", settings), ("processor_config.json", processor_config())):
        (directory / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    roles = {"eos_token_id": "content_model_end_sampling", "image_token_id": "image_slot", "audio_token_id": "audio_slot"}
    ids = backend.get_vocab()
    return {field: ids[CONTROL_TOKENS[role].spellings[0]] for field, role in roles.items()}


def processor_config() -> dict[str, Any]:
    """What processor_config.json says: images keep their size, so that a drawn one is few tokens; the rest as published."""
    return {
        "image_token": CONTROL_TOKENS["image_slot"].spellings[0],
        "audio_token": CONTROL_TOKENS["audio_slot"].spellings[0],
        "image_bos_token": CONTROL_TOKENS["content_image"].spellings[0],
        "audio_bos_token": CONTROL_TOKENS["content_audio_input"].spellings[0],
        "num_dmel_bins": 16,
        "dmel_min": -7.0,
        "dmel_max": 2.0,
        "image_processor": {
            "size": {"height": 40, "width": 40},
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
            "rescale_image_frac": None,
        },
        "feature_extractor": {
            "sampling_rate": 16000,
            "hop_length": 800,
            "n_fft": 1600,
            "window_size": 1600,
            "feature_size": 80,
            "audio_token_duration_s": 0.05,
            "window_size_multiplier": 2.0,
        },
    }


def _texts() -> Iterator[str]:
    """Every text of the first training examples, as the chat format has it."""
    for task in TASKS:
        for index in range(EXAMPLES):
            example = make_example(task, 0, "train", index)
            rendered = chat.render(example.messages, tools=example.tools, effort=example.effort)
            yield from (segment.text for segment in rendered if isinstance(segment, Text))
