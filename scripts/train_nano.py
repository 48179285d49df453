"""Train the nano model (nano_model.py) on the tasks of inkling_jax.evals.nano, with the model's own forward.

On a GPU machine, as one run of at most nine minutes and another that goes on from it:

    S=.carry/nano/state.npz
    python3 scripts/train_nano.py --output $OUT --state $S --minutes 14 --time-limit 480
    python3 scripts/train_nano.py --output $OUT --state $S --minutes 14 --time-limit 480 --resume $S

(elsewhere, without the state: --resume params-0.npz params-1.npz; the optimizer then begins anew). A trial of the program:

    python3 scripts/train_nano.py --output $OUT --state .carry/nano/trial.npz --minutes 1 --time-limit 150

Every minute, and at the end: the state; in the output directory params-*.npz (float32), nano-bf16.tar (the checkpoint in the
published layout with its tokenizer), curve.json and curve.png. `--minutes` is the whole training over all runs: the learning rate
follows it, and so may `--mix task=weight,...`, which a later run may change.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import nano_record
import numpy as np
from nano_data import Batch, Recipe, batches, last_answers, make_batch
from nano_model import VOCABULARY, nano_config
from nano_record import PROCESSING, Progress, Saved
from nano_step import Modules, State, Trainer

from inkling_jax.command_line import run, start_jax
from inkling_jax.config import ModelConfig
from inkling_jax.errors import InputError
from inkling_jax.evals.nano.tasks import TASKS
from inkling_jax.evals.nano.tokenizer import write_processing_files
from inkling_jax.inputs.tokenizer import Tokenizer

KEEP = 384  # batches on the device: drawn from again while no new one is ready
WARM_UP, WARM_AGAIN = 300, 100  # steps until the learning rate is full, at the start and where the optimizer begins anew
DECAY = 0.5  # of the training, after which the rate falls evenly to nothing
SAVE_SECONDS, SAY_SECONDS = 60.0, 5.0
SYNC = 20  # steps between looks at the device
HELD_OUT_SEED = 1


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="directory of what travels")
    parser.add_argument("--state", type=Path, help="file to resume from (default: state.npz in the output directory)")
    parser.add_argument("--resume", type=Path, nargs="+", metavar="FILE", help="a state, or all pieces of parameters")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--minutes", type=float, help="length of the whole training, compiling not counted")
    length.add_argument("--steps", type=int, help="the same in steps")
    parser.add_argument("--time-limit", type=float, default=480, metavar="S", help="this run ends so many seconds after it began")
    parser.add_argument("--mix", type=parse_mix, default={}, metavar="TASK=W,...", help="weights of tasks, 1 where not named")
    parser.add_argument("--lines", type=int, default=96, help="lines of a batch")
    parser.add_argument("--length", type=int, default=512, help="tokens of a line")
    parser.add_argument("--rate", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--quantize-from", type=float, default=0.8, metavar="PART", help="then experts are rounded to NVFP4")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="processes that make batches")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="what is computed in")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def parse_mix(text: str) -> dict[str, float]:
    """Weights by task from "a=1,b=0.5"."""
    mix = {}
    for part in text.split(","):
        task, _, weight = part.partition("=")
        try:
            mix[task] = float(weight)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{part!r}: expected task=weight") from None
        if task not in TASKS or not 0 <= mix[task] < 1e6:
            raise argparse.ArgumentTypeError(f"{part!r}: expected one of {', '.join(TASKS)} and a weight of at least 0")
    return mix


class Training:
    """One run."""

    def __init__(self, options: argparse.Namespace, began: float):
        self.options, self.began = options, began
        self.state_file = options.state or options.output / "state.npz"
        options.output.mkdir(parents=True, exist_ok=True)
        saved = nano_record.load(options.resume) if options.resume else None
        self.processing, self.tokenizer_folder, self.config = prepare(saved)
        self.tokenizer = Tokenizer.from_directory(self.tokenizer_folder.name, None)
        self.modules = Modules(self.config, jnp.dtype(options.dtype))
        self.trainer = Trainer(self.modules)
        self.progress = saved.progress if saved else Progress()
        self.warm_from = None if saved is None or saved.moments is not None else self.progress.step
        self.state = self._state(saved)
        mix = {task: options.mix.get(task, 1.0) for task in TASKS}
        self.recipe = Recipe(
            self.tokenizer_folder.name, mix, options.lines, options.length, 20 * options.lines, 32 * options.lines, options.seed
        )
        self.last_saved = time.monotonic()

    def _state(self, saved: Saved | None) -> State:
        if saved is None:
            return self.trainer.start(self.modules.initial(self.options.seed))
        if {p: a.shape for p, a in saved.parameters.items()} != {p: a.shape for p, a in self.modules.declared.items()}:
            raise InputError(f"{self.options.resume[0]}: parameters of another model")
        fresh = self.trainer.start({path: jnp.asarray(saved.parameters[path]) for path in self.modules.declared})
        if saved.moments is None:
            return fresh
        return State(fresh.parameters, jax.tree.unflatten(jax.tree.structure(fresh.moments), map(jnp.asarray, saved.moments)))

    @property
    def part(self) -> float:
        """How much of the whole training is done, from 0 to 1."""
        options, progress = self.options, self.progress
        return min(1.0, progress.step / options.steps if options.steps else progress.seconds / (60 * options.minutes))

    def pace(self) -> float:
        """The learning rate as a part of the highest: up, level, then down to nothing."""
        step = self.progress.step
        up = min(1.0, (step + 1) / WARM_UP)
        if self.warm_from is not None:
            up = min(up, (step - self.warm_from + 1) / WARM_AGAIN)
        return up * min(1.0, (1 - self.part) / (1 - DECAY) + 1e-3)

    def run(self) -> None:
        """Train until the whole is done or this run's time is up."""
        source = self._on_device()
        held_out = self.held_out_batches()
        self.say(f"{sum(a.size for a in self.state.parameters.values()):,} parameters on {jax.devices()[0].device_kind}")
        spoken = looked = time.monotonic()
        first, stepped = True, 0
        while self.part < 1 and time.monotonic() - self.began < self.options.time_limit:
            pace = self.pace()
            quantized = jnp.float32(self.part >= self.options.quantize_from)
            rate = jnp.float32(pace * self.options.rate)
            self.state, numbers = self.trainer.step(self.state, next(source), rate, jnp.float32(pace), quantized)
            self.progress.step += 1
            stepped += 1
            if not first and self.progress.step % SYNC:
                continue
            numbers = {name: float(value) for name, value in numbers.items()}  # waits for the device
            now = time.monotonic()
            if first:
                self.say("compiled")
                first, looked, stepped = False, now, 0
            self.progress.seconds += now - looked
            looked = now
            if now - spoken > SAY_SECONDS and stepped:
                self.report(numbers, stepped, now - spoken, pace)
                spoken, stepped = now, 0
            if now - self.last_saved > SAVE_SECONDS:
                self.look_back(held_out)
                spoken = looked = time.monotonic()
                stepped = 0
        self.look_back(held_out)
        self.say(f"ended at {100 * self.part:.0f}% of the training")

    def _on_device(self) -> Iterator[Batch]:
        """A new batch where there is one, else one of the last KEEP."""
        rng = np.random.default_rng([self.options.seed, self.progress.step])
        kept: list[Batch] = []
        oldest = 0
        for batch in batches(self.recipe, self.progress.batches, self.options.workers):
            if batch is None:
                yield kept[rng.integers(len(kept))]
                continue
            self.progress.batches += 1
            batch = jax.device_put(batch)
            if self.options.workers:
                if len(kept) < KEEP:
                    kept.append(batch)
                else:
                    kept[oldest], oldest = batch, (oldest + 1) % KEEP
            yield batch

    def held_out_batches(self) -> dict[str, tuple[Batch, Batch]]:
        """A batch of each task alone, of questions that training has not seen: here, and on the device."""
        recipe = dataclasses.replace(self.recipe, lines=min(32, self.recipe.lines), split="held-out", seed=HELD_OUT_SEED)
        recipe = dataclasses.replace(recipe, tiles=256 * recipe.lines, frames=256 * recipe.lines)
        made = {task: make_batch(dataclasses.replace(recipe, mix={task: 1.0}), self.tokenizer, 0) for task in TASKS}
        return {task: (batch, jax.device_put(batch)) for task, batch in made.items()}

    def report(self, numbers: dict[str, float], steps: int, seconds: float, pace: float) -> None:
        """A line, and a row of the curve."""
        tokens = self.options.lines * self.options.length
        row = {"step": self.progress.step, "tokens": self.progress.step * tokens, "pace": pace, **numbers}
        self.progress.curve.append({name: float(f"{value:.4g}") if name != "tokens" else value for name, value in row.items()})
        self.say(
            f"step {self.progress.step}, {100 * self.part:.1f}%: {steps * tokens / seconds / 1e3:.0f} thousand tokens/s, "
            f"{self.progress.batches} batches made, "
            + ", ".join(f"{name} {value:.3g}" for name, value in numbers.items())
            + f", pace {pace:.2f}"
        )

    def look_back(self, held_out: dict[str, tuple[Batch, Batch]]) -> None:
        """Accuracy on held-out questions; then everything is saved."""
        found = {task: self.accuracy(*batch) for task, batch in held_out.items()}
        self.progress.curve.append({"tokens": self.progress.step * self.options.lines * self.options.length, "held_out": found})
        for name in ("exact", "token", "draft1", "draft2"):
            self.say(f"held out, {name}: " + "  ".join(f"{task} {100 * one[name]:.1f}" for task, one in found.items()))
        parameters = {path: np.asarray(value) for path, value in self.state.parameters.items()}
        moments = [np.asarray(leaf) for leaf in jax.tree.leaves(self.state.moments)]
        saved = Saved(parameters, moments, self.progress, self.processing)
        nano_record.save_state(self.state_file, saved)
        nano_record.save_parameters(self.options.output, saved)
        nano_record.export(self.options.output / "nano-bf16.tar", self.config, parameters, self.processing)
        nano_record.save_curve(self.options.output, self.progress.curve)
        self.last_saved = time.monotonic()
        self.say("saved")

    def accuracy(self, batch: Batch, on_device: Batch) -> dict[str, float]:
        """Teacher forced: last answers of which every token is the likeliest, tokens that are, and those of each draft depth."""
        rounded = jnp.float32(self.part >= self.options.quantize_from)
        right = [np.asarray(a) for a in self.trainer.correct(self.state.parameters, on_device, rounded)]
        graded, number = last_answers(batch)
        answers, wrong = np.unique(number[graded]), np.unique(number[graded & ~right[0]])
        found = {"exact": 1 - len(wrong) / max(1, len(answers))}
        for ahead, guessed in enumerate(right, start=1):
            seen = guessed[(batch.target == 2) & (batch.offset >= ahead)]
            found["token" if ahead == 1 else f"draft{ahead - 1}"] = float(seen.mean()) if seen.size else 0.0
        return {name: round(value, 4) for name, value in found.items()}

    def say(self, what: str) -> None:
        """A line with the seconds since this run began."""
        print(f"{time.monotonic() - self.began:6.1f} s  {what}", flush=True)


def prepare(saved: Saved | None) -> tuple[dict[str, str], tempfile.TemporaryDirectory, ModelConfig]:
    """The tokenizer's files, as they were trained with or made now, in a directory; and the configuration for them."""
    folder = tempfile.TemporaryDirectory()
    directory = Path(folder.name)
    if saved is None:
        write_processing_files(directory)
        processing = {name: (directory / name).read_text(encoding="utf-8") for name in PROCESSING}
    else:
        processing = saved.processing
        for name, text in processing.items():
            (directory / name).write_text(text, encoding="utf-8")
    tokenizer = Tokenizer.from_directory(directory, None)
    roles = {"eos_token_id": "content_model_end_sampling", "image_token_id": "image_slot", "audio_token_id": "audio_slot"}
    if tokenizer.vocab_size > VOCABULARY:
        raise InputError(f"the tokenizer has {tokenizer.vocab_size} ids, the model {VOCABULARY}")
    config = nano_config(tokenizer.vocab_size, {field: tokenizer.control[role] for field, role in roles.items()})
    return processing, folder, config


def main() -> int:
    """The command."""
    began = time.monotonic()
    options = arguments()
    start_jax()
    Training(options, began).run()
    return 0


if __name__ == "__main__":
    raise SystemExit(run(main))
