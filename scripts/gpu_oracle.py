"""Measure how far the model is from the reference answers in tests/data, on the device that jax finds.

    python scripts/gpu_oracle.py --output bench/results/oracle.json

Float32 shows that the device computes the same model; bfloat16 shows what its precision costs, most of it where a router's choice
between two nearly equal experts turns out otherwise.
"""

from __future__ import annotations

import argparse
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file

from inkling_jax.benchmarks.ceilings import ReadCeiling, read_ceiling
from inkling_jax.benchmarks.rows import Row, make_row, save_rows
from inkling_jax.benchmarks.timing import best_seconds
from inkling_jax.benchmarks.traffic import step_traffic
from inkling_jax.convert.converted import open_weights
from inkling_jax.llm import LLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from oracle_distances import SETTINGS, distances, open_set

DATA = Path(__file__).resolve().parents[1] / "tests" / "data"


def main() -> None:
    """Measure every set in both dtypes, print a line each, and keep the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help="JSON file that the rows are merged into")
    parser.add_argument("--preset", action="append", choices=SETTINGS, help="only this set; may be repeated")
    parser.add_argument(
        "--kernels", choices=("reference", "sm90"), default="reference", help="sm90 takes the set gpu in bfloat16"
    )
    options = parser.parse_args()
    ceiling = read_ceiling(jax.devices()[0])
    rows = []
    for preset in options.preset or SETTINGS:
        with tempfile.TemporaryDirectory() as folder:
            with tarfile.open(DATA / f"{preset}-nvfp4.tar.xz") as archive:
                archive.extractall(folder, filter="data")
            answers = load_file(Path(folder) / "expected-nvfp4.safetensors")
            for dtype in ("float32", "bfloat16") if options.kernels == "reference" else ("bfloat16",):
                with open_set(preset, Path(folder) / "nvfp4", dtype, options.kernels) as llm:
                    found = distances(llm, answers)
                    print(f"{preset} {dtype}: " + ", ".join(f"{name} {value:.2e}" for name, value in found.items()), flush=True)
                    rows.append(row(preset, Path(folder) / "nvfp4", llm, dtype, options.kernels, answers, found, ceiling))
    if options.output:
        save_rows(options.output, rows)


def row(
    preset: str,
    directory: Path,
    llm: LLM,
    dtype: str,
    kernels: str,
    answers: Mapping[str, np.ndarray],
    found: Mapping[str, float],
    ceiling: ReadCeiling,
) -> Row:
    """What `distances` found as a result row. Its time is that of tracing the longest prompt, everything compiled."""
    ids = max((answers[name] for name in answers if name.endswith(".ids")), key=len).tolist()
    return make_row(
        "oracle",
        f"{preset} nvfp4 {dtype}",
        "prefill",
        jax.devices()[0],
        kernels=kernels,
        rel_err=found["logits"],
        rel_err_median_token=found["token"],
        rel_err_hidden=found["hidden"],
        rel_err_routing=found["weights"],
        routed_otherwise=found["experts"],
        **prompt_time(llm, directory, ids, ceiling, trace=True),
    )


def prompt_time(llm: LLM, directory: Path, ids: Sequence[int], ceiling: ReadCeiling, trace: bool = False) -> dict[str, Any]:
    """Devices, time, bound, tokens and ceiling of a row: of reading a prompt in chunks, everything compiled."""
    devices = llm.engine.programs.mesh.size
    leaves = open_weights(llm.config, directory).abstract(llm.engine.programs.dtype)
    traffic = step_traffic(leaves, llm.config.text, {}, rows=1, queries=len(ids), contexts=range(len(ids), len(ids) + 1))
    return {
        "devices": devices,
        "time_us": best_seconds(lambda: list(llm.engine.evaluate(ids, trace))) * 1e6,
        "bound_us": traffic.bytes / devices / ceiling.bytes_per_second * 1e6,
        "tokens": len(ids),
        **ceiling.fields(),
    }


if __name__ == "__main__":
    main()
