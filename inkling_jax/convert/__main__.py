"""Convert a checkpoint from a terminal: python -m inkling_jax.convert SRC DST."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

from inkling_jax.command_line import EXIT_CODES, OK, Parser, add_message_options, run, set_up_messages

_DESCRIPTION = """\
Convert a published checkpoint (safetensors) into an Orbax checkpoint that every device reads its own part of.

Weights keep their bits: NVFP4 stays packed. The configuration, tokenizer and templates go along, and conversion.json
says what it was made of. What is interrupted, even by a kill or a full disk, goes on when the same command runs again;
until it is whole it is called DST.partial."""
_EXAMPLES = """\
examples:
  python -m inkling_jax.convert path/to/Inkling-Small-NVFP4 path/to/converted --dry-run
  python -m inkling_jax.convert path/to/Inkling-Small-NVFP4 path/to/converted
  python -m inkling_jax.convert path/to/Inkling-Small-NVFP4 path/to/converted --verify
  python -m inkling_jax.generate --model path/to/converted --mesh tensor=4 --prompt Hello

"""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code."""
    options = _parser().parse_args(arguments)

    def command() -> int:
        import jax

        from inkling_jax.convert.conversion import Conversion
        from inkling_jax.convert.converted import RECORD
        from inkling_jax.convert.converter import convert
        from inkling_jax.convert.progress import size_text
        from inkling_jax.convert.verify import verify
        from inkling_jax.sharding.mesh import mesh_sizes
        from inkling_jax.sources import find_source

        jax.config.update("jax_platforms", "cpu")  # nothing here needs an accelerator, whose memory others may want
        source = Path(find_source(options.source, "checkpoint"))
        mesh = mesh_sizes(options.mesh) if options.mesh else None
        conversion = Conversion.of(source, Path(os.path.expanduser(options.destination)), mesh)
        if options.dry_run:
            conversion.check_destination()
            print(*conversion.lines(), sep="\n")
            conversion.check_space()
            return OK
        if not (options.verify and (conversion.destination / RECORD).exists()):
            try:
                convert(conversion, quiet=options.quiet)
            except KeyboardInterrupt:
                print(f"\nkept in {conversion.partial}: the same command goes on with it", file=sys.stderr)
                raise
        if options.verify:
            print(f"{conversion.destination}: {size_text(verify(conversion, quiet=options.quiet))} equal bit for bit")
        return OK

    set_up_messages(options.verbose, options.quiet)
    signal.signal(signal.SIGTERM, _interrupt)
    return run(command)


def _parser() -> Parser:
    parser = Parser(prog="python -m inkling_jax.convert", description=_DESCRIPTION, epilog=_EXAMPLES + EXIT_CODES)
    parser.add_argument("source", metavar="SRC", help="a checkpoint directory in the published layout, or a hub id")
    parser.add_argument("destination", metavar="DST", type=Path, help="a directory that is not there yet, or empty")
    parser.add_argument(
        "--mesh",
        metavar="AXIS=N,...",
        help="cut the files for the devices of this mesh; any other can load them too (default: for up to 16 devices an axis)",
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be written, and whether it fits")
    parser.add_argument("--verify", action="store_true", help="compare DST with SRC bit for bit, once it is written")
    add_message_options(parser)
    return parser


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    raise SystemExit(main())
