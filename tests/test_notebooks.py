"""The notebooks run from top to bottom, what they show is right, and they are committed without results."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import pytest
from checkpoint_files import load as read_tensors

from inkling_jax.sources import NANO

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
NAMES = ("chat", "inside", "multimodal")
LOCAL_PATH = re.compile(r"""(?:^|[\s"'`(=])(?:/[\w.-]+|~/|[A-Z]:\\)(?:[/\\][\w.-]+)*""", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Ran:
    """What a notebook left: its variables, what it printed, its figures."""

    values: dict[str, Any]
    printed: str
    figures: list[Figure]


@pytest.fixture(scope="module")
def shared_programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Programs are compiled in a hurry, as they run but a few times, and what one notebook has compiled the next one finds."""
    from jax.experimental.compilation_cache import compilation_cache

    wanted = {
        "jax_disable_most_optimizations": True,
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("programs")),
        "jax_persistent_cache_min_compile_time_secs": 0.2,
    }
    before = {name: jax.config.values[name] for name in wanted}
    for values in (wanted, before):
        for name, value in values.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()  # it remembers where it was
        if values is wanted:
            yield


@pytest.fixture(scope="module")
def run(shared_programs: None) -> Callable[[str], Ran]:
    """`run(name)`: the code cells of a notebook in order, in this process, so that warnings are errors in them too."""
    import matplotlib
    import matplotlib.pyplot as plt

    matplotlib.use("Agg")

    def run(name: str) -> Ran:
        plt.close("all")
        values: dict[str, Any] = {"__name__": "__main__"}
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            for cell in json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())["cells"]:
                if cell["cell_type"] == "code":
                    exec(compile("".join(cell["source"]), f"{name}.ipynb, {cell['id']}", "exec"), values)
        figures = [plt.figure(number) for number in plt.get_fignums()]
        for figure in figures:
            figure.canvas.draw()  # as a page would: labels that no font can show and the like are found here
            assert figure.axes and all(axes.has_data() for axes in figure.axes if axes.get_visible()), figure
        plt.close("all")
        return Ran(values, printed.getvalue(), figures)

    return run


def test_all_are_here() -> None:
    """No notebook goes untested."""
    assert sorted(path.stem for path in NOTEBOOKS.iterdir() if path.suffix == ".ipynb") == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_committed_without_results(name: str) -> None:
    """No outputs, counts or paths of the machine that wrote it, and written as Jupyter does: a change of one cell is one."""
    text = (NOTEBOOKS / f"{name}.ipynb").read_text()
    notebook = json.loads(text)
    assert text == json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    assert notebook["metadata"] == {"kernelspec": kernel, "language_info": {"name": "python"}}
    cells = notebook["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells) and all(cell["metadata"] == {} for cell in cells)
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
        assert not LOCAL_PATH.search("".join(cell["source"])), LOCAL_PATH.search("".join(cell["source"]))


def test_paths_are_found() -> None:
    """The search above sees what it is to find, and no more."""
    assert all(map(LOCAL_PATH.search, ('"/' + 'home/a/b"', "open(/" + "tmp)", "~/models", r"r'C:\data'")))
    assert not any(map(LOCAL_PATH.search, ("a / b", "edge // 2", "path/to/x", "(-1/255)", "and/or", "x = a/b")))


def test_chat(run: Callable[[str], Ran]) -> None:
    """Streamed as whole, seeds, stop strings, history, effort, and a call that is read, made and answered."""
    ran = run("chat")
    v = ran.values
    answer, streamed, by_seed, stopped = v["answer"], v["streamed"], v["by_seed"], v["stopped"]
    assert answer.token_ids and (streamed.token_ids, streamed.message) == (answer.token_ids, answer.message)
    assert answer.content == "12 + 7 = 19" and answer.reasoning and len({drawn.token_ids for drawn in by_seed.values()}) == 3
    assert (stopped.finish_reason, stopped.content) == ("stop", "12 + 7")
    assert answer.content.startswith(stopped.content) and len(stopped.content) < len(answer.content)

    for effort, line in (("none", "0"), ("medium", "0.7"), (0.35, "0.35")):
        assert f"<|content_text|>Thinking effort level: {line}<|end_message|>" in v["shown"][effort]
    said = ["What is 12 + 7?", "12 + 7 = 19", "Where does Mira live?"]
    places = [v["shown"][0.35].find(text) for text in said]
    assert (
        -1 not in places
        and places == sorted(places)
        and v["shown"][0.35] == v["llm"].tokenizer.decode(v["prompts"][0.35].token_ids, skip_special=False)
    )
    assert v["later"].prompt_tokens == len(v["prompts"][0.35].token_ids)

    parsed = v["parser"].parsed
    assert (parsed.reasoning, parsed.content) == ("There is a tool for this.", "Let me look.")
    assert [(call.id, call.name, call.arguments) for call in parsed.tool_calls] == [("call_0", "temperature", {"city": "Zürich"})]
    pieces = ran.printed.partition("call: ")[2].partition("{'role'")[0].split("|")
    assert "".join(pieces) == '{"city":"Zürich"}' and len(pieces) > 3  # as it came
    told = {"role": "tool", "tool_call_id": "call_0", "content": '{"city": "Zürich", "celsius": 21}'}
    assert v["conversation"][-1] == told and v["last"].prompt_tokens > len(v["through"])
    assert v["cut"].parsed.tool_calls == () and v["cut"].parsed.malformed_calls[0].error == "the answer ends before the call does"
    assert v["llm"].engine.closed and ran.figures == []


def test_multimodal(run: Callable[[str], Ran]) -> None:
    """Tiles, padding, mel and levels are what the picture and the tone make by hand; every row has its placeholder."""
    ran = run("multimodal")
    v = ran.values
    assert len(ran.figures) == 4
    # 160 x 110 pixels: 3 rows of tiles, 4 full columns and one more
    assert (v["rows"], v["columns"], v["patches"].shape) == (3, 5, (15, 2, 40, 40, 3))
    large = np.full((120, 200, 3), (214, 120, 200), np.uint8)
    large[:110, :160] = np.asarray(v["picture"])
    np.testing.assert_array_equal(v["tiles"].reshape(3, 5, 40, 40, 3).swapaxes(1, 2).reshape(120, 200, 3), large)
    assert f"{1 - 110 * 160 / (120 * 200):.0%} of the tiles' pixels are padding" in ran.printed
    np.testing.assert_array_equal(v["mosaic"][3:43, 46 + 3 : 46 + 43], large[:40, 40:80])

    mel, levels = v["mel"], v["levels"]
    assert mel.shape == levels.shape == (40, 80) and (levels.min() >= 0) and (levels.max() <= 15)
    assert abs(-7 + 0.6 * levels - mel).max() <= 0.3 + 1e-5
    centres = v["mel_filters"]().argmax(axis=0) * 10  # Hz
    for frame in range(12, 40):  # the tone is 200 + 1900 t Hz, and a frame is about the time 0.05 i
        assert abs(centres[mel[frame].argmax()] - (200 + 1900 * 0.05 * frame)) < 0.06 * centres[mel[frame].argmax()]
    for axes, shown in zip(ran.figures[1].axes[1:3], (mel, levels), strict=True):
        np.testing.assert_array_equal(np.asarray(axes.images[0].get_array()), shown.T)

    ids, slots = v["ids"].tolist(), v["slots"]
    assert v["counts"] == {"text": len(ids) - 58, "control": 3, "image row": 15, "audio row": 40}
    assert (ids.count(slots["image"]), ids.count(slots["audio"])) == (15, 40)
    assert all(colour in answer.content for colour, answer in v["answers"].items())
    assert v["answer"].prompt_tokens > 15 + 10
    blocks = [(np.asarray(moment.image, int)[30, :, 2] < 150).nonzero()[0].mean() for moment in v["moments"]]
    assert len(blocks) == 8 and min(np.diff(blocks)) > 5  # it moves to the right
    assert [len(frame) for frame in v["watched"].images] == [math.ceil(60 / 40) * (100 // 40 + 1)] * 8
    assert v["watched"].token_ids.count(slots["image"]) == 8 * 6


def test_inside(run: Callable[[str], Ran]) -> None:
    """Routing, biases and perplexity are those of the checkpoint's own tensors by the formulas of spec 2, in float64."""
    ran = run("inside")
    v = ran.values
    trace, text, tokens = v["trace"], v["text"], len(v["ids"])
    assert len(ran.figures) == 5 and len(ran.figures[0].axes) == 2 * 4 + 1 and len(ran.figures[2].axes) == 7 + 1
    tensors = {name.removeprefix("model.llm."): value for name, value in read_tensors(NANO).items()}

    def tensor(name: str) -> np.ndarray:
        return tensors[name].astype(np.float64)

    routed, shared = v["routed"], v["shared"]
    assert routed.shape == (4, 8, tokens) and shared.shape == (4, 1, tokens) and ((routed > 0).sum(axis=1) == 2).all()
    for j, layer in enumerate(range(3, 7)):
        total = 8 * tensor(f"layers.{layer}.mlp.gate.global_scale")
        np.testing.assert_allclose(routed[j].sum(axis=0) + shared[j].sum(axis=0), np.full(tokens, total), rtol=1e-5)

    for layer in range(text.num_layers):
        x = trace[f"hidden.{layer}"].astype(np.float64)
        normed = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * tensor(f"layers.{layer}.attn_norm.weight")
        r = (normed @ tensor(f"layers.{layer}.attn.wr_du.weight").T).reshape(tokens, 2, 16)
        wanted = np.einsum("thc,ce->the", r, tensor(f"layers.{layer}.attn.rel_logits_proj.proj"))
        assert wanted.shape[2] == (256 if layer in (2, 5) else 128)
        np.testing.assert_allclose(v["biases"][layer], wanted, rtol=1e-4, atol=1e-4)
    for axes, layer in zip(ran.figures[1].axes, (6, 5), strict=True):
        profile = v["biases"][layer].mean(axis=0)
        np.testing.assert_array_equal([line.get_ydata() for line in axes.lines[:2]], profile)

    assert v["rms"].shape == (8, tokens)
    np.testing.assert_allclose(v["rms"][3], np.linalg.norm(trace["hidden.3"], axis=-1) / math.sqrt(128), rtol=1e-5)
    logits = trace["hidden.7"].astype(np.float64) @ tensor("unembed.weight")[: text.usable_vocab_size].T / 0.5
    chosen = logits[range(tokens - 1), v["ids"][1:]]
    wanted = np.exp(np.mean(np.log(np.exp(logits[:-1]).sum(axis=-1)) - chosen))
    assert v["perplexity"] == pytest.approx(wanted, rel=1e-4)
    assert f"perplexity {wanted:,.0f}" == ran.figures[4].axes[0].get_title()
