"""Add pages to the documentation site beyond those of docs/ (a hook of MkDocs, see mkdocs.yml).

- Pages outside docs/ that a page of docs/ links to or that the navigation names (benchmarks/RESULTS.md, SECURITY.md)
  are added under their own paths. Notebooks and source files become pages that show them. Links in the sources stay
  relative to the repository, so that they work on a code host too; this hook converts them to links of the site.
- The reference has one page per package, from its docstrings, and one for the command line, from the commands.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import posixpath
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import hansa
from hansa import cli
from hansa.cli.app import app

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?P<start>\]\()(?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?(?=\))")
FENCE = re.compile(r"^(?:```|~~~).*?^(?:```|~~~)[^\S\n]*$", re.MULTILINE | re.DOTALL)
LANGUAGES = {".py": "python", ".toml": "toml", ".csv": "text", ".yml": "yaml", ".yaml": "yaml", ".sh": "sh"}
OUTSIDE = ("CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/RESULTS.md",
           "benchmarks/reproduce/README.md", "deploy/README.md")  # fmt: skip
PACKAGES = {
    "hansa.algorithms": "published methods",
    "hansa.local": "how a party trains the model",
    "hansa.fusion": "how updates become one",
    "hansa.server": "how the model takes the update",
    "hansa.select": "selection of the parties of a round",
    "hansa.schedule": "what changes from round to round",
    "hansa.transforms": "how updates travel",
    "hansa.classical": "naive Bayes, decision trees",
    "hansa.vertical": "people of parties with different columns",
    "hansa.adversary": "hostile parties, in simulation",
    "hansa.drift": "data and parties that change with the rounds",
    "hansa.attacks": "inference attacks as audits",
    "hansa.data": "data sets, partitions, files",
    "hansa.models": "a small zoo",
    "hansa.study": "algorithms compared",
    "hansa.track": "what a run tells of itself as it goes on",
    "hansa.testing": "what every algorithm must pass",
}

# Parts of a user's own algorithm, in addition to the names that `hansa` exports.
INSIDE = [
    "hansa.core.op.Op", "hansa.core.wrapper.Wrapper", "hansa.core.op.Party", "hansa.core.op.Reply",
    "hansa.core.op.UpTo", "hansa.core.route_op.RouteOp", "hansa.core.route_op.PeerOp",
    "hansa.core.ask.Routed", "hansa.core.algorithm.Problem", "hansa.core.ask.Reduced", "hansa.core.ask.Gathered",
    "hansa.sim.engine.Engine", "hansa.sim.engine.EngineInputs", "hansa.sim.engine.ReferenceEngine",
    "hansa.sim.engine.PartyWork", "hansa.replies.partial_sums.PartialSum", "hansa.replies.partial_sums.ReplySum",
    "hansa.numerics.params.Params", "hansa.core.other_model.OtherModel", "hansa.experiment.settings.Run",
]  # fmt: skip


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of the reference into the navigation."""
    pages = [{"Overview": "reference/README.md"}, {"Command line": "reference/cli.md"}]
    pages += [{name: f"reference/{name}.md"} for name in ("hansa", *PACKAGES)]
    config.nav = [{"Reference": pages} if "Reference" in item else item for item in config.nav or []]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages from outside docs/: the reference, and files of the repository that the pages link to."""
    for path, text in reference():
        files.append(File.generated(config, path, content=text))
    waiting = [*OUTSIDE, *_outward(files)]
    while waiting:
        path = waiting.pop()
        place = site_path(path)
        if files.get_file_from_path(place) is not None:
            continue
        source = ROOT / path
        if source.suffix in (".md", ".ipynb"):
            text = source.read_text() if source.suffix == ".md" else notebook(source, path)
            files.append(File.generated(config, place, content=text))
            waiting += [linked for linked in targets(text, path) if not linked.startswith("docs/")]
        elif place.endswith(".md"):
            language = LANGUAGES.get(source.suffix, "text")
            text = f"---\nsearch:\n  exclude: true\n---\n# `{path}`\n\n````{language}\n{source.read_text()}````\n"
            files.append(File.generated(config, place, content=text))
        else:
            files.append(File.generated(config, place, abs_src_path=str(source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Convert links that leave or enter docs/ into links of the site."""
    here = repository_path(page.file.src_uri)

    def turned(link: re.Match[str]) -> str:
        linked = resolve(link["target"], here)
        if linked is None or (here.startswith("docs/") and linked.startswith("docs/")):
            return link[0]
        place = posixpath.relpath(site_path(linked), posixpath.dirname(page.file.src_uri) or ".")
        return f"{link['start']}{place}{link['anchor'] or ''}"

    return outside_fences(markdown, lambda text: LINK.sub(turned, text))


