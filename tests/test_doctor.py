"""The report on a machine: what is there, which kernels were tried, and that a wrong, crashing or hanging one is told."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import pytest

from inkling_jax import doctor, self_check
from inkling_jax.doctor import run_checks
from inkling_jax.expert_storage import HOPPER
from inkling_jax.self_check import SUBJECTS, check

KERNELS = Path(self_check.__file__).parent / "kernels"


def test_a_healthy_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """All of the report, as another program reads it: each reference agrees with its definition, those for Hopper do not run."""
    assert doctor.main(["--json", "--quiet"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["healthy"] and found["platform"] == "cpu" and found["links"] == []
    assert found["versions"]["jax"] == jax.__version__ and found["versions"]["python"].startswith("3.")
    assert len(found["devices"]) == len(jax.devices()) and all(device["memory"] > 0 for device in found["devices"])
    assert found["kernels"] == {"sm90_refused": "cpu is not a Hopper GPU"}
    assert found["compilation_cache"]["place"] == jax.config.jax_compilation_cache_dir
    assert [(c["kernel"], c["implementation"]) for c in found["checks"]] == [(kernel, "reference") for kernel in SUBJECTS]
    assert all(c["ok"] and c["error"] < 1e-5 for c in found["checks"])


def test_every_kernel_has_a_check() -> None:
    assert {path.parent.name for path in KERNELS.glob("*/cases.py")} == set(SUBJECTS)


@pytest.mark.gpu(bytes=10**9)
@pytest.mark.parametrize("kernel", SUBJECTS)
def test_kernels_for_hopper(kernel: str) -> None:
    kind = jax.devices()[0].device_kind
    if not any(hopper in kind for hopper in HOPPER):
        pytest.skip(f"{kind} is not a Hopper GPU")
    assert self_check.refused() is None
    found = check(kernel, "sm90")
    assert found.ok, found


def test_a_wrong_kernel_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is off by a thousandth, and one that raises."""
    subject = SUBJECTS["paged_attention"]()
    off = dataclasses.replace(subject, reference=lambda given: 1.001 * subject.reference(given))
    monkeypatch.setitem(SUBJECTS, "paged_attention", lambda: off)
    found = check("paged_attention", "reference")
    assert not found.ok and found.failure is None and found.error == pytest.approx(1e-3, rel=0.01)

    def raises(given: Any) -> None:
        raise ValueError("no such layout\nand more")

    monkeypatch.setitem(SUBJECTS, "paged_attention", lambda: dataclasses.replace(subject, reference=raises))
    found = check("paged_attention", "reference")
    assert not found.ok and found.failure == "ValueError: no such layout"


BEGUN = """print('{"begins": ["router", "sm90"]}', flush=True); """


@pytest.mark.parametrize(
    ("code", "kernel", "told"),
    [
        (BEGUN + "import os; os.abort()", "router", "the process ended with exit code -6"),
        (BEGUN + "raise SystemExit('the device is gone')", "router", "ended with exit code 1: the device is gone"),
        (BEGUN + "import time; time.sleep(60)", "router", "not done after 2 s"),
        ("import nonesuch", "start", "ModuleNotFoundError: No module named 'nonesuch'"),
    ],
)
def test_a_process_that_ends_names_the_check_it_was_in(code: str, kernel: str, told: str) -> None:
    (found,) = run_checks(("-c", code), limit_s=2)
    assert found["kernel"] == kernel and not found["ok"] and told in found["failure"]


def test_an_unhealthy_machine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1, the line marked, and what cannot be found out does not end the report."""
    wrong = {"kernel": "router", "implementation": "sm90", "case": "", "failure": "not done after 300 s", "ok": False}
    monkeypatch.setattr(doctor, "run_checks", lambda: [wrong])

    def broken() -> None:
        raise RuntimeError("no peer access")

    monkeypatch.setattr(doctor, "links", broken)
    assert doctor.main([]) == 1
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "router, sm90 WRONG not done after 300 s" in lines and "links unknown RuntimeError: no peer access" in lines
    assert lines[-1].startswith("not healthy")
