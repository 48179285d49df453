"""Kill conversions at chosen moments and finish them: run as a program, so that a child can be forked with all imports done.

Arguments: the source, an empty directory, and what to do. "moments N" kills N conversions at random moments of their time,
"events N" one at each of the last N steps of finishing. Each is then run again until it is done; "whole" is one that nobody
disturbed. Prints one JSON object a conversion: its directory, whether it was killed, and looked done then, how many files its
journal called done, and whether those were left alone.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
from orbax.checkpoint import v1 as orbax

from inkling_jax.convert.conversion import Conversion
from inkling_jax.convert.converted import JOURNAL, RECORD
from inkling_jax.convert.converter import convert

assert orbax
jax.config.update("jax_platforms", "cpu")
warnings.filterwarnings("ignore", message=".*fork.*")


def start(source: Path, destination: Path, prepare: Callable[[], None] = lambda: None) -> int:
    """The process id of a child that converts."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            prepare()
            convert(Conversion.of(source, destination), quiet=True)
            code = 0
        finally:
            os._exit(code)
    return child


def end(child: int) -> int:
    """How the child ended: its exit code, or minus the signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_at_event(number: int, count_file: Path | None = None) -> Callable[[], None]:
    """Let the process be killed before its `number`-th flush, rename, removal or copy; or note how many there are."""

    def prepare() -> None:
        seen = 0

        def watched(call: Callable) -> Callable:
            def counted(*arguments: object, **options: object) -> object:
                nonlocal seen
                seen += 1
                if seen == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                if count_file is not None:
                    count_file.write_text(str(seen))
                return call(*arguments, **options)

            return counted

        for module, name in (
            (os, "fsync"),
            (os, "rename"),
            (os, "replace"),
            (os, "unlink"),
            (shutil, "copyfile"),
            (shutil, "rmtree"),
        ):
            setattr(module, name, watched(getattr(module, name)))

    return prepare


def noted(partial: Path) -> dict[str, list[int]]:
    """Time of change and number of every file of the parameters that the journal calls done."""
    found = {}
    for line in (partial / JOURNAL).read_bytes().splitlines() if (partial / JOURNAL).exists() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        for name in entry.get("files", ()):
            file = Path("weights/state") / entry["parameter"] / name
            status = (partial / file).stat()
            found[str(file)] = [status.st_mtime_ns, status.st_ino]
    return found


def interrupted(source: Path, destination: Path, stop: Callable[[], int]) -> dict[str, object]:
    """Interrupt one conversion, then finish it."""
    code = stop()
    partial = destination.with_name(destination.name + ".partial")
    looks_done, before = (destination / RECORD).exists(), noted(partial)
    codes = [] if looks_done else [end(start(source, destination))]
    after = {name: [(status := (destination / name).stat()).st_mtime_ns, status.st_ino] for name in before}
    return {
        "directory": str(destination),
        "killed": code == -signal.SIGKILL,
        "looked_done": looks_done,
        "done_before": len(before),
        "left_alone": after == before,
        "codes": codes,
    }


def at_moments(source: Path, place: Path, count: int) -> Iterator[dict[str, object]]:
    """Kill `count` at random moments of the time that a conversion takes."""
    begun = time.monotonic()
    assert end(start(source, place / "whole")) == 0
    lasts, moments, killed = time.monotonic() - begun, random.Random(0), 0
    for attempt in range(10 * count):
        destination = place / f"moment{attempt}"

        def stop(destination: Path = destination) -> int:
            child = start(source, destination)
            time.sleep(moments.uniform(0, lasts))
            os.kill(child, signal.SIGKILL)
            return end(child)

        found = interrupted(source, destination, stop)
        killed += bool(found["killed"])
        yield found
        if killed == count:
            return


def at_events(source: Path, place: Path, count: int) -> Iterator[dict[str, object]]:
    """Kill at each of the last `count` events."""
    counted = place / "count"
    assert end(start(source, place / "whole", kill_at_event(-1, counted))) == 0
    total = int(counted.read_text())
    for number in range(total - count + 1, total + 1):
        destination = place / f"event{number}"
        yield interrupted(source, destination, lambda d=destination, n=number: end(start(source, d, kill_at_event(n))))


if __name__ == "__main__":
    _, source, place, what, count = sys.argv
    runs = {"moments": at_moments, "events": at_events}[what](Path(source), Path(place), int(count))
    for found in runs:
        print(json.dumps(found), flush=True)
