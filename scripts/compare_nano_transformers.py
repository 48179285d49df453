"""Compare the nano model in Hugging Face Transformers and here: float32 logits of one held-out conversation of each task.

    python3 scripts/compare_nano_transformers.py --model path/to/nano-bf16 --output bench/results/nano_transformers.json

Needs Transformers 5.24 and PyTorch, which the package does not. Transformers runs on the CPU, so that the two share no GPU. Exits
with 1 where logits differ by more than 1e-4 of their norm without a router's tie.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from compare_transformers import FLOAT32_ERROR, TIE, relative, require_transformers
from gpu_oracle import prompt_time

import inkling_jax
from inkling_jax import Prompt
from inkling_jax.benchmarks.ceilings import read_ceiling
from inkling_jax.benchmarks.rows import make_row, save_rows
from inkling_jax.evals.nano.sequence import TrainingSequence, training_sequence
from inkling_jax.evals.nano.tasks import TASKS, make_example
from inkling_jax.llm import LLM


def main() -> None:
    """Both sides, a line a task."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="directory of the BF16 checkpoint")
    parser.add_argument("--output", type=Path, help="JSON file that the rows are merged into")
    options = parser.parse_args()
    require_transformers()
    with inkling_jax.load(options.model, dtype="float32", quiet=True, max_context=1024, kernels="reference") as llm:
        assert llm.tokenizer is not None
        sequences = {t: training_sequence(make_example(t, 1, "held-out", 0), llm.tokenizer) for t in TASKS}
        ours = {task: llm.score(as_prompt(sequence)) for task, sequence in sequences.items()}
        theirs, versions = rival(options.model, sequences)
        errors, failed = {}, []
        for task, (logits, margin) in theirs.items():
            errors[task] = relative(ours[task], logits[:, : ours[task].shape[1]])
            same = float((ours[task].argmax(-1) == logits.argmax(-1)).mean())
            print(f"{task}: logits differ by {errors[task]:.1e}, likeliest tokens agree {same:.3f}, router margin {margin:.1e}")
            failed += [task] if margin > TIE and not errors[task] <= FLOAT32_ERROR else []
        if options.output:
            save_rows(options.output, [row(llm, options.model, sequences, errors, theirs, versions)])
    for task in failed:
        print(f"FAILED: {task}: logits differ without a tie")
    sys.exit(1 if failed else 0)


def as_prompt(sequence: TrainingSequence) -> Prompt:
    """The whole conversation, answer included."""
    return Prompt(sequence.token_ids.tolist(), sequence.images, sequence.audios)


def rival(directory: Path, sequences: dict[str, TrainingSequence]) -> tuple[dict[str, Any], dict[str, str]]:
    """Logits and the smallest router margin by task, as Transformers computes them; and the versions that did."""
    import torch
    import transformers
    from transformers_rival import load, logits_of

    model = load(str(directory), torch.float32, torch.device("cpu"))
    found = {}
    for task, sequence in sequences.items():
        media: dict[str, Any] = {}
        if sequence.images:
            media["pixel_values"] = torch.tensor(np.concatenate(sequence.images))
        if sequence.audios:
            bins = torch.tensor(np.concatenate(sequence.audios)).long()
            media |= {"audio_input_ids": bins[None], "audio_input_ids_mask": torch.ones(1, len(bins))}
        found[task] = logits_of(model, torch.tensor(sequence.token_ids).long(), **media)
    return found, {"torch": torch.__version__, "transformers": transformers.__version__}


def row(
    llm: LLM,
    directory: Path,
    sequences: dict[str, TrainingSequence],
    errors: dict[str, float],
    theirs: dict[str, Any],
    versions: dict[str, str],
) -> dict[str, Any]:
    """What was found. Its time is that of reading the longest conversation of text, everything compiled."""
    texts = [sequence for sequence in sequences.values() if not sequence.images and not sequence.audios]
    ids = max((text.token_ids for text in texts), key=len).tolist()
    return make_row(
        "nano_transformers",
        "nano bf16 float32",
        "prefill",
        jax.devices()[0],
        kernels="reference",
        rel_err=max(errors.values()),
        rel_err_by_task={task: float(f"{error:.3g}") for task, error in errors.items()},
        margin=min(margin for _, margin in theirs.values()),
        **versions,
        **prompt_time(llm, directory, ids, read_ceiling(jax.devices()[0])),
    )


if __name__ == "__main__":
    main()
