"""Compare with Hugging Face Transformers on one random checkpoint of some gigabytes: logits, decode speed and loading.

    python scripts/compare_transformers.py --output bench/results/compare_transformers.json

Needs Transformers 5.24 and PyTorch, which the package does not. One run writes the checkpoint, has Transformers and this package
load it in float32 and bfloat16, compares the logits of whole prompts longer than the window, and times decoding in bfloat16. It
exits with 1 where float32 logits differ, or loading took more memory than it may. `--small` tries the script on a CPU.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from comparison_model import Size, size

import inkling_jax
from inkling_jax.benchmarks.ceilings import read_ceiling
from inkling_jax.benchmarks.rows import Row, make_row, save_rows
from inkling_jax.benchmarks.traffic import step_traffic
from inkling_jax.convert.safetensors_reader import Checkpoint
from inkling_jax.convert.weight_map import WeightPlan
from inkling_jax.convert.write import write_checkpoint
from inkling_jax.llm import LLM

RIVAL = Path(__file__).with_name("transformers_rival.py")
VERSION = "5.24."
KERNELS = "reference"
BATCHES = (1, 8)
PROMPTS = 4
FLOAT32_ERROR = 1e-4
TIE = 3e-6  # a router decided by less than this may choose otherwise in another order of float32 sums


def main() -> None:
    """Run all of it; the process exits with 1 where something is not as it should be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help="JSON file that the rows are merged into")
    parser.add_argument("--small", action="store_true", help="a model of some megabytes, to try the script")
    options = parser.parse_args()
    require_transformers()
    chosen = size(options.small)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "checkpoint"
        start = time.perf_counter()
        total = write_checkpoint(directory, chosen.config)
        say(f"wrote {total / 1e9:.2f} GB", start)
        prompts = np.random.default_rng(1).integers(0, chosen.config.text.usable_vocab_size - 3, (PROMPTS, chosen.prompt_tokens))
        start = time.perf_counter()
        rival = run_rival(directory, Path(folder), prompts, chosen)
        say(f"Transformers {rival['transformers']}, PyTorch {rival['torch']}, experts {rival['experts']!r}: all it does", start)
        for step in rival["steps"]:
            print(f"Transformers, batch {step['batch']}: {1e3 * step['seconds']:.2f} ms a step, {step['how']}", flush=True)
        rows, failures = compare(directory, prompts, chosen, rival)
    if options.output:
        save_rows(options.output, rows)
    for failure in failures:
        print(f"FAILED: {failure}")
    sys.exit(1 if failures else 0)


def require_transformers() -> None:
    """Exit with one line unless the Transformers that an import would find is one that computes this model right."""
    try:
        found = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        sys.exit(f"needs transformers {VERSION}x, found none")
    if not found.startswith(VERSION):
        sys.exit(
            f"needs transformers {VERSION}x, found {found}: earlier ones misread the widths of published configurations and norm "
            "embeddings twice; put another one first on PYTHONPATH"
        )


def run_rival(directory: Path, folder: Path, prompts: np.ndarray, chosen: Size) -> dict[str, Any]:
    """What the other side's process found, its arrays included."""
    np.save(folder / "prompts.npy", prompts)
    task = {
        "directory": str(directory),
        "prompts": str(folder / "prompts.npy"),
        "output": str(folder / "rival.npz"),
        "batches": BATCHES,
        "new_tokens": chosen.new_tokens,
    }
    run = subprocess.run([sys.executable, RIVAL], input=json.dumps(task), stdout=subprocess.PIPE, text=True, check=False)
    if run.returncode:
        sys.exit("the Transformers side failed")
    with np.load(folder / "rival.npz") as arrays:
        return json.loads(run.stdout.splitlines()[-1]) | dict(arrays)


