"""Converting from a terminal: what it says, its exit codes, signals; and the memory that it and loading take."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from text_checkpoint import write_text_checkpoint

from inkling_jax.convert.__main__ import main
from inkling_jax.convert.converted import JOURNAL, RECORD

HERE = Path(__file__).resolve()
ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE.parents[1]}"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint of text."""
    return write_text_checkpoint(tmp_path_factory.mktemp("source") / "published")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """Signals and log handlers as they were."""
    package = logging.getLogger("inkling_jax")
    before, handlers, level = signal.getsignal(signal.SIGTERM), package.handlers[:], package.level
    yield
    signal.signal(signal.SIGTERM, before)
    package.handlers[:] = handlers
    package.setLevel(level)


def test_it_is_tried_done_and_compared(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A dry run writes nothing and says what would be; then it is written, once, and compared, as often as asked."""
    destination = tmp_path / "model"
    assert main([str(source), str(destination), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert (
        "layers.*.attn.o_proj: 2 of 48 x 24, bfloat16" in said
        and "layers.*.mlp.experts.w2.scale: 3 x 48 x 1, float8_e4m3fn" in said
    )
    assert "copied: config.json, hf_quant_config.json, tokenizer.json, tokenizer_config.json" in said
    assert not any(tmp_path.iterdir())
    assert main([str(source), str(destination)]) == 0
    told = capsys.readouterr()
    assert told.out == "" and f"converting to {destination}: " in told.err and " GB/s" in told.err
    assert main([str(source), str(destination), "--quiet"]) == 2
    assert capsys.readouterr().err == (
        f"error: {destination}: holds a finished conversion; --verify compares it with the source\n"
    )
    before = (destination / RECORD).stat().st_mtime_ns
    assert main([str(source), str(destination), "--verify", "--quiet"]) == 0
    assert capsys.readouterr().out.startswith(f"{destination}: 1.") and (destination / RECORD).stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["{source}", "{source}"], "published: is not empty; give a new directory, or an empty one"),
        (["{source}", "{source}/config.json"], "config.json: exists and is not a directory"),
        (["{source}/none", "{tmp}/x"], "none: no such directory"),
        (["inkling", "{tmp}/x"], "'inkling' is a preset, which is a shape without weights"),
        (["{source}", "{tmp}/x", "--mesh", "tensor"], "mesh 'tensor': 'tensor' is not AXIS=SIZE"),
        (["{source}", "{tmp}/x", "--mesh", "tensor=3"], "4 query heads on 1 key heads do not divide over 3 devices"),
        (["~nobody here/model", "{tmp}/x"], "~nobody here/model: no such directory"),
        (["{source}", "~nobody here/x", "--mesh", "tensor=3"], "4 query heads on 1 key heads do not divide over 3 devices"),
    ],
)
def test_mistakes_are_one_line(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    assert main([part.format(source=source, tmp=tmp_path) for part in arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and told in said and said.count("\n") == 1
    assert not any(tmp_path.iterdir())


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    said = capsys.readouterr().out
    assert (
        ended.value.code == 0 and "python -m inkling_jax.convert path/to/Inkling-Small-NVFP4 path/to/converted --dry-run" in said
    )
    with pytest.raises(SystemExit) as ended:
        main(["only-one"])
    assert ended.value.code == 2 and capsys.readouterr().err.startswith("error: the following arguments are required: DST")


SLOWLY = """
import time
from inkling_jax.convert import orbax_store
write = orbax_store.ArrayWriter.write
def slowly(self, box, values):
    time.sleep(0.2)
    write(self, box, values)
orbax_store.ArrayWriter.write = slowly
from inkling_jax.convert.__main__ import main
raise SystemExit(main())
"""


def test_a_signal_leaves_what_can_be_gone_on_with(source: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SLOWLY, str(source), str(tmp_path / "model"), "--quiet"]
    process = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    journal = tmp_path / "model.partial" / JOURNAL
    limit = time.monotonic() + 60
    while not (journal.exists() and journal.read_bytes().count(b"\n") > 3) and time.monotonic() < limit:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.split() == f"kept in {tmp_path / 'model.partial'}: the same command goes on with it interrupted".split()
    done = journal.read_bytes().count(b"\n")
    assert done > 3 and main([str(source), str(tmp_path / "model"), "--quiet"]) == 0


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="no limits of file sizes here")
def test_a_full_disk_is_one_line(source: Path, tmp_path: Path) -> None:
    """As far as a limit of file sizes can stand for one: no file longer than 2,000 bytes can be written."""
    code = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        "from inkling_jax.convert.__main__ import main\nraise SystemExit(main())"
    )
    command = [sys.executable, "-c", code, str(source), str(tmp_path / "model"), "--quiet"]
    run = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 2 and run.stderr.count("\n") == 1, run.stderr
    assert "cannot be written: " in run.stderr and "File too large" in run.stderr
    assert not (tmp_path / "model").exists()


MEMORY = """
import dataclasses, json, pathlib, sys
import jax
from orbax.checkpoint import v1
from checkpoint_files import micro_config
from inkling_jax.config import ModelConfig
from inkling_jax.convert import load, orbax_store, view
from inkling_jax.convert.conversion import Conversion
from inkling_jax.convert.converted import open_weights
from inkling_jax.convert.converter import convert
from inkling_jax.convert.load import load_parameters
from inkling_jax.convert.verify import verify
from inkling_jax.convert.write import write_checkpoint

def status(field):
    return int(pathlib.Path("/proc/self/status").read_text().split(field + ":")[1].split()[0]) * 1024

def peak(work):
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    before = status("VmRSS")
    return work(), status("VmHWM") - before

place = pathlib.Path(sys.argv[1])
size = {"hidden_size": 1024, "intermediate_size": 1024, "dense_intermediate_size": 2048, "vocab_size": 8192}
config = micro_config(**size, unpadded_vocab_size=8192, n_routed_experts=24)
config = dataclasses.replace(config, mtp=None, audio=None, vision=None)
write_checkpoint(place / "source", config, nvfp4=True)
view.STAGE_BYTES = load.BLOCK_BYTES = orbax_store.FILE_BYTES = 1 << 21
conversion = Conversion.of(place / "source", place / "model")
found = {"converting": peak(lambda: convert(conversion, quiet=True))[1]}
found["verifying"] = peak(lambda: verify(conversion, quiet=True))[1]
mesh, kept = jax.sharding.Mesh(jax.devices(), "expert"), []
for name in ("model", "source"):
    plan = open_weights(ModelConfig.from_directory(place / name), place / name)
    spread = {path: jax.P("expert" if made.shape[:1] == (24,) else None) for path, made in plan.parameters.items()}
    shardings = {path: jax.NamedSharding(mesh, spec) for path, spec in spread.items()}
    parameters, taken = peak(lambda: load_parameters(plan, dtype="bfloat16", device=shardings))
    found["held"] = sum(array.nbytes for array in parameters.values())
    found["loading " + name] = taken - found["held"]
    kept.append(parameters)  # so that what they lie in is not taken again
print(json.dumps(found))
"""


def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    """Blocks of 2 MB: converting, comparing and loading 334 MB onto eight devices take less than a quarter of it beside."""
    environment = {**ENVIRONMENT, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    command = [sys.executable, "-c", MEMORY, str(tmp_path)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found.pop("held") > 330e6
    assert max(found.values()) < 80e6, found
