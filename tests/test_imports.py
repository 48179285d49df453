"""The design's arrows, files -> config -> params -> jitted steps -> tokens -> text, held by walking the imports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "inkling_jax"
ARRAYS = ("jax", "jaxlib", "flax", "numpy", "ml_dtypes", "jaxtyping")


@dataclass(frozen=True)
class Rule:
    """What the modules `who` may and must not import.

    Names are relative to inkling_jax; a package stands for all in it, and "config*" for every module whose name starts so.
    """

    who: str
    only: tuple[str, ...] | None = None  # the modules and packages of ours that may be imported; None: any
    never: tuple[str, ...] = ()  # those that must not be
    without: tuple[str, ...] = ()  # libraries that must not be loaded, by it or by any module of ours that it loads


# What people run, and what only that may know: the model works without any of it.
PROGRAMS = (
    "batch",
    "bench",
    "benchmarks",
    "calibration",
    "chat_loop",
    "command_line",
    "doctor",
    "evals",
    "generate",
    "generate_options",
    "plan",
    "planning",
    "self_check",
    "terminal",
)
FRONT = ("llm", "loading", *PROGRAMS)

RULES = [
    Rule("errors", only=(), without=ARRAYS),
    Rule("interrupts", only=(), without=ARRAYS),
    Rule("processes", only=("errors",)),
    Rule("compiling", only=()),
    Rule("config*", only=("errors", "config*"), without=ARRAYS),
    Rule("sources", only=("errors", "config*"), without=ARRAYS),
    Rule("kernels", only=("errors", "kernels")),
    Rule("cache", only=("errors", "config*", "cache", "kernels", "sharding")),
    Rule("sharding", only=("errors", "sharding")),
    Rule("layers", only=("errors", "config*", "kernels", "cache", "sharding", "layers")),
    Rule("model", only=("config*", "cache", "sharding", "layers")),
    Rule("towers", only=("config*", "layers")),
    Rule("media", only=(), without=("jax", "jaxlib", "flax")),
    Rule("workspace", only=("config*", "kernels")),
    Rule("expert_storage", only=("errors", "config*", "kernels", "layers", "model", "sharding")),
    Rule("random_weights", only=("config*", "model", "sharding", "towers")),
    Rule("convert", never=("bench", "benchmarks", "chat_loop", "evals", "generate*", "terminal")),
    Rule("convert.[a-z]*", never=("engine", "inputs", "outputs", "llm", "loading", *sorted({*PROGRAMS} - {"command_line"}))),
    Rule("convert.[a-z]*", never=("command_line",)),  # which only its command line knows, __main__
    Rule("convert.__main__", never=("engine", "inputs", "outputs", *sorted({*FRONT} - {"calibration", "command_line"}))),
    Rule("calibration", never=("bench", "benchmarks", "chat_loop", "evals", "generate*", "terminal")),
    Rule("engine", never=("inputs", "outputs", *FRONT)),
    Rule("engine.scheduler", without=("jax", "jaxlib", "flax")),
    Rule("inputs", never=("model", "layers", "engine", *FRONT)),
    Rule("outputs", never=("model", "layers", "engine", *FRONT)),
    Rule("memory", never=("inputs", "outputs", "loading", "llm", *PROGRAMS)),
    Rule(
        "draft_loading",
        only=("errors", "config*", "convert", "engine", "layers", "memory", "model", "random_weights", "sharding"),
    ),
    Rule("loading", never=("outputs", "conversation", "llm", *PROGRAMS)),
    Rule("completion", only=("engine", "inputs", "outputs")),
    Rule("conversation", never=("loading", *PROGRAMS)),
    Rule("llm", never=PROGRAMS),
    Rule("command_line", only=("errors",)),
    Rule("terminal", never=("bench", "benchmarks", "chat_loop", "generate*")),
    Rule("chat_loop", never=("bench", "benchmarks", "generate*")),
    Rule("batch", never=("bench", "benchmarks", "chat_loop", "generate*", "terminal")),
    Rule("evals", never=("bench", "benchmarks", "chat_loop", "generate*", "terminal")),
    Rule("evals.nano", only=("config*", "errors", "evals", "inputs")),
    Rule("generate_options", only=("command_line", "sources")),
    Rule("generate", never=("bench", "benchmarks")),
    Rule("planning", never=("outputs", "llm", "bench", "benchmarks", "generate", "terminal")),
    Rule("self_check", never=("engine", "inputs", "outputs", "loading", "llm", "planning")),
    Rule("doctor", only=("command_line", "convert", "memory", "self_check")),
    Rule("plan", only=("command_line", "convert", "planning")),
    Rule("bench", only=("command_line", "config*")),
    Rule("benchmarks", never=("inputs", "outputs", "llm", "bench", "command_line", "generate", "terminal")),
]


def modules_of(root: Path) -> dict[str, Path]:
    """Files of the package below `root` by dotted name."""
    files = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def is_type_checking(node: ast.stmt) -> bool:
    """Whether `node` is `if TYPE_CHECKING:`, whose body never runs."""
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imports_of(name: str, files: dict[str, Path], running: bool = False) -> set[str]:
    """Dotted names that module `name` imports, wherever in the file; `running`: without what only a type checker reads."""
    found: set[str] = set()
    nodes: list[ast.AST] = [ast.parse(files[name].read_text())]
    while nodes:
        node = nodes.pop()
        if running and isinstance(node, ast.If) and is_type_checking(node):
            nodes += node.orelse
            continue
        nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = name.split(".") if files[name].name == "__init__.py" else name.split(".")[:-1]
            base = (
                ".".join([*package[: len(package) - node.level + 1], node.module or ""]).rstrip(".")
                if node.level
                else node.module
            )
            # `from a import b` loads a.b where that is a module, else only a.
            found |= {full if (full := f"{base}.{alias.name}") in files else str(base) for alias in node.names}
    return found


def loaded_by(name: str, files: dict[str, Path]) -> dict[str, str]:
    """Everything that loading module `name` loads through modules of ours, each with the module that imports it."""
    via: dict[str, str] = {}
    todo = [name]
    while todo:
        module = todo.pop()
        parents = {module.rsplit(".", i)[0] for i in range(1, module.count(".") + 1)}
        for target in parents | imports_of(module, files, running=True):
            if target not in via:
                via[target] = module
                if target in files:
                    todo.append(target)
    return via


def is_within(module: str, whole: str) -> bool:
    """Whether `module` is `whole` (which may be a pattern) or lies in it."""
    return fnmatchcase(module, whole) or fnmatchcase(module, whole + ".*")


def violations(rule: Rule, files: dict[str, Path]) -> list[str]:
    """What the rule forbids and the code does."""
    found = []
    for name in (n for n in files if is_within(n, f"{PACKAGE}.{rule.who}")):
        ours = {target for target in imports_of(name, files) if is_within(target, PACKAGE) and target != PACKAGE}
        for target in sorted(ours):
            short = target.removeprefix(PACKAGE + ".")
            if rule.only is not None and not any(is_within(short, whole) for whole in rule.only):
                found.append(f"{name} imports {target}; it may import of ours only: {', '.join(rule.only) or 'nothing'}")
            if any(is_within(short, whole) for whole in rule.never):
                found.append(f"{name} imports {target}, against the direction of data")
        for target, module in loaded_by(name, files).items():
            if any(is_within(target, library) for library in rule.without):
                found.append(f"{name} loads {target}, imported by {module}")
    return found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.who)
def test_arrows(rule: Rule) -> None:
    """Every rule names code that exists, and the code keeps it."""
    files = modules_of(ROOT)
    for whole in (rule.who, *(rule.only or ()), *rule.never):
        named = [name for name in files if is_within(name, f"{PACKAGE}.{whole}")]
        assert named, f"the rule for {rule.who} names {whole}, which does not exist: it would hold nothing"
    assert violations(rule, files) == []


def test_every_module_has_a_rule() -> None:
    """A new module says what it may know."""
    for name in modules_of(ROOT):
        assert name == PACKAGE or any(is_within(name, f"{PACKAGE}.{rule.who}") for rule in RULES), name


@pytest.mark.parametrize(
    ("module", "source", "told"),
    [
        ("config", "import numpy as np", "loads numpy"),
        ("config", "from . import other", "inkling_jax.config imports inkling_jax.other"),
        ("kernels.op", "def f():\n    from inkling_jax.layers import norm", "imports inkling_jax.layers.norm"),
        ("layers.norm", "from ..engine.steps import step", "imports inkling_jax.engine.steps"),
        ("engine.steps", "import inkling_jax.inputs.chat", "against the direction"),
        ("llm", "from inkling_jax.benchmarks import timing", "inkling_jax.llm imports inkling_jax.benchmarks.timing, against"),
        ("engine.scheduler", "from inkling_jax import other", "loads jax.numpy, imported by inkling_jax.other"),
        ("engine.scheduler", "from .steps import step", "loads jax, imported by inkling_jax.engine.steps"),
    ],
)
def test_rules_can_fail(tmp_path: Path, module: str, source: str, told: str) -> None:
    """Each kind of forbidden import is seen in a package that has it: the rules above are not empty."""
    sources = dict.fromkeys(
        ("config", "errors", "kernels.op", "layers.norm", "engine.scheduler", "inputs.chat", "benchmarks.timing"), ""
    )
    sources |= {"engine.steps": "import jax", "other": "import jax.numpy", module: source}
    for name, text in sources.items():
        path = tmp_path / PACKAGE / (name.replace(".", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(text)
    files = modules_of(tmp_path)
    assert any(told in line for rule in RULES for line in violations(rule, files))


def loaded_after(statement: str) -> set[str]:
    """Top-level names of the modules that a fresh interpreter holds after `statement`."""
    code = f"{statement}; import sys; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_package_is_light() -> None:
    """Importing the package loads no array library, so it can touch no device."""
    loaded = loaded_after("import inkling_jax; inkling_jax.InputError; dir(inkling_jax)")
    assert PACKAGE in loaded
    assert loaded.isdisjoint({*ARRAYS, "tokenizers", "huggingface_hub", "orbax"})


def test_programs_start_light() -> None:
    """The command lines load no array library before they have read their options."""
    assert loaded_after("import inkling_jax.generate, inkling_jax.bench, inkling_jax.doctor, inkling_jax.plan").isdisjoint(ARRAYS)


def test_scheduler_runs_without_jax() -> None:
    """The host's bookkeeping loads where jax is missing."""
    assert "jax" not in loaded_after("import inkling_jax.engine.scheduler")