def compare(directory: Path, prompts: np.ndarray, chosen: Size, rival: dict[str, Any]) -> tuple[list[Row], list[str]]:
    """Our side in both dtypes beside the other's; the rows of decode steps, and what failed."""
    warm_up(directory.with_name("warm"))
    plan = WeightPlan.build(chosen.config, Checkpoint.open(directory))
    right, failures, seconds, errors = rival["logits float32"], [], {}, {}
    for dtype in ("bfloat16", "float32"):  # peaks of device memory are the process's: the smaller first
        llm, load = load_measured(directory, dtype, chosen, plan)
        failures += load.pop("failures")
        with llm:
            if dtype == "bfloat16":
                seconds = {batch: step_seconds(llm, prompts, batch, chosen.new_tokens) for batch in BATCHES}
                loaded = load
            start = time.perf_counter()
            found = np.stack([llm.score(prompt.tolist()) for prompt in prompts])
            say(f"{dtype} logits, compilation included", start)
            errors[dtype] = relative(found, right)
            if dtype == "float32":
                failures += check_float32(found, right, rival["margins"])
    errors["rival"] = relative(rival["logits bfloat16"], right)
    print(f"logits against those of Transformers in float32: ours in float32 {errors['float32']:.1e}, in bfloat16", end=" ")
    print(f"{errors['bfloat16']:.1e}; those of Transformers in bfloat16 {errors['rival']:.1e}")
    return step_rows(chosen, plan, seconds, rival, errors, loaded), failures


def warm_up(directory: Path) -> None:
    """Load a small model: what device, compiler and transfers keep in host memory is no part of a checkpoint's load."""
    write_checkpoint(directory, size(small=True).config)
    inkling_jax.load(str(directory), dtype="bfloat16", quiet=True, max_context=256, kernels=KERNELS).close()


def load_measured(directory: Path, dtype: str, chosen: Size, plan: WeightPlan) -> tuple[LLM, dict[str, Any]]:
    """The model, and what loading it took. Memory is measured where the system says what it is."""
    device = jax.devices()[0]
    largest = max(info.nbytes for info in plan.checkpoint.tensors.values())
    context = chosen.prompt_tokens + chosen.new_tokens + 64
    start = time.perf_counter()
    options: dict[str, Any] = {"slots": max(BATCHES), "chunk": chosen.prompt_tokens, "max_context": context, "kernels": KERNELS}
    llm, host = host_peak(lambda: inkling_jax.load(str(directory), dtype=dtype, quiet=True, **options))
    elapsed = time.perf_counter() - start
    found = {"load_s": round(elapsed, 3), "load_gbs": round(plan.total_bytes / elapsed / 1e9, 3), "failures": []}
    weights = sum(leaf.nbytes for leaf in llm.engine.leaves)
    state = sum(leaf.nbytes for leaf in jax.tree.leaves(llm.engine.state))
    say(f"loaded as {dtype}: {plan.total_bytes / 1e9:.2f} GB at {found['load_gbs']:.2f} GB/s (files lately written)", start)
    stats = device.memory_stats()
    if stats:
        # What is in use is a little more than the arrays: the allocator rounds up, and does not split blocks of like size.
        peak, kept = stats["peak_bytes_in_use"], stats["bytes_in_use"]
        print(f"  device peak {peak / 1e9:.3f} GB, {kept / 1e9:.3f} GB in use afterwards:", end=" ")
        print(f"{weights / 1e9:.3f} GB of weights and {state / 1e9:.3f} GB of cache")
        if peak > kept + largest:
            found["failures"].append(f"loading as {dtype} took {peak - kept} bytes more of the device than it kept")
    if host is not None and stats:  # elsewhere the weights themselves lie in the host's memory
        print(f"  host peak {host / 1e6:.0f} MB; the largest tensor is {largest / 1e6:.0f} MB")
        if host > 3 * largest:
            found["failures"].append(f"loading as {dtype} took {host} bytes of the host, {3 * largest} are allowed")
    return llm, found


def host_peak(work: Callable[[], LLM]) -> tuple[LLM, int | None]:
    """What `work` returns, and how far resident memory rose meanwhile; None where Linux does not let us ask."""

    def status(field: str) -> int:
        return int(Path("/proc/self/status").read_text().split(field + ":")[1].split()[0]) * 1024

    try:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
        before = status("VmRSS")
    except (OSError, IndexError):
        return work(), None
    return work(), status("VmHWM") - before


