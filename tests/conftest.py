"""Where tests run (CPU unless --gpu) and the reference checkpoints and answers they share."""

from __future__ import annotations

import fcntl
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

DATA = Path(__file__).resolve().parent / "data"
# Sets too large for the repository are used where they lie beside it.
BESIDE = Path(__file__).resolve().parents[2] / "shared" / "oracle"
HOST_DEVICES = "--xla_force_host_platform_device_count=8"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --gpu."""
    parser.addoption("--gpu", action="store_true", help="run on the GPU and let tests marked gpu run; a run without any fails")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the platform before any test module imports jax: the CPU as eight devices, so that meshes can be tested."""
    if config.getoption("--gpu"):
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {HOST_DEVICES}".strip()


def missing_gpu(devices: int, size: int, found: list[tuple[str, int]]) -> str | None:
    """What a test that wants `devices` GPUs of `size` bytes each lacks among `found` (kind, usable bytes); None: nothing."""
    fitting = [kind for kind, usable in found if usable >= size]
    if len(fitting) >= devices:
        return None
    had = ", ".join(f"{kind} with {usable} bytes" for kind, usable in found) or "none"
    return f"needs {devices} GPU(s) with {size} bytes each, found {had}"


def usable_gpus() -> list[tuple[str, int]]:
    """Kind and usable bytes of each GPU that jax sees."""
    import jax

    found = [device for device in jax.devices() if device.platform == "gpu"]
    return [(device.device_kind, int((device.memory_stats() or {}).get("bytes_limit", 0))) for device in found]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked `gpu(devices=1, bytes=0)` where they are not there, naming what was lacking."""
    mark = item.get_closest_marker("gpu")
    if mark is None:
        return
    if not item.config.getoption("--gpu"):
        pytest.skip("needs a GPU and the option --gpu")
    lacking = missing_gpu(mark.kwargs.get("devices", 1), mark.kwargs.get("bytes", 0), usable_gpus())
    if lacking:
        pytest.skip(lacking)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail a --gpu run in which no test ran: all skipped is not success."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not session.config.getoption("--gpu") or reporter is None or hasattr(session.config, "workerinput"):
        return
    ran = sum(len(reporter.stats.get(outcome, ())) for outcome in ("passed", "failed", "error", "xfailed", "xpassed"))
    if not ran and exitstatus == pytest.ExitCode.OK:
        reporter.ensure_newline()
        reporter.write_line("--gpu: no test ran, so nothing is shown to work on a GPU", red=True)
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


def unpack(archive: Path, target: Path) -> Path:
    """Unpack `archive` into the new directory `target` once, whichever process comes first; return `target`."""
    with open(target.with_name(target.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            partial = target.with_name(target.name + ".partial")
            with tarfile.open(archive) as tar:
                tar.extractall(partial, filter="data")
            partial.rename(target)
    return target


@pytest.fixture(scope="session")
def oracle_set(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """`oracle_set(preset, fmt)`: directory that holds the checkpoint FMT/ and its expected-FMT.safetensors."""
    base = tmp_path_factory.getbasetemp()
    # xdist gives each worker its own directory below one that they share.
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def find(preset: str, fmt: str) -> Path:
        archive = DATA / f"{preset}-{fmt}.tar.xz"
        if archive.is_file():
            return unpack(archive, shared / f"oracle-{preset}-{fmt}")
        if (BESIDE / preset / fmt).is_dir():
            return BESIDE / preset
        missing = f"the {fmt} set of {preset!r} is neither tests/data/{archive.name} nor ../shared/oracle/{preset}/{fmt}"
        if fmt == "nvfp4":
            pytest.fail(missing)  # these belong to the repository: without them most tests would be skipped unnoticed
        pytest.skip(missing)

    return find


@pytest.fixture(scope="session")
def oracle_dir(oracle_set: Callable[[str, str], Path]) -> Callable[..., Path]:
    """`oracle_dir(preset, fmt="nvfp4")`: a read-only checkpoint directory in the published layout."""

    def find(preset: str, fmt: str = "nvfp4") -> Path:
        return oracle_set(preset, fmt) / fmt

    return find


@pytest.fixture(scope="session")
def expected(oracle_set: Callable[[str, str], Path]) -> Callable[..., dict[str, np.ndarray]]:
    """`expected(preset, fmt="nvfp4")`: the reference answers by name (tests/data/README.md); arrays are read-only."""
    from safetensors.numpy import load_file

    cache: dict[tuple[str, str], dict[str, np.ndarray]] = {}

    def find(preset: str, fmt: str = "nvfp4") -> dict[str, np.ndarray]:
        key = (preset, fmt)
        if key not in cache:
            cache[key] = load_file(oracle_set(preset, fmt) / f"expected-{fmt}.safetensors")
            for array in cache[key].values():
                array.flags.writeable = False
        return dict(cache[key])

    return find
