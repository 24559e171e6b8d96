"""The public surface of Hansa as plain data: names and signatures, commands and options, the configuration schema.

    make surface             # write current.json and the schema of experiment files
    make surface RELEASED=1  # also write released.json, the surface of this version

An entry of the surface is a key and a description. A key has words: the section, then names from the outside to the
inside ("cli run --set", "config local sgd lr"). `unnamed` compares two surfaces: each entry that differs must be named
in the part of CHANGELOG.md that is newer than the last release. docs/stability.md states the policy.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import typer

import hansa
from hansa import cli
from hansa.cli.app import app
from hansa.core.plain_data import field_default, field_types, to_config, type_name
from hansa.core.registry import KINDS, Part, registered
from hansa.experiment.audit import AuditTable
from hansa.experiment.config import TABLES, TaskTable
from hansa.experiment.settings import Run
from hansa.privacy import Privacy
from hansa.study.schema import file_schema
from hansa.study.spec import KEYS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CURRENT, RELEASED = HERE / "current.json", HERE / "released.json"
SCHEMA = ROOT / "docs" / "experiment.schema.json"
Surface = dict[str, str]


def surface() -> Surface:
    """The surface of the code as it is."""
    return dict(sorted([*_python(), *_commands("cli", _console()), *_config()]))


# Python: the names of hansa.__all__


def _python() -> Iterator[tuple[str, str]]:
    for name in hansa.__all__:
        public = getattr(hansa, name)
        if not isinstance(public, type):
            yield f"python {name}", signature(public) if callable(public) else type(public).__name__
        elif issubclass(public, Part) and ":" not in public.name:  # its fields are in the configuration schema
            yield f"python {name}", f"{public.kind} {public.name} ({', '.join(field_types(public))})"
        else:
            yield f"python {name}", f"class {_constructor(public)}"
            for member, description in _members(public):
                yield f"python {name} {member}", description


def _constructor(cls: type[Any]) -> str:
    return "exception" if issubclass(cls, Exception) else signature(cls)


def _members(cls: type[Any]) -> Iterator[tuple[str, str]]:
    """The public methods and properties of a class that Hansa defines."""
    for name in dir(cls):
        owner = next((base for base in cls.__mro__ if name in vars(base)), object)
        if name.startswith("_") or not owner.__module__.startswith("hansa."):
            continue
        member = inspect.getattr_static(cls, name)
        if isinstance(member, (staticmethod, classmethod)):
            yield name, f"{type(member).__name__} {signature(member.__func__)}"
        elif callable(member):
            yield name, signature(member)
        elif isinstance(member, property) or type(member).__name__ == "cached_property":
            yield name, "property"


def signature(function: Any) -> str:
    """A signature without the parameter `self`, with annotations and defaults as they are written."""
    made = inspect.signature(function)
    parameters = [
        parameter.replace(annotation=_Text(_annotation(parameter.annotation)), default=_default(parameter.default))
        for parameter in made.parameters.values()
        if parameter.name != "self"
    ]
    result = "" if made.return_annotation in (inspect.Signature.empty, None) else _annotation(made.return_annotation)
    return str(inspect.Signature(parameters)) + (f" -> {result}" if result else "")


class _Text:
    """A text that a signature shows without quotes."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _annotation(annotation: Any) -> str:
    if annotation is inspect.Signature.empty:
        return "Any"
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _default(default: Any) -> Any:
    return default if default is inspect.Signature.empty else _Text(shown(default))