def notebook(source: Path, path: str) -> str:
    """Convert a notebook's cells to Markdown; the notebooks have no stored outputs."""
    parts = [f"*The notebook `{path}`, for Jupyter; it has no stored outputs.*"]
    for cell in json.loads(source.read_text())["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    parts[0], parts[1] = parts[1], parts[0]  # the title comes first
    return "\n\n".join(parts) + "\n"


def outside_fences(markdown: str, change: Any) -> str:
    """Change the text of a page outside its code blocks."""
    parts, at = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [change(markdown[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*parts, change(markdown[at:])])


def resolve(target: str, here: str) -> str | None:
    """Resolve a link of a page to a path in the repository; None if there is no such file."""
    if "://" in target or target.startswith(("mailto:", "/")):
        return None
    linked = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
    return linked if (ROOT / linked).is_file() and not linked.startswith("..") else None


def targets(markdown: str, here: str) -> Iterator[str]:
    """The files of the repository that a page links to."""
    for link in LINK.finditer(FENCE.sub("", markdown)):
        linked = resolve(link["target"], here)
        if linked is not None:
            yield linked


def repository_path(src_uri: str) -> str:
    """Return the path of a site page in the repository."""
    if src_uri.endswith(".ipynb.md"):
        return src_uri.removeprefix("source/").removesuffix(".md")
    return f"docs/{src_uri}" if (ROOT / "docs" / src_uri).is_file() else src_uri


def site_path(path: str) -> str:
    """Return the site path of a repository file: Markdown and images keep theirs, source becomes a page."""
    if path in ("README.md", "docs/README.md"):
        return "README.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return path if Path(path).suffix in (".md", ".png", ".svg") else f"source/{path}.md"


def _outward(files: Files) -> Iterator[str]:
    for file in list(files.documentation_pages()):
        if file.abs_src_path and Path(file.abs_src_path).is_relative_to(ROOT / "docs"):
            here = f"docs/{file.src_uri}"
            yield from (path for path in targets(file.content_string, here) if not path.startswith("docs/"))


# The reference


def reference() -> Iterator[tuple[str, str]]:
    """The generated pages of the reference: path and text."""
    packages = {name: importlib.import_module(name) for name in PACKAGES}
    lines = [f"| [`{name}`]({name}.md) | {what} |" for name, what in PACKAGES.items()]
    yield "reference/README.md", "\n".join([
        "# Reference", "", "Generated from the docstrings and from the commands. The most used names are also in "
        "`hansa` itself: `hansa.FedAvg` is `hansa.algorithms.FedAvg`.", "",
        "| | |", "|---|---|", "| [command line](cli.md) | every command, its arguments and options |",
        "| [`hansa`](hansa.md) | tasks, runs, results, and the base classes of your own algorithm |", *lines, "",
    ])  # fmt: skip
    for name, module in packages.items():
        yield f"reference/{name}.md", _page(module, _public(module))
    elsewhere = {path for module in packages.values() for path in _public(module)}
    first = [_path(item) for item in (hansa.simulate, hansa.resume, hansa.Task, hansa.Result)]
    own = [path for path in (*first, *_public(hansa)) if path not in elsewhere]
    yield "reference/hansa.md", _page(hansa, [*own, *INSIDE])
    yield "reference/cli.md", command_line()


def _public(module: ModuleType) -> list[str]:
    """Find where the public classes and functions of a module are defined."""
    names = getattr(module, "__all__", None) or [
        name for name, item in vars(module).items()
        if getattr(item, "__module__", None) == module.__name__ and not name.startswith("_")
    ]  # fmt: skip
    return [_path(item) for item in (getattr(module, name) for name in names) if hasattr(item, "__qualname__")]


def _path(item: Any) -> str:
    return f"{item.__module__}.{item.__qualname__}"


def _page(module: ModuleType, paths: Iterable[str]) -> str:
    parts = [f"::: {path}" for path in dict.fromkeys(paths)]
    return "\n\n".join([f"# {module.__name__}", (module.__doc__ or "").strip(), *parts, ""])


def command_line() -> str:
    """Document every command of `hansa` from its own help text."""
    for module in pkgutil.iter_modules(cli.__path__):  # importing them adds their commands
        if module.name != "__main__":
            importlib.import_module(f"hansa.cli.{module.name}")
    group = typer.main.get_command(app)
    lines = ["# Command line", "", "`hansa COMMAND --help` says the same.", ""]
    for words, command in _commands(group, ("hansa",)):
        lines += [
            f"## {' '.join(words)}",
            "",
            _sentences(command.help or ""),
            "",
            "```",
            _usage(words, command),
            "```",
            "",
        ]
        rows = [_row(parameter) for parameter in command.params if not getattr(parameter, "hidden", False)]
        if rows:
            lines += ["| | default | |", "|---|---|---|", *rows, ""]
    return "\n".join(lines)


def _commands(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    children = getattr(command, "commands", None)
    if children is None:
        yield words, command
        return
    for name, child in children.items():
        if not child.hidden:
            yield from _commands(child, (*words, name))


def _usage(words: tuple[str, ...], command: Any) -> str:
    places = [_name(each) for each in command.params if each.param_type_name == "argument"]
    options = ["[OPTIONS]"] if len(places) < len(command.params) else []
    return " ".join([*words, *options, *places])


def _name(argument: Any) -> str:
    word = argument.name.upper() + ("..." if argument.nargs != 1 else "")
    return word if argument.required else f"[{word}]"


def _row(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        name = f"`{_name(parameter)}`"
    else:
        name = ", ".join(f"`{word}`" for word in (*parameter.opts, *parameter.secondary_opts))
    default = parameter.default
    plain = isinstance(default, (int, float, str, Path)) and not isinstance(default, bool)
    shown = "required" if parameter.required else f"`{default}`" if plain else ""
    return f"| {name} | {shown} | {_sentences(parameter.help or '').replace('|', '&#124;')} |"


def _sentences(text: str) -> str:
    return " ".join(text.split())
