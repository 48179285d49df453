"""Convert a checkpoint from a terminal: python -m inkling_jax.convert SRC DST."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from inkling_jax.command_line import EXIT_CODES, OK, Parser, add_message_options, run, set_up_messages
from inkling_jax.errors import InputError

if TYPE_CHECKING:
    from inkling_jax.convert.destination import Destination

_DESCRIPTION = """\
Convert a published checkpoint (safetensors) into an Orbax checkpoint that every device reads its own part of.

Weights keep their bits: NVFP4 stays packed. The configuration, tokenizer and templates go along, and conversion.json
says what it was made of. What is interrupted, even by a kill or a full disk, goes on when the same command runs again;
until it is whole it is called DST.partial.

With --quantize nvfp4 a published checkpoint in BF16 becomes one in NVFP4 instead, safetensors again and laid out as the
releases are: the experts of every sparse layer but the first are packed, each block of 16 under the scale that leaves
the smallest squared error, and all else is copied byte for byte. Without --calibrate it holds no input_amax, the
largest input of a layer's experts: nothing needs it but 4-bit activations, load(activations="nvfp4") among them, which
then refuse. With it the model in BF16 is run over prompts to measure it."""
_EXAMPLES = """\
examples:
  python -m inkling_jax.convert path/to/Inkling-Small-NVFP4 path/to/converted --dry-run
  python -m inkling_jax.convert path/to/Inkling-Small-NVFP4 path/to/converted
  python -m inkling_jax.convert path/to/Inkling-Small-NVFP4 path/to/converted --verify
  python -m inkling_jax.generate --model path/to/converted --mesh tensor=4 --prompt Hello

  python -m inkling_jax.convert path/to/Inkling-Small path/to/quantised --quantize nvfp4
  python -m inkling_jax.convert path/to/Inkling-Small path/to/quantised --quantize nvfp4 --calibrate prompts.jsonl --mesh tensor=8

"""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code."""
    options = _parser().parse_args(arguments)

    def command() -> int:
        import jax

        from inkling_jax.sources import find_source

        if not options.calibrate:
            jax.config.update("jax_platforms", "cpu")  # nothing here needs an accelerator, whose memory others may want
        source = Path(find_source(options.source, "checkpoint"))
        destination = Path(os.path.expanduser(options.destination))
        return (_quantize if options.quantize else _convert)(options, source, destination)

    set_up_messages(options.verbose, options.quiet)
    signal.signal(signal.SIGTERM, _interrupt)
    return run(command)


def _convert(options: argparse.Namespace, source: Path, destination: Path) -> int:
    from inkling_jax.convert.conversion import Conversion
    from inkling_jax.convert.converted import RECORD
    from inkling_jax.convert.converter import convert
    from inkling_jax.convert.progress import size_text
    from inkling_jax.convert.verify import verify
    from inkling_jax.sharding.mesh import mesh_sizes

    if options.calibrate:
        raise InputError("--calibrate measures inputs for --quantize nvfp4, which is not asked for")
    conversion = Conversion.of(source, destination, mesh_sizes(options.mesh) if options.mesh else None)
    if options.dry_run:
        conversion.check_destination()
        print(*conversion.lines(), sep="\n")
        conversion.check_space()
        return OK
    if not (options.verify and (conversion.destination / RECORD).exists()):
        with _kept(conversion.place):
            convert(conversion, quiet=options.quiet)
    if options.verify:
        print(f"{conversion.destination}: {size_text(verify(conversion, quiet=options.quiet))} equal bit for bit")
    return OK


def _quantize(options: argparse.Namespace, source: Path, destination: Path) -> int:
    from inkling_jax.convert.quantization import Quantization, write_quantized

    if options.verify:
        raise InputError("--verify compares bits, which --quantize changes: it tells what is left of each stack instead")
    if options.mesh and not options.calibrate:
        raise InputError("--mesh with --quantize is where --calibrate runs the model, which is not asked for")
    quantization = Quantization.of(source, destination, calibrated=bool(options.calibrate))
    if options.dry_run:
        quantization.place.check()
        print(*quantization.lines(), sep="\n")
        quantization.place.check_space(quantization.nbytes())
        return OK
    calibrate = None
    if options.calibrate:
        from inkling_jax.calibration import Calibration

        prompts = Path(os.path.expanduser(options.calibrate))
        calibrate = Calibration.of(source, prompts, mesh=options.mesh, quiet=options.quiet).measure
    with _kept(quantization.place):
        write_quantized(quantization, calibrate, quiet=options.quiet)
    return OK


@contextmanager
def _kept(place: Destination) -> Iterator[None]:
    """Say what an interrupt leaves."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"\nkept in {place.partial}: the same command goes on with it", file=sys.stderr)
        raise


def _parser() -> Parser:
    parser = Parser(prog="python -m inkling_jax.convert", description=_DESCRIPTION, epilog=_EXAMPLES + EXIT_CODES)
    parser.add_argument("source", metavar="SRC", help="a checkpoint directory in the published layout, or a hub id")
    parser.add_argument("destination", metavar="DST", type=Path, help="a directory that is not there yet, or empty")
    parser.add_argument(
        "--mesh",
        metavar="AXIS=N,...",
        help="cut the files for the devices of this mesh; any other can load them too (default: for up to 16 devices an axis)",
    )
    parser.add_argument("--quantize", choices=("nvfp4",), help="write the published layout in this format instead")
    parser.add_argument(
        "--calibrate",
        metavar="FILE",
        help="with --quantize: requests, a JSON object a line with prompt or messages, to measure the experts' inputs on; "
        "the model in BF16 has to fit the devices here (--mesh)",
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be written, and whether it fits")
    parser.add_argument("--verify", action="store_true", help="compare DST with SRC bit for bit, once it is written")
    add_message_options(parser)
    return parser


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    raise SystemExit(main())
