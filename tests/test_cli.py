"""The command line as a user meets it: what goes where, how it ends, and what an error says."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import select
import signal
import subprocess
import sys
import time
import wave
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PIL import Image
from text_checkpoint import write_text_checkpoint

from inkling_jax.config import ModelConfig
from inkling_jax.generate import main
from inkling_jax.inputs.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
GREEDY = ("--temperature", "0", "--ignore-eos", "--max-context", "128", "--dtype", "float32")
PROMPT = "Hello"
# As `python -m`, in a process that heeds Ctrl-C even where its parent was started to ignore it.
HEED = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
RUN = HEED + "runpy.run_module('inkling_jax.generate', run_name='__main__')"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_checkpoint(tmp_path_factory.mktemp("cli") / "model")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One device, and a compilation cache that all runs of this file share."""
    cache = str(tmp_path_factory.mktemp("cache"))
    return {**os.environ, "XLA_FLAGS": "", "XDG_CACHE_HOME": cache, "PYTHONPATH": str(ROOT), "TERM": "xterm"}


Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def cli(directory: Path, environment: dict[str, str]) -> Cli:
    """`cli(*options, stdin="", model=...)`: a finished run; none may show a stack trace."""

    def call(*options: str, stdin: str = "", model: Path = directory) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "inkling_jax.generate", "--model", str(model), *options]
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=300, env=environment, cwd=ROOT, check=False
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done

    return call


@pytest.fixture(scope="module")
def answer(cli: Cli) -> dict:
    """What --json says of the greedy continuation of the raw prompt."""
    done = cli("--raw", "--prompt", PROMPT, "--json", "--quiet", "--max-tokens", "20", *GREEDY)
    assert done.returncode == 0 and done.stderr == ""
    return json.loads(done.stdout)


def test_json_is_one_object_and_says_all(answer: dict, directory: Path) -> None:
    """Text, tokens, reason, counts and times, which fit one another."""
    tokenizer = Tokenizer.from_directory(directory, ModelConfig.from_directory(directory))
    assert set(answer) == {"text", "token_ids", "finish_reason", "usage", "timings"}
    assert answer["usage"] == {"prompt_tokens": len(tokenizer.encode(PROMPT)), "completion_tokens": 20}
    assert answer["text"] == tokenizer.decode(answer["token_ids"]) and answer["finish_reason"] == "length"
    times = answer["timings"]
    assert 0 < times["compile_s"] < times["first_token_s"] and 0 < times["load_s"] and 0 < times["decode_tokens_per_s"]


def test_text_goes_to_stdout_and_all_else_to_stderr(cli: Cli, answer: dict) -> None:
    """The prompt from a pipe, less its line end; the same text, a line end after it; the summary and statistics beside it."""
    done = cli("--raw", "--max-tokens", "20", "-v", *GREEDY, stdin=PROMPT + "\n")
    assert done.returncode == 0
    assert done.stdout == answer["text"] + "\n"
    assert "compiled programs are kept in" in done.stderr and "inkling_jax/xla" in done.stderr
    assert "3 layers, float32, 1 x cpu; a device holds weights of" in done.stderr and "at most 128 a sequence" in done.stderr
    assert "the reference path" in done.stderr
    assert "20 tokens made, the first after" in done.stderr and "finished: length; loaded in" in done.stderr


def test_ids_without_a_tokenizer(cli: Cli, answer: dict, directory: Path, tmp_path: Path) -> None:
    """The ids of the same prompt lead to the ids of the same answer, printed as --ids takes them."""
    tokenizer = Tokenizer.from_directory(directory, ModelConfig.from_directory(directory))
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in directory.iterdir():
        if not file.name.startswith("tokenizer"):
            (bare / file.name).symlink_to(file)
    ids = ", ".join(map(str, tokenizer.encode(PROMPT)))
    done = cli("--ids", ids, "--max-tokens", "20", "--quiet", *GREEDY, model=bare)
    assert done.returncode == 0 and done.stdout == ",".join(map(str, answer["token_ids"])) + "\n"
    for options, needs in ((("--prompt", "x"), "text"), (("--chat",), "text"), (("--ids", "1", "--stop", "x"), "--stop")):
        done = cli(*options, model=bare)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"error: {needs} needs a tokenizer, and {bare} has no tokenizer.json: give token ids")


def test_a_conversation_from_a_pipe(cli: Cli) -> None:
    """A turn a line, blank ones left out; the second prompt holds the first turn and its answer."""
    done = cli("--chat", "--effort", "none", "--max-tokens", "4", *GREEDY, stdin="one\n\ntwo\n")
    assert done.returncode == 0
    lengths = [int(line.split()[0][1:]) for line in done.stderr.splitlines() if "tokens of prompt" in line]
    assert len(lengths) == 2 and lengths[1] > lengths[0] + len("two")
    assert "> " not in done.stderr
    long = cli("--chat", *GREEDY, "--quiet", stdin="x" * 200 + "\n")
    assert long.returncode == 2 and long.stderr.endswith("tokens, the context holds 128\n") and long.stderr.count("\n") == 1


