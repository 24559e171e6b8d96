"""Imports point one way, training needs no server and no plots, and no file unpickles."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

import hansa

ROOT = Path(hansa.__file__).parent
sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))
from package_map import BASE, imports, levels, package_of  # noqa: E402 (the script that draws the map)

FILES = sorted(ROOT.rglob("*.py"))

# The packages that each package may import, beside those of `BASE`, which stand upon each other in their order. None
# imports one that comes later in this table, so there is no cycle.
# `hansa.net` is six packages, and a few files above them.
AXES = {"schedule", "fusion", "adversary", "transforms", "local", "server", "select", "drift"}
MAY_IMPORT = {
    "kernel": set[str](),
    "schedule": set(),
    "fusion": set(),
    "adversary": set(),
    "topology": set(),
    "transforms": set(),
    "drift": set(),
    "secure": {"kernel"},
    "models": set(),
    "data": set(),
    "metrics": set(),
    "artifacts": set(),
    "ui": set(),
    "classical": {"kernel"},
    "local": {"kernel", "schedule"},
    "server": {"fusion", "schedule"},
    "select": {"local"},
    "algorithms": {"schedule", "local", "fusion", "server", "select", "topology", "transforms"},
    "matching": {"fusion", "local", "models"},
    "vertical": {"kernel", "secure", "classical", "local", "models"},
    "privacy": {"kernel", "secure", "select", "transforms"},
    "sim": {"local"},
    "cluster": {"local", "sim"},
    "report": {"data", "metrics", "artifacts"},
    "track": {"data", "artifacts", "report"},
    "experiment": AXES | {"data", "metrics", "privacy", "sim", "track"},
    "run": AXES | {"data", "metrics", "privacy", "sim", "track", "artifacts", "report", "experiment"},
    "study": {"adversary", "cluster", "data", "metrics", "artifacts", "report", "track", "experiment", "run"},
    "sklearn": {"classical", "report", "run"},
    "net.transport": {"ui"},
    "net.attestation": {"net.transport"},
    "net.audit": {"net.transport"},
    "net.party": {"artifacts", "drift", "kernel", "data", "local", "metrics", "transforms", "privacy",
                  "experiment", "net.transport", "net.attestation", "net.audit"},
    "net.aggregator": {"data", "experiment", "metrics", "report", "run", "track", "ui", "net.transport",
                       "net.attestation", "net.audit"},
    "net.relay": {"net.transport", "net.audit", "net.aggregator", "net.party"},
    "net": {"artifacts", "experiment", "net.transport", "net.audit", "net.aggregator"},
    "attacks": {"algorithms", "data", "experiment", "fusion", "local", "privacy", "select", "server",
                "transforms", "artifacts", "report", "run", "net.aggregator", "net.party"},
    "demo": {"algorithms", "local", "models", "data", "artifacts", "report", "experiment", "run", "net",
             "net.aggregator"},
    "testing": {"algorithms", "experiment", "fusion", "local", "metrics", "transforms", "privacy", "run",
                "secure", "sim", "net", "net.aggregator", "net.party", "net.transport"},
}  # fmt: skip
EVERYTHING = {"cli"}  # commands, which use all other packages
ABOVE = {"__init__.py": set[str](), "__main__.py": {"cli"}}  # files of `hansa` itself
LEAN = {*BASE, "kernel", "local", "fusion", "server", "select", "schedule", "transforms", "adversary", "drift", "sim"}
ALLOWED = {"torch", "numpy", "scipy", "safetensors", "msgspec", "dp_accounting"} | set(sys.stdlib_module_names)


@functools.cache
def trees() -> dict[Path, ast.AST]:
    """Every file of the package, parsed."""
    return {path: ast.parse(path.read_text(), filename=str(path)) for path in FILES}


def package(path: Path) -> str | None:
    """The package of a file; None for a file of `hansa` itself."""
    return package_of(".".join(["hansa", *path.relative_to(ROOT).with_suffix("").parts]))


def test_every_package_has_its_place_in_the_order_of_imports() -> None:
    assert {package(path) for path in FILES} - {None} == {*BASE, *MAY_IMPORT, *EVERYTHING}
    below = set[str]()
    for name, allowed in MAY_IMPORT.items():
        assert allowed <= below, f"{name} may import {allowed - below}, which the table has after it: a cycle"
        below.add(name)


def test_a_cycle_of_imports_is_found() -> None:
    with pytest.raises(ValueError, match="run -> track -> run"):
        levels({"run": frozenset({"track"}), "track": frozenset({"run"})})


def test_files_import_only_what_their_packages_may() -> None:
    wrong = []
    for path, tree in trees().items():
        own = package(path)
        below = {*BASE[: BASE.index(own)]} if own in BASE else {*BASE}
        allowed = ABOVE[path.name] if own is None else MAY_IMPORT.get(own, set())
        for name in imports(tree, path):
            target, where = package_of(name), f"{path.relative_to(ROOT)}: {own} imports {name}"
            if target is not None and target != own and own not in EVERYTHING:
                wrong += [where] if target not in allowed | below else []
            elif not name.startswith("hansa") and own in LEAN and name.partition(".")[0] not in ALLOWED:
                wrong.append(f"{where}; training needs no such package")
    assert not wrong, "\n".join(wrong)


UNSAFE_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"}
UNSAFE_CALLS = {"torch.load", "yaml.load", "yaml.unsafe_load", "pandas.read_pickle", "pd.read_pickle"}
UNSAFE_BUILTINS = {"eval", "exec", "compile", "__import__"}


def unsafe(tree: ast.AST, path: Path) -> list[str]:
    """The imports and calls of a file that could run code from input."""
    found = [name for name in imports(tree, path) if name.partition(".")[0] in UNSAFE_MODULES]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            found += [called] if called in UNSAFE_CALLS | UNSAFE_BUILTINS else []
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            found.append("allow_pickle")
    return found


def test_no_file_reads_bytes_in_a_way_that_could_run_code() -> None:
    wrong = [f"{path.relative_to(ROOT)}: {found}" for path, tree in trees().items() if (found := unsafe(tree, path))]
    assert not wrong, "\n".join(wrong)


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
     ("def f():\n    from hansa.net.transport.wire import x", "hansa.net.transport.wire")],
)  # fmt: skip
def test_the_search_for_imports_finds_every_form(source: str, module: str) -> None:
    assert module in list(imports(ast.parse(source), ROOT / "core" / "x.py"))


@pytest.mark.slow
def test_a_party_can_train_without_loading_a_runtime() -> None:
    code = (
        "import sys, hansa.core.op, hansa.replies.replies, hansa.algorithms, hansa.classical\n"
        "runtimes = ('hansa.sim', 'hansa.net', 'hansa.run', 'hansa.cli', 'sklearn')\n"
        "print([name for name in sys.modules if name.startswith(runtimes)])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    assert out.stdout.strip() == "[]"


def test_every_folder_is_a_package_that_gets_installed() -> None:
    assert [folder for folder in sorted({p.parent for p in FILES}) if not (folder / "__init__.py").exists()] == []


@pytest.mark.slow
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
