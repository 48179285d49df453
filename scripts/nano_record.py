"""What a training run leaves: its state to resume from, parameters that travel, the checkpoint, and curves."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from inkling_jax.config import ModelConfig
from inkling_jax.convert.publish import publish
from inkling_jax.errors import InputError

PIECE_BYTES = 15 << 20  # of parameters in one file
PROCESSING = ("tokenizer.json", "tokenizer_config.json", "processor_config.json")


@dataclasses.dataclass
class Progress:
    """How far a training is, over all its runs."""

    step: int = 0
    seconds: float = 0.0  # of training, compiling not counted
    batches: int = 0  # made so far: the number of the next one
    curve: list[dict[str, Any]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Saved:
    """What was read back. `moments` is None where parameters alone were kept."""

    parameters: dict[str, np.ndarray]
    moments: list[np.ndarray] | None
    progress: Progress
    processing: dict[str, str]  # the tokenizer's files, which parameters mean nothing without


def save_state(file: Path, saved: Saved) -> None:
    """Everything, in one file, which is there whole or not at all."""
    arrays = {f"parameter {path}": value for path, value in saved.parameters.items()}
    arrays |= {f"moment {i:04d}": value for i, value in enumerate(saved.moments or ())}
    _save(file, arrays | _about(saved))


def save_parameters(directory: Path, saved: Saved) -> None:
    """The parameters in float32 as params-0.npz, params-1.npz, ..., of PIECE_BYTES each; what is little is in the first."""
    pieces, size = [dict(_about(saved))], 0
    for path, value in sorted(saved.parameters.items()):
        if size and size + value.nbytes > PIECE_BYTES:
            pieces.append({})
            size = 0
        pieces[-1][f"parameter {path}"] = value
        size += value.nbytes
    for number, piece in enumerate(pieces):
        _save(directory / f"params-{number}.npz", piece)


def load(files: Sequence[Path]) -> Saved:
    """A state file, or all pieces of parameters. Raises InputError for files that are neither."""
    arrays: dict[str, np.ndarray] = {}
    for file in files:
        if not file.is_file():
            raise InputError(f"{file}: no such file to resume from")
        with np.load(file) as found:
            arrays |= dict(found)
    if "about" not in arrays:
        raise InputError(f"{', '.join(map(str, files))}: hold no progress; give the state, or params-0.npz and those after it")
    about = json.loads(str(arrays.pop("about")))
    parameters = {name.removeprefix("parameter "): a for name, a in arrays.items() if name.startswith("parameter ")}
    missing = sorted(set(about["paths"]) - parameters.keys())
    if missing:
        raise InputError(f"{', '.join(map(str, files))}: lack {len(missing)} parameters, such as {missing[0]}: give all pieces")
    moments = [arrays[name] for name in sorted(arrays) if name.startswith("moment ")] or None
    return Saved(parameters, moments, Progress(**about["progress"]), about["processing"])


def export(file: Path, config: ModelConfig, parameters: Mapping[str, np.ndarray], processing: Mapping[str, str]) -> None:
    """The BF16 checkpoint in the published layout, tokenizer included, as a tar file."""
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        directory = Path(folder) / "nano-bf16"
        publish(directory, config, parameters)
        for name, text in processing.items():
            (directory / name).write_text(text, encoding="utf-8")
        whole = Path(folder) / file.name
        with tarfile.open(whole, "w") as archive:
            archive.add(directory, directory.name)
        os.replace(whole, file)


def save_curve(directory: Path, curve: Sequence[Mapping[str, Any]]) -> None:
    """curve.json, and as a picture curve.png where matplotlib is installed."""
    (directory / "curve.json").write_text(json.dumps(list(curve)) + "\n", encoding="utf-8")
    try:
        draw(directory / "curve.png", curve)
    except ImportError:
        print("no matplotlib here: python scripts/nano_record.py curve.json draws the picture elsewhere")


def draw(file: Path, curve: Sequence[Mapping[str, Any]]) -> None:
    """Loss, accuracies on training text, and held-out accuracy by task, over training tokens."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (losses, accuracies, tasks) = pyplot.subplots(1, 3, figsize=(16, 5))
    steps = [row for row in curve if "loss" in row]
    for axes, names in ((losses, ("loss", "draft1_loss", "draft2_loss")), (accuracies, ("accuracy", "draft1_accuracy"))):
        for name in names:
            shown = [row for row in steps if name in row]
            axes.plot([row["tokens"] / 1e6 for row in shown], [row[name] for row in shown], label=name.replace("_", " "), lw=0.8)
    losses.set(yscale="log", ylabel="cross entropy of tokens to write")
    accuracies.set(ylabel="tokens to write that are the likeliest", ylim=(0, 1))
    held_out = [row for row in curve if "held_out" in row]
    for task in sorted({task for row in held_out for task in row["held_out"]}):
        shown = [row for row in held_out if task in row["held_out"]]
        values = [row["held_out"][task]["exact"] for row in shown]
        tasks.plot([row["tokens"] / 1e6 for row in shown], values, label=task, marker=".", lw=0.8)
    tasks.set(ylabel="held-out answers with every token the likeliest", ylim=(0, 1.01))
    for axes in (losses, accuracies, tasks):
        axes.set(xlabel="million tokens")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(file, dpi=80)
    pyplot.close(figure)


def _about(saved: Saved) -> dict[str, np.ndarray]:
    about = {"progress": dataclasses.asdict(saved.progress), "processing": saved.processing, "paths": sorted(saved.parameters)}
    return {"about": np.array(json.dumps(about))}


def _save(file: Path, arrays: Mapping[str, np.ndarray]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.partial")
    with open(partial, "wb") as stream:
        np.savez(stream, **arrays)  # pyright: ignore[reportArgumentType]
    os.replace(partial, file)


if __name__ == "__main__":
    source = Path(sys.argv[1])
    draw(source.with_suffix(".png"), json.loads(source.read_text(encoding="utf-8")))
