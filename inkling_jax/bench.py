"""Benchmarks from the command line: `python -m inkling_jax.bench`. Rows go to a JSON file, a table to standard output."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence

from inkling_jax.command_line import (
    EXIT_CODES,
    Parser,
    add_kernels_option,
    add_kv_dtype_option,
    add_message_options,
    run,
    set_up_messages,
    start_jax,
)
from inkling_jax.config import PRESETS

EXAMPLES = f"""\
examples:
  # one of eight ranks of a released shape, with random weights, on one GPU
  python -m inkling_jax.bench step --preset inkling-small --rank-of tensor=8 --batch 1,8,64 --context 1024,8192

  # its prefill as well, and a first look in seconds: six layers
  python -m inkling_jax.bench step --preset inkling --rank-of tensor=8 --layers 6 --batch 1 --context 1024 --prefill 2048

  # the same rank under traffic: eight requests at once, then sixty-four, a new one when one ends
  python -m inkling_jax.bench serve --preset inkling-small --rank-of tensor=8 --concurrency 8,64

  # the expert kernels at one rank's share of the released shapes, beside what XLA offers
  python -m inkling_jax.bench expert_matmul --cases D4096-F256-E256 --rivals

  # loading: a random checkpoint is written, loaded as it is and converted, and removed (twice the size on the disk)
  python -m inkling_jax.bench load --size 8GB --directory .

  # what the planner says a device holds, beside what it did hold
  python -m inkling_jax.bench memory --preset inkling-small --layers 6 --chunks 512,2048,8192

  # the shape of a checkpoint, whose tensors are not read
  python -m inkling_jax.bench step --model ./ckpt --batch 1 --context 256

{EXIT_CODES}
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; its exit code."""
    args = _parser().parse_args(argv)
    return run(lambda: _bench(args))


def _bench(args: argparse.Namespace) -> int:
    set_up_messages(args.verbose, args.quiet)
    start_jax()
    return importlib.import_module(f"inkling_jax.benchmarks.{args.bench}").run(args)


def _parser() -> Parser:
    parser = Parser(
        prog="python -m inkling_jax.bench",
        description="Measure the model on this machine. A row is replaced when its case is measured again.",
        epilog=EXAMPLES,
    )
    benches = parser.add_subparsers(dest="bench", required=True, metavar="BENCH")
    for name, (summary, add_options) in BENCHES.items():
        bench = benches.add_parser(name, help=summary, description=summary, epilog=EXAMPLES)
        add_options(bench)
        bench.add_argument("--output", default=f"bench/results/{name}.json", metavar="FILE", help="rows (default %(default)s)")
        add_message_options(bench)
    return parser


def _add_shape_options(parser: argparse.ArgumentParser) -> None:
    shape = parser.add_mutually_exclusive_group(required=True)
    shape.add_argument("--preset", choices=PRESETS, help="a released shape")
    shape.add_argument("--model", metavar="DIR", help="the shape that a checkpoint's config.json gives")
    add_kernels_option(parser)
    parser.add_argument(
        "--rank-of", default="tensor=1", metavar="AXIS=N,...", help="take one rank's share of such a mesh (default %(default)s)"
    )
    add_kv_dtype_option(parser)
    parser.add_argument("--layers", type=int, metavar="N", help="the first N layers only (default: all)")


def _add_step_options(parser: argparse.ArgumentParser) -> None:
    _add_shape_options(parser)
    parser.add_argument(
        "--batch", type=_sizes, default=[1, 8, 64], metavar="1,8,...", help="sequences that decode (default 1,8,64)"
    )
    parser.add_argument(
        "--context",
        type=_sizes,
        default=[1024, 8192],
        metavar="1024,...",
        help="tokens that each has (default 1024,8192); every batch and context is a program to compile",
    )
    parser.add_argument("--prefill", type=_sizes, default=[], metavar="2048,...", help="measure prompts of so many tokens too")
    parser.add_argument(
        "--steps-per-call", type=_size, default=8, metavar="N", help="tokens a call decodes (default %(default)s)"
    )
    parser.add_argument("--page-size", type=_size, default=64, metavar="N", help="tokens a cache page (default %(default)s)")


def _add_towers_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", choices=PRESETS, required=True, help="a released shape")
    parser.add_argument(
        "--items", type=_sizes, default=[1, 16], metavar="1,16,...", help="images, or minutes of audio, a call (default 1,16)"
    )


def _add_expert_matmul_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cases", type=_words, default=[], metavar="WORD,...", help="cases whose names contain a word (default all)"
    )
    parser.add_argument("--tokens", type=_sizes, default=[], metavar="1,8,...", help="cases of so many tokens (default any)")
    parser.add_argument("--variants", type=_words, default=["sm90"], metavar="NAME,...", help="tunings to compare (default sm90)")
    parser.add_argument("--rivals", action="store_true", help="XLA's ways to compute the same as well")
    parser.add_argument("--detail", action="store_true", help="the time of each kernel as well")
    parser.add_argument(
        "--time-limit", type=_size, default=600, metavar="S", help="begin no row after so many seconds (default %(default)s)"
    )


def _add_serve_options(parser: argparse.ArgumentParser) -> None:
    parser.description = f"""{parser.description}.

  python -m inkling_jax.bench serve --preset inkling-small --rank-of tensor=8 --kernels sm90 --time-limit 150

