"""What known mistakes of an implementation do to the nano tasks: each is made on purpose, one at a time.

    python scripts/nano_bugs.py --limit 24 --output bench/evals/mistakes

Most are made in the weights of a loaded model; two in its code, for which the model is loaded again. The plain JAX path computes,
in float32, so that nothing else differs. Results are kept after each one.

Answers that a model is sure of forgive small mistakes. Random tokens do not: after them the likeliest token is a narrow choice.
The share of choices that stay as they are without a mistake therefore tells what accuracy does not; the control, no mistake but
other steps, says how many change by rounding alone.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from inkling_jax import loading
from inkling_jax.command_line import run, set_up_messages, start_jax
from inkling_jax.config import ModelConfig
from inkling_jax.evals.nano.tasks import TASKS
from inkling_jax.evals.results import Results, save_results
from inkling_jax.evals.run import run_tasks
from inkling_jax.inputs.prompt import Prompt
from inkling_jax.layers import attention
from inkling_jax.llm import LLM, load
from inkling_jax.sources import NANO

UNCHANGED, CONTROL = "none", "none, in other steps"
Change = Callable[[str, jax.Array, ModelConfig], jax.Array]  # path, parameter -> what is computed with instead


def reversed_taps(path: str, value: jax.Array, config: ModelConfig) -> jax.Array:
    """Convolutions with the first tap on the current token."""
    return value[..., ::-1] if path.endswith("conv.weight") else value


def halves(path: str, value: jax.Array, config: ModelConfig) -> jax.Array:
    """Gate and up taken for the two halves of the stored rows, which hold them in turns."""
    if ".w13" not in path or path.endswith("scale2") or value.ndim < 3:
        return value
    return value.swapaxes(-3, -2).reshape(value.shape)


def no_mup(path: str, value: jax.Array, config: ModelConfig) -> jax.Array:
    """Logits that are not divided by the width multiplier: the rows of the head are multiplied by it."""
    return value * config.text.logits_divisor if path == "unembed" else value


def no_global_scale(path: str, value: jax.Array, config: ModelConfig) -> jax.Array:
    """Neither the dense feed-forwards' scale nor the routers'."""
    return jnp.ones_like(value) if path.endswith("global_scale") else value


CHANGES: dict[str, Change] = {
    UNCHANGED: lambda path, value, config: value,
    "convolution taps reversed": reversed_taps,
    "gate and up as halves": halves,
    "no muP divisor": no_mup,
    "no global scale": no_global_scale,
}


@contextlib.contextmanager
def wider_window() -> Iterator[None]:
    """Local layers that see one key more."""
    find = loading._find

    def changed(*args: Any) -> tuple[Path | None, ModelConfig]:
        directory, config = find(*args)
        local = config.text.local_attention
        assert local.window is not None
        text = dataclasses.replace(config.text, local_attention=dataclasses.replace(local, window=local.window + 1))
        return directory, dataclasses.replace(config, text=text)

    with mock.patch.object(loading, "_find", changed):
        yield


@contextlib.contextmanager
def clamped_bias() -> Iterator[None]:
    """Beyond its extent the bias of the last distance, where it should be none."""
    attend = attention.paged_attention

    def changed(q: jax.Array, rel: jax.Array, bias: jax.Array, *rest: Any, **options: Any) -> jax.Array:
        beyond = jnp.repeat(bias[-1:], max(0, options["context"] - len(bias)), axis=0)
        return attend(q, rel, jnp.concatenate([bias, beyond]), *rest, **options)

    with mock.patch.object(attention, "paged_attention", changed):
        yield


PATCHES = {"window of one key more": wider_window, "bias clamped beyond its extent": clamped_bias}
NOISE, NOISE_TOKENS = 8, 900  # sequences of random tokens, longer than the window and than the extent of the bias


def main() -> int:
    """Run the tasks under each mistake and say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=NANO)
    parser.add_argument("--limit", type=int, default=100, help="items of each task")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--output", type=Path, required=True, help="directory, a file of results for each mistake")
    options = parser.parse_args()
    set_up_messages(verbose=False, quiet=True)
    start_jax()
    with opened(options) as llm:
        right = choices(llm)
        leaves = list(llm.engine.leaves)
        for name, change in CHANGES.items():
            paths = llm.engine.programs.paths
            llm.engine.leaves[:] = [change(path, leaf, llm.config) for path, leaf in zip(paths, leaves, strict=True)]
            measure(llm, name, right, options)
    for name, patch in PATCHES.items():
        with patch(), opened(options) as llm:
            measure(llm, name, right, options)
    with opened(options, chunk=64) as llm:
        measure(llm, CONTROL, right, options)
    return 0


def opened(options: argparse.Namespace, chunk: int = 256) -> LLM:
    """The model, on the path that the changes are made for."""
    size = {"max_context": 1024, "chunk": chunk, "slots": options.slots}
    return load(options.model, dtype="float32", kernels="reference", quiet=True, **size)


def choices(llm: LLM) -> Int[np.ndarray, "tokens"]:
    """The likeliest token after each of NOISE sequences of random ones, one sequence after the other."""
    assert llm.tokenizer is not None
    noise = np.random.default_rng(0).integers(0, min(llm.tokenizer.control.values()), (NOISE, NOISE_TOKENS)).tolist()
    return np.concatenate([llm.score(Prompt(ids)).argmax(-1) for ids in noise])


def measure(llm: LLM, name: str, unchanged: Int[np.ndarray, "tokens"], options: argparse.Namespace) -> None:
    """Run, keep and print."""
    results: Results = run_tasks(llm, options.tasks.split(","), limit=options.limit)
    results.about |= {"mistake": name, "same_choices": round(float((choices(llm) == unchanged).mean()), 5)}
    save_results(options.output / f"{name.replace(' ', '-').replace(',', '')}.json", results)
    right = {task: round(sum(found.right) / len(found.right), 3) for task, found in results.tasks.items()}
    print(name, json.dumps(right), results.about["same_choices"], flush=True)


if __name__ == "__main__":
    sys.exit(run(main))
