"""Make the model that comes with the package from a trained one: NVFP4, with the largest inputs of its experts.

    python scripts/ship_nano.py path/to/nano-bf16 [--output inkling_jax/nano]

Calibrated on training examples of every task, pictures and sounds among them. A half-written output goes on when run again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from inkling_jax.batch.request import Head, Job
from inkling_jax.calibration import Calibration
from inkling_jax.command_line import run, set_up_messages, start_jax
from inkling_jax.convert.quantization import Quantization, write_quantized
from inkling_jax.engine.request import SamplingParams
from inkling_jax.errors import CapacityError
from inkling_jax.evals.nano.tasks import TASKS, make_example
from inkling_jax.sources import NANO

EXAMPLES = 8  # of each task
MOST_BYTES = 12_000_000


def main() -> int:
    """Write the files and say what they weigh."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--output", type=Path, default=NANO)
    options = parser.parse_args()
    set_up_messages(verbose=False, quiet=False)
    start_jax()
    calibration = Calibration(options.source, Path("the nano tasks"), requests(), None, quiet=True)
    quantization = Quantization.of(options.source, options.output, calibrated=True)
    if quantization.nbytes() > MOST_BYTES:
        raise CapacityError(f"{options.source} would take {quantization.nbytes()} bytes, more than the {MOST_BYTES} of a package")
    write_quantized(quantization, calibration.measure)
    files = sorted(options.output.iterdir())
    print(*(f"{file.stat().st_size:>10,} {file.name}" for file in files), sep="\n")
    return 0


def requests() -> tuple[Job, ...]:
    """Whole conversations, answers included."""
    examples = [make_example(task, 0, "train", index) for task in TASKS for index in range(EXAMPLES)]
    return tuple(
        Job(Head(number, number, False, ""), SamplingParams(), messages=e.messages, tools=e.tools, effort=e.effort)
        for number, e in enumerate(examples, start=1)
    )


if __name__ == "__main__":
    sys.exit(run(main))