Six programs are compiled first, side by side: a decode call for each number of requests at once, and a
prompt chunk. A row is written as soon as its number is measured, and none is begun after --time-limit."""
    _add_shape_options(parser)
    parser.add_argument(
        "--concurrency",
        type=_sizes,
        default=[8, 32, 64, 128, 256],
        metavar="8,32,...",
        help="requests at once (default %(default)s)",
    )
    parser.add_argument("--requests", type=_size, metavar="N", help="that come at each (default: twice as many as run at once)")
    parser.add_argument("--prompt", type=_lengths, default=(256, 768), metavar="N-M", help="prompt tokens (default 256-768)")
    parser.add_argument(
        "--answer", type=_lengths, default=(64, 192), metavar="N-M", help="tokens that each makes (default 64-192)"
    )
    parser.add_argument("--rate", type=float, metavar="R", help="requests a second (Poisson; default: the next when one ends)")
    parser.add_argument(
        "--shared", type=float, default=0.0, metavar="S", help="share of prompts with a common beginning (default 0)"
    )
    parser.add_argument("--prefix", type=int, default=0, metavar="N", help="tokens of that beginning")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the traffic (default %(default)s)")
    parser.add_argument("--deterministic", action="store_true", help="as `generate` has it: to see what it costs")
    parser.add_argument("--chunk", type=_size, default=512, metavar="N", help="prompt tokens a step (default %(default)s)")
    parser.add_argument("--tokens-per-call", type=_size, default=8, metavar="N", help="decode steps a call (default %(default)s)")
    parser.add_argument("--page-size", type=_size, default=64, metavar="N", help="tokens a cache page (default %(default)s)")
    parser.add_argument(
        "--time-limit", type=_size, default=600, metavar="S", help="begin nothing after so many seconds (default %(default)s)"
    )


def _lengths(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    return _size(low), _size(high or low)


def _add_load_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", choices=PRESETS, default="inkling-small", help="whose widths (default %(default)s)")
    parser.add_argument(
        "--size", default="8GB", help="of the checkpoint, which the number of experts follows (default %(default)s)"
    )
    parser.add_argument("--directory", metavar="DIR", help="on the disk to measure (default: where temporary files go)")
    add_kernels_option(parser)
    parser.add_argument(
        "--time-limit", type=_size, default=100, metavar="S", help="begin no load after so many seconds (default %(default)s)"
    )


def _add_memory_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", choices=PRESETS, default="inkling-small", help="a released shape (default %(default)s)")
    parser.add_argument("--layers", type=_size, default=6, metavar="N", help="the first N layers only (default %(default)s)")
    parser.add_argument(
        "--chunks", type=_sizes, default=[512, 2048, 8192], metavar="512,...", help="prompt tokens a step (default 512,2048,8192)"
    )
    parser.add_argument("--context", type=_size, default=16384, metavar="N", help="longest sequence (default %(default)s)")
    add_kernels_option(parser)
    parser.add_argument(
        "--time-limit", type=_size, default=100, metavar="S", help="begin no chunk after so many seconds (default %(default)s)"
    )


def _words(text: str) -> list[str]:
    return text.split(",")


def _sizes(text: str) -> list[int]:
    return [_size(part) for part in text.split(",")]


def _size(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above zero")
    return int(text)


BENCHES: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "step": ("time one rank's decode and prefill steps, with random weights", _add_step_options),
    "serve": ("serve synthetic traffic on one rank of a real shape, with random weights", _add_serve_options),
    "expert_matmul": ("time the routed feed-forward of a layer on Hopper", _add_expert_matmul_options),
    "load": ("time loading, as published and converted, and the first token after it", _add_load_options),
    "memory": ("compare the planner with the device memory that a model takes", _add_memory_options),
    "towers": ("time the vision and audio towers of a released shape, with random weights", _add_towers_options),
}


if __name__ == "__main__":
    sys.exit(main())
