"""The largest inputs of a model's experts, measured over prompts: what 4-bit activations are scaled by (spec 7.4)."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import numpy as np

from inkling_jax.batch.lines import numbered_lines
from inkling_jax.batch.request import Defaults, Job, Refused, read_line
from inkling_jax.engine.request import SamplingParams
from inkling_jax.errors import InklingError, InputError
from inkling_jax.llm import load

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The checkpoint in `source`, in BF16, and the requests that it is to read."""

    source: Path
    file: Path
    jobs: tuple[Job, ...]
    mesh: str | None
    quiet: bool

    @classmethod
    def of(cls, source: Path, file: Path, *, mesh: str | None = None, quiet: bool = False) -> Calibration:
        """Requests as a batch has them, a JSON object a line with prompt or messages. InputError for a line that is none."""
        jobs = []
        defaults = Defaults(SamplingParams(), None, 0)
        try:
            with open(file, "rb") as stream:
                for number, content in numbered_lines(stream):
                    job = read_line(number, content, defaults)
                    if isinstance(job, Refused):
                        raise InputError(f"{file}: line {number}: {job.message}")
                    jobs.append(job)
        except OSError as error:
            raise InputError(f"{file}: {error.strerror or error}") from None
        if not jobs:
            raise InputError(f"{file}: holds no request to calibrate with")
        return cls(source, file, tuple(jobs), mesh, quiet)

    def measure(self) -> dict[str, float]:
        """By the published name of each expert stack, the largest magnitude that went into it over all tokens of all requests.

        Raises InputError for a request that the model cannot read, and for a stack that saw nothing but zeros.
        """
        found: np.ndarray | None = None
        with load(self.source, activations="measured", mesh=self.mesh, slots=1, quiet=self.quiet) as llm:
            sparse = [i for i, dense in enumerate(llm.config.text.dense_layers) if not dense]
            for number, job in enumerate(self.jobs, start=1):
                try:
                    prompt = llm.chat_prompt(job.messages, tools=job.tools, effort=job.effort) if job.messages else job.prompt
                    assert prompt is not None
                    tape = llm.trace(prompt)
                except InklingError as error:
                    raise InputError(f"{self.file}: line {job.head.number}: {error}") from None
                largest = np.stack([tape[f"moe.{j}.amax"].max(axis=0) for j in range(len(sparse))])
                found = largest if found is None else np.maximum(found, largest)
                logger.info("calibration: %d of %d requests", number, len(self.jobs))
        assert found is not None
        names = [f"model.llm.layers.{i}.mlp.experts.{matrix}_weight" for i in sparse for matrix in ("w13", "w2")]
        amax = dict(zip(names, map(float, found.reshape(-1)), strict=True))
        for name, value in amax.items():
            if not 0 < value < np.inf:
                raise InputError(f"{self.file}: the largest input of {name} is {value}: expected a finite positive number")
        return amax