def check_float32(found: np.ndarray, right: np.ndarray, margins: np.ndarray) -> list[str]:
    """Failures among prompts in which no router's choice hung on rounding; at least half the prompts must be such."""
    errors = [relative(ours, theirs) for ours, theirs in zip(found, right, strict=True)]
    for number, (error, margin) in enumerate(zip(errors, margins, strict=True)):
        print(f"  prompt {number}: float32 logits differ by {error:.1e}; smallest router margin {margin:.1e}")
    clear = [error for error, margin in zip(errors, margins, strict=True) if margin > TIE]
    if len(clear) < len(errors) / 2:
        return [f"only {len(clear)} of {len(errors)} prompts have router margins above {TIE}"]
    return [f"float32 logits differ by {error:.1e} without a tie" for error in clear if not error <= FLOAT32_ERROR]


def relative(found: np.ndarray, right: np.ndarray) -> float:
    """|found - right| / |right|."""
    return float(np.linalg.norm(found - right) / np.linalg.norm(right))


def step_seconds(llm: LLM, prompts: np.ndarray, batch: int, new_tokens: int) -> float:
    """Seconds of a decode step: what `new_tokens` steps add to the prompts and their first tokens. The best of three runs."""
    ids = [prompts[row % len(prompts)].tolist() for row in range(batch)]

    def seconds(tokens: int) -> float:
        start = time.perf_counter()
        done = llm.generate(ids, inkling_jax.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
        assert all(len(completion.token_ids) == tokens for completion in done)
        return time.perf_counter() - start

    start = time.perf_counter()
    seconds(16)
    say(f"batch {batch}: compiled", start)
    first = min(seconds(1) for _ in range(3))
    step = (min(seconds(1 + new_tokens) for _ in range(3)) - first) / new_tokens
    say(f"ours, batch {batch}: {1e3 * step:.2f} ms a step, {batch / step:.0f} tokens/s; with compiling and warming up", start)
    return step


def step_rows(
    chosen: Size,
    plan: WeightPlan,
    seconds: dict[int, float],
    rival: dict[str, Any],
    errors: dict[str, float],
    loaded: dict[str, Any],
) -> list[Row]:
    """A row for each batch and each way of stepping, all beside the same bound."""
    device, text = jax.devices()[0], chosen.config.text
    ceiling = read_ceiling(device)
    contexts = range(chosen.prompt_tokens + 1, chosen.prompt_tokens + chosen.new_tokens + 1)
    theirs = f"transformers {rival['transformers']}"
    ways = [(batch, "step", KERNELS, taken) for batch, taken in seconds.items()]
    ways += [(step["batch"], "step_rival", f"{theirs} {step['how']}", step["seconds"]) for step in rival["steps"]]
    rows = []
    for batch, bench, kernels, taken in sorted(ways, key=lambda way: way[0]):
        traffic = step_traffic(plan.abstract("bfloat16"), text, {}, rows=batch, queries=1, contexts=contexts)
        ours = bench == "step"
        about: dict[str, Any] = {name: rival[name] for name in ("torch", "experts")}
        if ours:
            about = {"rel_err_float32": errors["float32"]} | loaded
        rows.append(
            make_row(
                bench,
                f"bf16 {text.hidden_size}x{text.num_layers} decode batch={batch} context={contexts[-1]}",
                "decode",
                device,
                kernels=kernels,
                time_us=taken * 1e6,
                bound_us=traffic.bytes / ceiling.bytes_per_second * 1e6,
                batch=batch,
                context=contexts[-1],
                tokens_per_s=round(batch / taken, 1),
                rel_err=errors["bfloat16" if ours else "rival"],
                bytes=round(traffic.bytes),
                **about,
                **ceiling.fields(),
            )
        )
        print(f"batch {batch}: {batch / taken:8.1f} tokens/s, {taken * 1e3:.2f} ms a step, {kernels}")
    return rows


def say(what: str, start: float) -> None:
    """A line with the seconds since `start`."""
    print(f"{what}: {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
