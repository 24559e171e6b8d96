"""Imports point one way (DESIGN section 6), few packages are needed to train (section 7), and nothing unpickles."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hansa

ROOT = Path(hansa.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# What each package may import of the others. `cli`, `run` and `testing` put the pieces together and may import all.
MAY_IMPORT = {
    "core": {"core"},
    "local": {"core", "schedule", "local"},
    "fusion": {"core", "fusion"},
    "server": {"core", "fusion", "schedule", "server"},
    "select": {"core", "local", "select"},
    "schedule": {"core", "schedule"},
    "transforms": {"core", "transforms"},
    "adversary": {"core", "adversary"},
    "algorithms": {"core", "local", "fusion", "server", "select", "algorithms"},
    "bayes": {"core", "bayes"},
    "trees": {"core", "trees"},
    "models": {"core", "models"},
    "data": {"core", "data"},
    "sim": {"core", "local", "sim"},
    "ui": {"core", "ui"},
    "secure": {"core", "secure"},
    "privacy": {"core", "secure", "select", "transforms", "privacy"},
}
RUNTIMES = {"sim", "net"}
PICK_A_RUNTIME = {"cli", "run", "testing.py", "testing"}
LEAN = {"core", "local", "fusion", "server", "select", "schedule", "transforms", "adversary", "sim"}
ALLOWED = {"torch", "numpy", "safetensors"} | set(sys.stdlib_module_names)


def package(path: Path) -> str:
    """The package of a file: its first folder under hansa, or its own name at the top."""
    return path.relative_to(ROOT).parts[0]


def imports(tree: ast.AST, path: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in it, as an absolute name."""
    here = ["hansa", *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield ".".join([*here[: len(here) - node.level + 1], *filter(None, [node.module])])
        elif isinstance(node, ast.ImportFrom) and node.module == "hansa":
            yield from (f"hansa.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def parsed(path: Path) -> ast.AST:
    return ast.parse(path.read_text(), filename=str(path))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_imports_only_what_its_package_may(path: Path) -> None:
    own = package(path)
    for name in imports(parsed(path), path):
        first, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        if first == "hansa" and target:
            if own in MAY_IMPORT:
                assert target in MAY_IMPORT[own], f"{own} imports {name}"
            if target in RUNTIMES and target != own:
                assert own in PICK_A_RUNTIME, f"{own} imports the runtime {name}"
        elif first != "hansa" and own in LEAN:
            assert first in ALLOWED, f"{own} imports {name}; the GPU machine has no such package"


UNSAFE_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"}
UNSAFE_CALLS = {"torch.load", "yaml.load", "yaml.unsafe_load", "pandas.read_pickle", "pd.read_pickle"}
UNSAFE_BUILTINS = {"eval", "exec", "compile", "__import__"}


def unsafe(tree: ast.AST, path: Path) -> list[str]:
    """What a file does that could run code from bytes or texts it is given."""
    found = [name for name in imports(tree, path) if name.partition(".")[0] in UNSAFE_MODULES]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            found += [called] if called in UNSAFE_CALLS | UNSAFE_BUILTINS else []
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            found.append("allow_pickle")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_file_reads_bytes_in_a_way_that_could_run_code(path: Path) -> None:
    assert unsafe(parsed(path), path) == []


@pytest.mark.parametrize(
    "source",
    ["import pickle", "from pickle import loads", "torch.load(f)", "np.load(f, allow_pickle=True)", "eval(x)",
     "def f():\n    import joblib"],
)  # fmt: skip
def test_the_search_for_unsafe_reading_finds_it(source: str) -> None:
    assert unsafe(ast.parse(source), ROOT / "core" / "x.py")


@pytest.mark.parametrize(
    ("source", "module"),
    [("import hansa.sim.engine", "hansa.sim.engine"), ("from hansa.sim import engine", "hansa.sim"),
     ("from hansa import sim", "hansa.sim"), ("from ..sim import engine", "hansa.sim"),
     ("def f():\n    from hansa.net.wire import x", "hansa.net.wire")],
)  # fmt: skip
def test_the_search_for_imports_finds_every_form(source: str, module: str) -> None:
    assert module in list(imports(ast.parse(source), ROOT / "core" / "x.py"))


def test_a_party_can_train_without_loading_a_runtime() -> None:
    code = (
        "import sys, hansa.core.op, hansa.core.replies, hansa.algorithms, hansa.bayes, hansa.trees\n"
        "runtimes = ('hansa.sim', 'hansa.net', 'hansa.run', 'hansa.cli', 'sklearn')\n"
        "print([name for name in sys.modules if name.startswith(runtimes)])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("folder", sorted({p.parent for p in FILES}), ids=lambda p: str(p.relative_to(ROOT)))
def test_every_folder_is_a_package_that_gets_installed(folder: Path) -> None:
    assert (folder / "__init__.py").exists()


def test_a_run_of_a_dense_model_loads_neither_the_compiler_nor_symbolic_algebra() -> None:
    code = (
        "import sys, torch, hansa\n"
        "pairs = [(torch.ones(4, 2), torch.zeros(4, 1))] * 3\n"
        "task = hansa.Task(lambda: torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.GELU(), torch.nn.Linear(3, 1)), "
        "'mse', pairs)\n"
        "hansa.simulate(hansa.FedAvg(), task, rounds=1, engine='stacked')\n"
        "print([name for name in ('torch._dynamo', 'torch._inductor', 'sympy') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    assert out.stdout.strip() == "[]"