def shown(value: Any) -> str:
    """A default as text: a part by its name and the fields that differ from its own defaults."""
    if isinstance(value, Part):
        fields = to_config(value)
        changed = {name: fields[name] for name in field_types(type(value))
                   if getattr(value, name) != field_default(type(value), name)}  # fmt: skip
        return value.name + (f" {json.dumps(changed)}" if changed else "")
    if isinstance(value, Path):
        return repr(str(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__name__}()"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


# The command line


def _console() -> Any:
    for module in pkgutil.iter_modules(cli.__path__):  # importing them adds their commands
        if module.name != "__main__":
            importlib.import_module(f"hansa.cli.{module.name}")
    return typer.main.get_command(app)


def _commands(key: str, command: Any) -> Iterator[tuple[str, str]]:
    hints = get_type_hints(inspect.unwrap(command.callback)) if command.callback else {}
    for parameter in command.params:
        argument = parameter.param_type_name == "argument"
        names = [parameter.name.upper()] if argument else [*parameter.opts, *parameter.secondary_opts]
        names.sort(key=len)
        words = ["argument" if argument else "option"]
        words += [f"also {', '.join(names[:-1])}"] if names[1:] else []
        words += [inspect.formatannotation(hints[parameter.name]).replace("pathlib.", "")]
        words += ["required" if parameter.required else f"default {shown(parameter.default)}"]
        yield f"{key} {names[-1]}", ", ".join(words)
    for name, child in getattr(command, "commands", {}).items():
        if not child.hidden:
            yield f"{key} {name}", "group" if hasattr(child, "commands") else "command"
            yield from _commands(f"{key} {name}", child)


# The configuration schema


def _config() -> Iterator[tuple[str, str]]:
    for table in TABLES:
        yield f"config [{table}]", "table"
    for table, cls in (("task", TaskTable), ("run", Run), ("privacy", Privacy), ("audit", AuditTable)):
        yield from _fields(f"config [{table}]", cls)
    yield "config [study]", "table"
    for key in KEYS:
        yield f"config [study] {key}", "key"
    for kind in KINDS:
        for name, cls in registered(kind).items():
            if cls.__module__.split(".")[0] == "hansa":  # not a part of another package, or of a test
                yield f"config {kind} {name}", "part"
                yield from _fields(f"config {kind} {name}", cls)


def _fields(key: str, cls: type[Any]) -> Iterator[tuple[str, str]]:
    for field, hint in field_types(cls).items():
        default = field_default(cls, field)
        text = "required" if default is dataclasses.MISSING else f"default {shown(default)}"
        yield f"{key} {field}", f"{type_name(hint)}, {text}"


# What the changelog must say


def differences(old: Surface, new: Surface) -> dict[str, str]:
    """The entries that were added, removed or changed; not those inside an entry that was itself added or removed."""
    found = {}
    for key in sorted({*old, *new}):
        what = "added" if key not in old else "removed" if key not in new else "changed"
        if old.get(key) != new.get(key) and not (what != "changed" and found.get(_outer(key, found)) == what):
            found[key] = what
    return found


def _outer(key: str, found: dict[str, str]) -> str:
    """The nearest entry around an entry that differs too."""
    while " " in key:
        key = key.rpartition(" ")[0]
        if key in found:
            break
    return key


def words(key: str) -> list[str]:
    """The names in a key that the changelog must have."""
    section, *names = key.split()
    part = section == "config" and not names[0].startswith("[")
    return [name.strip("[]") for name in (names[1:] if part else names)]


def unnamed(old: Surface, new: Surface, changelog: str) -> list[str]:
    """The entries that differ and that no paragraph, list item or table row of the changelog names in code spans."""
    items = re.split(r"\n(?=[-*|#]|\s*\n)", changelog)
    spans = ["\n".join(re.findall(r"`([^`]+)`", " ".join(item.split()))) for item in items]

    def named(key: str) -> bool:
        patterns = [rf"(?<![\w-]){re.escape(word)}(?![\w-])" for word in words(key)]
        return any(all(re.search(pattern, span) for pattern in patterns) for span in spans)

    return [f"{key} ({what})" for key, what in differences(old, new).items() if not named(key)]


def newer_than(version: str, changelog: str) -> str:
    """The sections of the changelog above the one of a version."""
    head, found, _ = changelog.partition(f"\n## {version} (")
    if not found:
        raise SystemExit(f"CHANGELOG.md has no section '## {version} (DATE)'; add it")
    return head


def read(path: Path) -> tuple[str, Surface]:
    """A recorded surface and its version."""
    stored = json.loads(path.read_text())
    return stored["version"], stored["surface"]


def text(version: str, entries: Surface) -> str:
    """A surface as text, one entry per line."""
    return json.dumps({"version": version, "surface": entries}, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    new = surface()
    if "--release" in sys.argv[1:]:
        version, old = read(RELEASED)
        missing = unnamed(old, new, newer_than(version, (ROOT / "CHANGELOG.md").read_text()))
        if missing:
            raise SystemExit(f"CHANGELOG.md must name, above {version}: {'; '.join(missing)}")
        RELEASED.write_text(text(hansa.__version__, new))
    CURRENT.write_text(text(hansa.__version__, new))
    SCHEMA.write_text(json.dumps(file_schema(own=True), indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