def start(environment: dict[str, str], *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", RUN, *options]
    return subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


LONG = ("--temperature", "0", "--ignore-eos", "--max-context", "512", "--dtype", "float32", "--max-tokens", "400")


def test_interrupt_ends_with_what_was_said(directory: Path, environment: dict[str, str]) -> None:
    """Ctrl-C while the text streams: exit code 130, the line is ended, the statistics say so, no stack trace."""
    options = ("--model", str(directory), "--raw", "--prompt", PROMPT, *LONG)
    with start(environment, *options) as process:
        assert process.stdout is not None and process.stderr is not None
        first = os.read(process.stdout.fileno(), 1)
        process.send_signal(signal.SIGINT)
        rest, messages = process.communicate(timeout=120)
    assert process.returncode == 130, messages
    assert first and rest.endswith(b"\n") and b"Traceback" not in messages
    assert b"finished: cancelled" in messages


def test_interrupt_before_there_is_text(directory: Path, environment: dict[str, str]) -> None:
    """While the model loads."""
    options = ("--model", str(directory), "--raw", "--prompt", PROMPT, *LONG)
    with start(environment, *options) as process:
        assert process.stderr is not None
        said = b""
        while b"loading weights" not in said:
            piece = os.read(process.stderr.fileno(), 4096)
            assert piece, said
            said += piece
        process.send_signal(signal.SIGINT)
        text, messages = process.communicate(timeout=120)
    assert process.returncode == 130 and b"Traceback" not in messages and text in (b"", b"\n")


def test_a_reader_that_leaves_is_no_error(directory: Path, environment: dict[str, str]) -> None:
    """As `| head -c 1`: quiet, with the exit code that a shell gives for a broken pipe."""
    options = ("--model", str(directory), "--raw", "--prompt", PROMPT, "--quiet", *LONG)
    with start(environment, *options) as process:
        assert process.stdout is not None and process.stderr is not None
        os.read(process.stdout.fileno(), 1)
        process.stdout.close()
        messages = process.stderr.read()
    assert (process.returncode, messages) == (141, b"")


class Terminal:
    """A process on a terminal of its own."""

    def __init__(self, environment: dict[str, str], *options: str):
        self.master, slave = pty.openpty()
        take = "import fcntl, os, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        command = [sys.executable, "-c", take + RUN, *options]
        streams = {"stdin": slave, "stdout": slave, "stderr": slave}
        self.process = subprocess.Popen(command, env=environment, cwd=ROOT, **streams)
        os.close(slave)
        self.seen = ""

    def expect(self, text: str, timeout: float = 120) -> str:
        """Read until `text` has come; what came before it."""
        end = time.monotonic() + timeout
        while text not in self.seen:
            ready, _, _ = select.select([self.master], [], [], max(0, end - time.monotonic()))
            assert ready, f"no {text!r} in {self.seen!r}"
            try:
                self.seen += os.read(self.master, 4096).decode("utf-8", "replace")
            except OSError:  # how Linux tells that the other side has closed
                pytest.fail(f"ended without {text!r}: {self.seen!r}")
        before, _, self.seen = self.seen.partition(text)
        return before

    def send(self, text: str) -> None:
        os.write(self.master, text.encode())


def test_a_conversation_at_a_terminal(directory: Path, environment: dict[str, str]) -> None:
    """Ctrl-C stops an answer and not the program; what does not fit or is not there is told and forgotten; /quit leaves."""
    terminal = Terminal(environment, "--model", str(directory), "--chat", "--effort", "none", *LONG)
    try:
        terminal.expect("Ctrl-C stops an answer")
        terminal.expect("> ")
        terminal.send("one\n")
        terminal.expect("working")
        terminal.expect("\x1b[K")  # the note is erased by the first piece of text
        terminal.send("\x03")
        assert "cancelled" not in terminal.expect("finished: ")
        terminal.expect("cancelled]")
        terminal.expect("> ")
        terminal.send("x" * 600 + "\n")
        assert "the context holds 512" in terminal.expect("(this turn is forgotten)")
        terminal.expect("> ")
        terminal.send("/image nowhere.png\n")
        terminal.expect("error: image 0: nowhere.png: no such file")
        terminal.expect("> ")
        terminal.send("/help\n")
        terminal.expect("attach to your next line")
        terminal.expect("> ")
        terminal.send("two\n")
        terminal.expect("working")  # the line editor erases too, before
        terminal.expect("\x1b[K")
        terminal.send("\x03")
        terminal.expect("cancelled]")
        terminal.expect("> ")
        terminal.send("/quit\n")
        assert terminal.process.wait(timeout=60) == 0
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.master)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--model", "/no/such/place", "--prompt", "x"), "/no/such/place: no such directory"),
        (("--model", "{}/tokenizer.json", "--prompt", "x"), "no such directory; expected a checkpoint directory"),
        (("--model", "inkling", "--prompt", "x"), "'inkling' is a preset, which is a shape without weights"),
        (("--model", "inkling", "--weights", "random", "--prompt", "x"), "which the preset 'inkling' has not"),
        (
            ("--model", "incling", "--prompt", "x"),
            "unknown model 'incling': neither a directory nor the package's own (nano) nor a preset (inkling, ",
        ),
        (("--model", "{}", "--prompt", ""), "the prompt is empty (--prompt)"),
        (("--model", "{}"), "the prompt is empty (standard input)"),
        (("--model", "{}", "--prompt", "\udcff"), "--prompt is not text in UTF-8 at character 0"),
        (("--model", "{}", "--ids", "1,two"), "--ids '1,two': expected token ids"),
        (("--model", "{}", "--ids", ""), "--ids ''"),
        (("--model", "{}", "--prompt", "x", "--temperature", "-1"), "--temperature must be a number from 0 to 100, got -1.0"),
        (("--model", "{}", "--prompt", "x", "--temperature", "nan"), "--temperature must be a number from 0 to 100, got nan"),
        (("--model", "{}", "--prompt", "x", "--top-p", "2"), "--top-p must be a number from 0 to 1"),
        (("--model", "{}", "--prompt", "x", "--max-tokens", "0"), "--max-tokens must be an integer from 1"),
        (("--model", "{}", "--prompt", "x", "--stop", ""), "--stop must hold strings that are not empty"),
        (("--model", "{}", "--prompt", "x", "--effort", "huge"), "effort 'huge' is none of none, minimal"),
        (("--model", "{}", "--prompt", "x", "--raw", "--effort", "low"), "--effort belongs to a chat, which --raw is not"),
        (("--model", "{}", "--ids", "1", "--system", "x"), "--system belongs to a chat, which --ids is not"),
        (("--model", "{}", "--prompt", "x", "--image", "nowhere.png"), "--image: nowhere.png: no such file"),
        (("--model", "{}", "--chat", "--audio", "http://a.b/c.wav"), "--audio: http://a.b/c.wav is not fetched: download it"),
        (("--model", "{}", "--prompt", "x", "--image", "{}/config.json"), "config.json is no image, or a damaged one"),
        (("--model", "{}", "--prompt", "x", "--audio", "{}/config.json", "--quiet"), "config.json is no audio file"),
        (("--model", "{}", "--prompt", "x", "--raw", "--video", "x"), "--video belongs to a chat, which --raw is not"),
        (("--model", "{}", "--ids", "1", "--show-thinking"), "--show-thinking belongs to a chat, which --ids is not"),
        (("--model", "{}", "--prompt", "x", "--tools", "nowhere.json"), "--tools nowhere.json: [Errno 2] No such file"),
        (("--model", "{}", "--prompt", "x", "--tools", "{}/config.json"), "config.json: tools must be a list, not dict"),
        (("--model", "{}", "--prompt", "x", "--tools", "{}"), "[Errno 21] Is a directory"),
        (("--model", "{}", "--ids", "1", "--raw"), "--raw is for text"),
        (("--model", "{}", "--chat", "--json"), "--json and --chat exclude each other"),
        (("--model", "{}", "--chat", "--raw"), "--raw and --chat exclude each other"),
        (("--model", "{}", "--ids", "1", "--mesh", "tensor=9"), "needs 9 devices, 8 are present"),
        (("--model", "{}", "--ids", "1", "--mesh", "tenor=2"), "mesh 'tenor=2'"),
        (("--model", "{}", "--ids", "1", "--page-size", "3"), "page_size 3 is not a power of two"),
        (("--model", "{}", "--ids", "1", "--kv-memory", "1kB"), "1000 are left"),
        (("--model", "{}", "--ids", "1", "--max-context", "513"), "max_context 513 is not from 1 to the model's 512"),
        (("--model", "{}", "--ids", "1,300", "--quiet"), "token 1 of the prompt is 300: ids are integers from 0 to 299"),
        (("--model", "{}", "--prompt", "x" * 99, "--max-context", "64", "--quiet"), "tokens, the context holds 64"),
    ],
)
def test_bad_input(options: tuple[str, ...], told: str, directory: Path, capsys: pytest.CaptureFixture[str], here: None) -> None:
    """One line on standard error that says what is wrong, exit code 2, nothing on standard output."""
    assert main([option.replace("{}", str(directory)) for option in options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and told in err and err.count("\n") == 1


def test_a_wrong_line_of_a_conversation_from_a_file(
    directory: Path, capsys: pytest.CaptureFixture[str], here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is there to mend it: it ends the program as bad input does."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"/image nowhere.png\nWhat is it?\n")))
    assert main(["--model", str(directory), "--chat", "--quiet"]) == 2
    assert capsys.readouterr() == ("", "error: image 0: nowhere.png: no such file\n")


def test_a_conversation_with_nothing_to_read(
    directory: Path, capsys: pytest.CaptureFixture[str], here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python has None in the place of a closed standard input; told before weights are read."""
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["--model", str(directory), "--chat"]) == 2
    assert capsys.readouterr() == ("", "error: --chat reads the conversation from standard input, which is closed\n")


@pytest.mark.slow
def test_what_is_seen_and_heard(
    oracle_dir: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], here: None
) -> None:
    """A picture of 120 x 81 pixels, which pre-scaling doubles to 5 x 7 tiles, and two seconds of sound, 20 frames each."""
    Image.new("RGB", (120, 81), "red").save(tmp_path / "a.png")
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes(bytes(2 * 32000))
    files = ("--image", f"{tmp_path}/a.png", "--audio", (tmp_path / "a.wav").as_uri())
    options = ("--model", str(oracle_dir("tiny")), "--prompt", "What?", "--max-tokens", "2", *GREEDY, "--json", "--quiet")
    lengths = []
    for media in ((), files):
        assert main([*options, *media]) == 0
        out, err = capsys.readouterr()
        lengths.append(json.loads(out)["usage"]["prompt_tokens"])
        assert err == ""
    opened_and_closed = 3 + 4  # message_user, content_image, end_message; and the end of audio with the other
    assert lengths[1] - lengths[0] == 5 * 7 + 40 + opened_and_closed


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--model", "x", "--temperature", "hot"), "argument --temperature: invalid float value: 'hot'"),
        (("--model", "x", "--prompt"), "expected one argument (one that begins with '-' is written --option=VALUE)"),
        (("--model", "x", "--prompt", "a", "--chat"), "argument --chat: not allowed with argument --prompt"),
        (("--model", "x", "--max", "3"), "unrecognized arguments: --max 3"),
        (("--model", "x", "--kernels", "fast"), "invalid choice: 'fast'"),
    ],
)
def test_bad_options(options: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They too are one line and exit code 2."""
    with pytest.raises(SystemExit) as stop:
        main(options)
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == ""
    assert err.startswith("error: ") and told in err and err.count("\n") == 1


def test_help_is_quick_and_has_examples() -> None:
    """It names every option group and an example of each way to prompt, and loads no array library."""
    code = (
        "import sys\nfrom inkling_jax.generate import main\ntry: main(['--help'])\nexcept SystemExit as stop: code = stop.code\n"
    )
    code += "print(sorted({'jax', 'numpy', 'tokenizers', 'flax', 'rich'} & set(sys.modules)), code)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
    assert done.stdout.endswith("[] 0\n") and done.stderr == ""
    for text in (
        "\nprompt:",
        "\nsampling:",
        "\nmodel:",
        "\noutput:",
        "examples:",
        "--chat --system",
        "--image cat.jpg",
        "--tools tools.json",
        "--show-thinking",
        "| python -m",
        "exit codes",
    ):
        assert text in done.stdout


def test_without_a_device_or_a_place_for_programs(directory: Path, environment: dict[str, str]) -> None:
    """A platform that is not there is an error; a cache that cannot be written is a warning, and the run goes on."""
    command = [sys.executable, "-m", "inkling_jax.generate", "--model", str(directory), "--ids", "300", "--quiet"]
    changed = {**environment, "JAX_PLATFORMS": "nonsense"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, env=changed, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: jax finds no device on the platform 'nonsense': ")
    changed = {**environment, "XDG_CACHE_HOME": str(directory / "config.json")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, env=changed, check=False)
    first, second = done.stderr.splitlines()
    assert first.startswith("warning: compiled programs are not kept: ") and second.startswith(
        "error: token 0 of the prompt is 300"
    )


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, environment: dict[str, str]) -> Iterator[None]:
    """Calls of `main` in this process leave its settings as they were, and find standard input empty."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    monkeypatch.setenv("XDG_CACHE_HOME", environment["XDG_CACHE_HOME"])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    package = logging.getLogger("inkling_jax")
    handlers, level = package.handlers[:], package.level
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    package.handlers[:] = handlers
    package.setLevel(level)


@pytest.mark.slow
def test_the_demo_runs(environment: dict[str, str]) -> None:
    """What a person recognises, on standard output."""
    command = [sys.executable, str(ROOT / "scripts" / "demo.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert (
        "12 + 7 = 19" in done.stdout
        and "Mira lives in Dorn." in done.stdout
        and "red square" in done.stdout.rpartition("> [a red")[2]
    )
