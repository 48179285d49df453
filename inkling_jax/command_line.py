"""What the command lines share: errors on one line, exit codes, messages on standard error, the compilation cache.

Light to import: `--help` must not wait for jax.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TextIO

from inkling_jax.errors import InklingError, InputError

OK, FAILED, USAGE, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 130, 141  # exit codes; the last two as a shell reports those signals
EXIT_CODES = "exit codes: 0 done, 1 the model failed, 2 bad input or too little memory, 130 interrupted"

logger = logging.getLogger(__name__)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, without the usage, and whose options cannot be abbreviated."""

    def __init__(self, **options: Any):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with code 2."""
        if message.endswith("expected one argument"):
            message += " (one that begins with '-' is written --option=VALUE)"
        print_error(f"{message}; --help lists the options")
        raise SystemExit(USAGE)


def add_kernels_option(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add --kernels, which `load` takes."""
    parser.add_argument(
        "--kernels",
        choices=("auto", "reference", "sm90"),
        default="auto",
        help="reference: plain JAX; sm90: Hopper's; auto: sm90 where it can run (default auto)",
    )


def add_kv_dtype_option(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add --kv-dtype, which `load` takes."""
    parser.add_argument(
        "--kv-dtype", choices=("fp8",), help="fp8: keys and values as e4m3, with a scale a token and head (default: as computed)"
    )


def add_message_options(parser: argparse.ArgumentParser) -> None:
    """Add -v and --quiet, which `set_up_messages` takes."""
    group = parser.add_argument_group("messages, all on standard error")
    chosen = group.add_mutually_exclusive_group()
    chosen.add_argument("-v", "--verbose", action="store_true", help="say more, for example where compiled programs are kept")
    chosen.add_argument("--quiet", action="store_true", help="say nothing but warnings and errors")


def set_up_messages(verbose: bool, quiet: bool) -> None:
    """Send the package's log to standard error, and let no character that a stream cannot carry end the program."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine())
    package = logging.getLogger("inkling_jax")
    package.handlers[:] = [handler]
    package.setLevel(logging.DEBUG if verbose else logging.WARNING if quiet else logging.INFO)
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace"), (sys.stderr, "replace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def cache_directory() -> Path:
    """Where what can be made again is kept, in the user's cache directory (it may not exist yet)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "inkling_jax"


def start_jax() -> str:
    """Set the compilation cache up and find the devices; the platform's name. Raises InputError where there is no device."""
    import jax

    _use_compilation_cache()
    try:
        return jax.default_backend()
    except (AssertionError, RuntimeError) as error:
        reason = next(iter(str(error).splitlines()), "no plugin for it is installed")
        raise InputError(f"jax finds no device on the platform {jax.config.jax_platforms!r}: {reason}") from None


def _use_compilation_cache() -> None:
    """Keep compiled programs between runs: below the user's cache directory, unless jax was told of another place."""
    import jax

    place = jax.config.jax_compilation_cache_dir or str(cache_directory() / "xla")
    try:
        Path(place).mkdir(mode=0o700, parents=True, exist_ok=True)  # it holds code that is run: the user's alone
    except OSError as error:
        logger.warning("compiled programs are not kept: %s", error)
        return
    jax.config.update("jax_compilation_cache_dir", place)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    logger.debug("compiled programs are kept in %s", place)


def run(command: Callable[[], int]) -> int:
    """The exit code of `command()`; what the user can mend ends it with one line on standard error and no stack trace."""
    try:
        code = command()
        print(end="", flush=True)  # what cannot be written must fail here; also right where standard output is closed
        return code
    except BrokenPipeError:
        # The reader has gone: the interpreter's own flush at exit must not find that out again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except (InklingError, OSError) as error:
        print_error(str(error))
        return USAGE
    except Exception as error:
        if not _is_out_of_memory(error):
            raise
        print_error(f"out of memory ({next(iter(str(error).splitlines()), '')}): give the cache less, or use more devices")
        return USAGE


def print_error(message: str) -> None:
    """Print an error on one line of standard error."""
    print("error:", " ".join(message.split()), file=sys.stderr)


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person sees what the stream carries; a closed standard stream is None."""
    return stream is not None and stream.isatty()


def _is_out_of_memory(error: Exception) -> bool:
    """Whether the host or a device had none left; jax's error is told by its name, so that nothing here imports jax."""
    return isinstance(error, MemoryError) or (type(error).__name__ == "JaxRuntimeError" and "RESOURCE_EXHAUSTED" in str(error))


class _OneLine(logging.Formatter):
    """Messages as they are, those that are more than information with their level before them."""

    def format(self, record: logging.LogRecord) -> str:
        text = " ".join(record.getMessage().split())
        return text if record.levelno < logging.WARNING else f"{record.levelname.lower()}: {text}"
