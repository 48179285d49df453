"""What a model needs of each device, and whether that fits: `python -m inkling_jax.plan`. Reads no weights, needs no device."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from inkling_jax.command_line import (
    EXIT_CODES,
    OK,
    USAGE,
    Parser,
    add_kv_dtype_option,
    add_message_options,
    print_error,
    run,
    set_up_messages,
    start_jax,
)

if TYPE_CHECKING:
    from inkling_jax.planning import Answer

EXAMPLES = f"""\
examples:
  # a release that is not here, on eight GPUs
  python -m inkling_jax.plan --model inkling --mesh tensor=8 --device-memory 141GB --context 131072 --batch 32

  # a checkpoint, on the devices of this machine; only headers are read
  python -m inkling_jax.plan --model ./Inkling-Small-NVFP4 --mesh tensor=2 --context 32768

{EXIT_CODES}; 2 also where it does not fit
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    args = _parser().parse_args(argv)
    return run(lambda: _plan(args))


def _parser() -> Parser:
    parser = Parser(
        prog="python -m inkling_jax.plan",
        description="Tell what a model takes of each device, the largest batch and context that fit, and a mesh that would do.",
        epilog=EXAMPLES,
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model", required=True, metavar="M", help="preset (inkling, inkling-small), directory, or hub id held here"
    )
    model.add_argument(
        "--format", choices=("nvfp4", "bf16"), help="of the release, where there are no files to tell (default nvfp4)"
    )
    model.add_argument("--dtype", choices=("bfloat16", "float32"), help="to compute in (default: the checkpoint's)")
    model.add_argument("--draft", action="store_true", help="with the draft head, as `load` takes it")
    machine = parser.add_argument_group("machine")
    machine.add_argument("--mesh", metavar="AXIS=N,...", help="devices to spread over, such as tensor=8 (default: one device)")
    machine.add_argument(
        "--experts-over", choices=("data",), help="spread the experts over the replicas of data=N as well (default: within each)"
    )
    machine.add_argument(
        "--device-memory",
        metavar="SIZE",
        help="what jax may use of each device, such as 141GB or 131GiB; of a GPU it takes three quarters unless "
        "XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise (default: as the first device here)",
    )
    work = parser.add_argument_group("work, as `load` takes it")
    work.add_argument("--context", type=int, metavar="N", help="longest sequence in tokens (default: the model's)")
    work.add_argument("--batch", type=int, default=8, metavar="N", help="sequences at once (default %(default)s)")
    work.add_argument("--chunk", type=int, default=512, metavar="N", help="prompt tokens a step (default %(default)s)")
    work.add_argument("--page-size", type=int, default=64, metavar="N", help="tokens a cache page (default %(default)s)")
    add_kv_dtype_option(work)
    parser.add_argument_group("output").add_argument("--json", action="store_true", help="print one JSON object instead")
    add_message_options(parser)
    return parser


def _plan(args: argparse.Namespace) -> int:
    set_up_messages(args.verbose, args.quiet)
    start_jax()
    from inkling_jax.planning import answer

    found = answer(
        args.model,
        release_format=args.format,
        dtype=args.dtype,
        mesh=args.mesh,
        device_memory=args.device_memory,
        context=args.context,
        batch=args.batch,
        chunk=args.chunk,
        page_size=args.page_size,
        kv_dtype=args.kv_dtype,
        draft=args.draft,
        experts_over=args.experts_over,
    )
    if args.json:
        print(json.dumps(_record(found)))
    else:
        _print_table(found)
        print("\n".join(found.sentences()))
    if not found.fits:
        print_error(found.refusal())
    return OK if found.fits else USAGE


def _record(found: Answer) -> dict[str, Any]:
    """The object that --json prints."""
    record = dataclasses.asdict(found)
    return record | {"total": found.memory.total, "margin": found.margin, "left": found.left, "fits": found.fits}


def _print_table(found: Answer) -> None:
    from rich.console import Console
    from rich.table import Table

    from inkling_jax.convert.progress import size_text

    table = Table(box=None, pad_edge=False, title=found.heading(), title_justify="left", title_style="")
    for heading, justify in (("of each device", "left"), ("bytes", "right"), ("", "right"), ("what", "left")):
        table.add_column(heading, justify=justify, no_wrap=True)  # pyright: ignore[reportArgumentType]
    for name, nbytes, what in found.rows():
        table.add_row(name, f"{nbytes:,}", size_text(nbytes), what)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


if __name__ == "__main__":
    sys.exit(main())
