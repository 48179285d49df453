"""Write a tiny checkpoint of random weights in the published NVFP4 layout and generate from it: shows that all parts work.

python scripts/demo.py
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from inkling_jax.command_line import cache_directory, run
from inkling_jax.demo_model import write_demo_model

ROOT = Path(__file__).resolve().parents[1]
PROMPT = "Tell me a story."


def main() -> int:
    """Write, say what this is, and become the command that generates."""
    directory = cache_directory() / "demo"
    shutil.rmtree(directory, ignore_errors=True)  # what an earlier run left there
    size = write_demo_model(directory)
    options = ["--model", str(directory), "--prompt", PROMPT, "--max-tokens", "120", "--ignore-eos", "--seed", "1"]
    command = [sys.executable, "-m", "inkling_jax.generate", *options]
    print(
        f"A tiny Inkling ({size / 1e6:.1f} MB, published NVFP4 layout) is in {directory}.\n"
        "Its weights are RANDOM and it has learned nothing: the text below is noise. Everything that makes it is real.\n"
        f"To run it again, in {ROOT}:\n  {shlex.join(command)}\n",
        flush=True,
    )
    os.chdir(ROOT)
    os.execv(sys.executable, command)


if __name__ == "__main__":
    sys.exit(run(main))