def test_public_names_exist() -> None:
    """Every name that the package promises can be had, and an unknown one is an AttributeError."""
    import inkling_jax

    for name in inkling_jax.__all__:
        assert getattr(inkling_jax, name) is not None
    assert set(inkling_jax.__all__) <= set(dir(inkling_jax))
    with pytest.raises(AttributeError, match="nonesuch"):
        _ = inkling_jax.nonesuch


# Variables of ours would be options that no --help names. Those of jax, CUDA and the system are theirs.
FOREIGN = re.compile(r"(JAX|XLA|OPENBLAS|CUDA|NVIDIA|NCCL|HF|XDG|TF|PYTEST|PYTHON)_\w+|HOME|PATH|TERM|COLUMNS|NO_COLOR|TMPDIR|CI")
OUR_VARIABLE = re.compile(r"INKLING(_JAX)?_[A-Z]\w*")


def environment_names(tree: ast.AST) -> set[str]:
    """Constant names that a module looks up in, or writes to, the environment, and constants that look like ours."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and OUR_VARIABLE.fullmatch(node.value):
            found.add(node.value)
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("environ"):
            key: ast.expr | None = node.slice
        elif isinstance(node, ast.Call) and re.search(r"(environ\.(get|setdefault|pop)|getenv)$", ast.unparse(node.func)):
            key = node.args[0] if node.args else None
        else:
            continue
        if isinstance(key, ast.Constant):
            found.add(str(key.value))
    return found


def test_no_environment_variables_of_our_own() -> None:
    """Options are arguments."""
    names = {"INKLING_X", "JAX_Y", "OTHER"}
    example = "import os\nos.environ['INKLING_X']\nos.environ.get('JAX_Y')\nos.getenv('OTHER', '')"
    assert environment_names(ast.parse(example)) == names
    for path in sorted([*(ROOT / PACKAGE).rglob("*.py"), *(ROOT / "scripts").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]):
        if path == Path(__file__).resolve():
            continue
        ours = {name for name in environment_names(ast.parse(path.read_text())) if not FOREIGN.fullmatch(name)}
        assert not ours, f"{path.relative_to(ROOT)} uses environment variables {sorted(ours)}"


# An absolute path below somebody's home or work folder.
MACHINE_PATH = re.compile(r"(?<![\w./$}~-])/(?:work|root|home|Users|mnt)/\w")


def test_no_machine_paths() -> None:
    """No tracked text names a place of the machine that it was written on."""
    assert MACHINE_PATH.search("see " + "/work" + "/x") and not MACHINE_PATH.search("https://a.b/home/x ../home/x")
    listing = subprocess.run(["git", "ls-files", "-z"], capture_output=True, text=True, cwd=ROOT, check=False)
    if listing.returncode:
        pytest.skip("not a git checkout: no list of tracked files")
    for name in filter(None, listing.stdout.split("\0")):
        path = ROOT / name
        if path.is_file() and b"\0" not in (data := path.read_bytes()):
            lines = data.decode().splitlines()
            found = [f"{name}:{i}: {line.strip()[:100]}" for i, line in enumerate(lines, 1) if MACHINE_PATH.search(line)]
            assert not found, "\n".join(found)
