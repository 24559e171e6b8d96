"""The JSON schema of experiment files, made from the registered parts (JSON Schema, draft 7).

Editors complete and check a TOML file with it. The schema knows names, types, limits of numbers and defaults. Settings
that exclude each other are checked when Hansa reads the file. Editors take completions from `properties`
below `allOf`, and not from `then`; so each kind of part has both.
"""

from __future__ import annotations

import dataclasses
import json
import re
import types
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from hansa.core.fields import schema as limits
from hansa.core.fields import stated_types
from hansa.core.plain_data import NONE, field_default, field_types, says_none, to_config
from hansa.core.registry import ENTRIES, WORDS, Part, noun, reads_nameless, registered, summary
from hansa.experiment.audit import AuditTable
from hansa.experiment.config import TaskTable
from hansa.experiment.local_work import OWN
from hansa.experiment.settings import Run
from hansa.local import SGD
from hansa.metrics.names import known_metrics
from hansa.numerics.losses import LOSSES
from hansa.privacy import Privacy

Schema = dict[str, Any]
ALIAS = {"adversary": "kind", "dp": "kind"}  # kinds whose tables may have the part's name under another key
SIMPLE = {float: "number", int: "integer", str: "string", bool: "boolean", dict: "object"}
OWN_PART = {"type": "string", "pattern": r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$",
            "description": 'A part of your own: "my_module:name".'}  # fmt: skip
FUNCTION = {"$ref": "#/definitions/own-part"}


class SchemaBuilder:
    """The definitions of a schema, one for each kind, each part and the fields of all parts of a kind.

    With `own` the schema has the parts of Hansa alone, without those of installed packages and of this process.
    """

    def __init__(self, own: bool = False) -> None:
        self.own = own
        self.definitions: dict[str, Schema] = {"own-part": OWN_PART}

    def parts(self, kind: str) -> dict[str, type[Part]]:
        """The parts of a kind by name."""
        parts = registered(kind).items()
        return {name: cls for name, cls in parts if not self.own or cls.__module__.split(".")[0] == "hansa"}

    def kind(self, kind: str) -> Schema:
        """A part of a kind: its name, or a table with its name and fields; a table without a name may have any."""
        if kind not in self.definitions:
            self.definitions[kind] = {}  # parts of a kind may have fields of the same kind
            self.definitions[kind] = self._kind(kind)
        return reference(kind)

    def _kind(self, kind: str) -> Schema:
        parts, keys = self.parts(kind), name_keys(kind)
        branches = []
        for name, cls in parts.items():
            self.definitions[defined(kind, name)] = self._part(kind, cls)
            required = [f for f in field_types(cls) if field_default(cls, f) is dataclasses.MISSING]
            then = [reference(defined(kind, name)), *([{"required": required}] if required else [])]
            for key in keys:
                chosen = {"type": "object", "required": [key], "properties": {key: {"const": name}}}
                branches.append({"if": chosen, "then": {"allOf": then} if required else then[0]})
        names, head = self.names(kind), f"A {noun(kind)}: its name, or a table with its name and fields."
        either = {"anyOf": [{"type": "string", **names}, {"type": "object"}]}
        # A transform without a name is a table of patterns of layers; other tables without a name change a default.
        free = {"additionalProperties": reference(kind)} if reads_nameless(kind) else None
        unnamed = {"if": without_name(kind), "then": free or {"propertyNames": {"enum": self.keys(kind)}}}
        first = {"description": head, "properties": {key: names for key in keys}}
        return {"allOf": [first, either, self.fields(kind), unnamed, *branches]}

    def names(self, kind: str) -> Schema:
        """The names of a kind's parts, each with the first line of its docstring."""
        parts = self.parts(kind)
        about = [summary(cls)[0] for cls in parts.values()]
        known = {"enum": list(parts), "description": f"The {noun(kind)}.", "x-taplo": {"docs": {"enumValues": about}}}
        return {"anyOf": [known, FUNCTION]}

    def keys(self, kind: str) -> list[str]:
        """The keys that a table of a kind may have, whatever part it names."""
        return sorted({*name_keys(kind), *(field for _, cls in self._owners(kind) for field in field_types(cls))})

    def _owners(self, kind: str, of: type[Part] | None = None) -> list[tuple[str, type[Part]]]:
        """The parts whose fields a table of a kind may have, or the table of one part of the kind.

        The fields of an algorithm's parts may stand in the algorithm's own table.
        """
        owners = list(self.parts(kind).items()) if of is None else [(of.name, of)]
        hints = [hint for _, cls in owners for hint in field_types(cls).values()] if kind == "algorithm" else []
        return owners + [owner for other in sorted({hint.kind for hint in hints if _is_part(hint)})
                         for owner in self.parts(other).items()]  # fmt: skip

    def fields(self, kind: str) -> Schema:
        """The fields of a table of a kind, whatever part it names; their types are those that any of the parts has.

        Their descriptions say what the docstrings of the parts say, and the defaults.
        """
        name = f"{kind}.fields"
        if name not in self.definitions:
            self.definitions[name] = {}
            found: dict[str, list[tuple[str, type[Part]]]] = {}
            for part, cls in self._owners(kind):
                for field in field_types(cls):
                    found.setdefault(field, []).append((part, cls))
            self.definitions[name] = {"properties": {f: self._shared(f, found[f]) for f in sorted(found)}}
        return reference(name)

    def _shared(self, field: str, owners: list[tuple[str, type[Part]]]) -> Schema:
        """A field that several parts of a kind may have."""
        types: list[Schema] = []
        told: dict[str, list[str]] = {}
        for part, cls in owners:
            hint, default = stated_types(cls)[field], field_default(cls, field)
            schema = self.kind(hint.kind) if _is_part(hint) else self.value(hint)
            if schema not in types:
                types.append(schema)
            told.setdefault(sentences(cls, field) + _default(default), []).append(part)
        lines = [text if len(told) == 1 else f"{', '.join(parts)}: {text}" for text, parts in told.items()]
        return {"allOf": [{"description": "\n".join(lines)}, types[0] if len(types) == 1 else {"anyOf": types}]}

    def _part(self, kind: str, cls: type[Part]) -> Schema:
        """The table of one part."""
        fields = {f: self.value(hint, field_default(cls, f)) for f, hint in stated_types(cls).items()}
        for f in dataclasses.fields(cls):  # type: ignore[arg-type]
            if ENTRIES in f.metadata:
                entry = {"anyOf": [{"enum": list(f.metadata[WORDS])}, self.table(f.metadata[ENTRIES])]}
                fields[f.name] = {"type": "object", "additionalProperties": entry}
        own = {key: {"const": cls.name} for key in name_keys(kind)} | fields
        table = {"description": about(cls), "properties": own}
        if kind != "algorithm":
            return {**table, "additionalProperties": False}
        keys = {field for _, owner in self._owners(kind, cls) for field in field_types(owner)}
        return {**table, "propertyNames": {"enum": sorted({*own, *keys})}}

    def field(self, cls: type[Any], name: str) -> Schema:
        """A field of a table, with its default and what the docstring says about it."""
        default = field_default(cls, name)
        schema = self.value(stated_types(cls)[name], default)
        head: Schema = {"description": sentences(cls, name) + _default(default)}
        if default is not None and default is not dataclasses.MISSING:
            head["default"] = plain(default)
        return {"allOf": [head, *schema["allOf"]]} if "allOf" in schema else {**schema, **head}

    def value(self, hint: Any, default: Any = None) -> Schema:
        """The values that a field's type allows. TOML has no null: the word "none" stands for it."""
        origin, options = get_origin(hint), [o for o in get_args(hint) if o is not type(None)]
        if origin in (Union, types.UnionType):
            schemas = [self.value(option, default) for option in options]
            if says_none(get_args(hint)):
                schemas.append({"const": NONE})
            return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        if origin is Annotated:
            return {**self.value(options[0], default), **limits(tuple(options[1:]))}
        if origin is Literal:
            return {"enum": options}
        if origin is tuple:
            return {"type": "array", "items": self.value(options[0])}
        if _is_part(hint):
            return self.nested(hint, default)
        return {"type": SIMPLE[hint]} if hint in SIMPLE else {}

    def nested(self, hint: type[Part], default: Any = None) -> Schema:
        """A part as a field. A table without a name changes the default part; without a default it needs a name."""
        kind, parts = hint.kind, self.parts(hint.kind)
        rules = [self.kind(kind)]
        fits = [name for name, cls in parts.items() if issubclass(cls, hint) or "inner" in field_types(cls)]
        if len(fits) < len(parts):
            right = {"anyOf": [{"enum": fits}, FUNCTION]}
            named = {"properties": dict.fromkeys(name_keys(kind), right)}
            rules.append({"if": {"type": "string"}, "then": right, "else": named})
        if isinstance(default, Part) and default.name in parts:
            rules.append({"if": without_name(kind), "then": reference(defined(kind, default.name))})
        elif not reads_nameless(kind):
            rules.append(with_name(kind))
        return {"allOf": rules}

    def table(self, cls: type[Any], **special: Schema) -> Schema:
        """A table of the file that is one dataclass; `special` replaces the schemas of fields."""
        properties = {}
        for name in field_types(cls):
            schema = self.field(cls, name)
            properties[name] = {**special[name], "description": schema["description"]} if name in special else schema
        return {"type": "object", "description": about(cls), "properties": properties, "additionalProperties": False}

    def privacy(self) -> Schema:
        """The [privacy] table, which has the fields of the secure sum too."""
        tables = [field.name for field in dataclasses.fields(Privacy)]
        own = {"description": about(Privacy), "properties": {name: self.field(Privacy, name) for name in tables}}
        rules: list[Schema] = [own, self.fields("secure")]
        for name, cls in self.parts("secure").items():
            chosen = {"required": ["secure"], "properties": {"secure": {"const": name}}}
            rules.append({"if": chosen, "then": {"propertyNames": {"enum": [*tables, *field_types(cls)]}}})
        every = {"propertyNames": {"enum": sorted({*tables, *self.keys("secure")} - {"name"})}}
        rules.append({"if": {"required": ["secure"]}, "then": every, "else": {"propertyNames": {"enum": tables}}})
        return {"type": "object", "allOf": rules}

    def track(self) -> Schema:
        """The [track] table: trackers by name, `NAME:TARGET`, as tables, or as tables named after them."""
        text = {"type": "string", "pattern": f"^({'|'.join(self.parts('tracker'))})(:.+)?$"}
        one = {"allOf": [self.kind("tracker"), {"type": "object", "required": ["name"]}]}
        named = {name: {"anyOf": [reference(f"tracker.{name}"), {"type": "string"}]} for name in self.parts("tracker")}
        by_name = {"type": "object", "properties": named, "additionalProperties": False}
        several = {"type": "array", "items": {"anyOf": [text, one]}}
        return {"description": "Trackers, which receive the rounds and results of the run.",
                "anyOf": [text, several, by_name, one]}  # fmt: skip

    def tables(self) -> dict[str, Schema]:
        """The tables of an experiment file by name."""
        adversary = {"allOf": [self.kind("adversary"), with_name("adversary")]}
        drift = {"allOf": [self.kind("drift"), with_name("drift")]}
        own = {name: schema for name, schema in self._own().items() if name in OWN}
        parties = {"type": "object", "properties": own, "additionalProperties": False}
        return {
            "task": self.table(
                TaskTable, loss={"anyOf": [{"enum": list(LOSSES)}, FUNCTION]}, dataset=self._or_function("dataset"),
                model=self._or_function("model"),
                models={"type": "object", "additionalProperties": self._or_function("model")}),
            "partition": self.kind("partition"),
            "algorithm": self.kind("algorithm"),
            "adversary": {"description": "Attackers, in a simulation only; several groups as a list.",
                          "anyOf": [adversary, {"type": "array", "items": adversary}]},
            "drift": {"description": "What changes with the rounds, in a simulation only; several drifts as a list.",
                      "anyOf": [drift, {"type": "array", "items": drift}]},
            "privacy": self.privacy(),
            "audit": self.table(AuditTable),
            "run": self._run(parties),
            "track": self.track(),
        }  # fmt: skip

    def _run(self, parties: Schema) -> Schema:
        """The [run] table. Metrics that it lists may have labels, which `metric` may name."""
        table = self.table(Run, metric=self.metric(), own={"type": "object", "additionalProperties": parties},
                           metrics={"type": "array", "items": self._or_function("metric")})  # fmt: skip
        named = {"properties": {"metric": {"enum": self.metric_names()}}}
        return {**table, "if": {"not": {"required": ["metrics"]}}, "then": named}

    def metric(self) -> Schema:
        """The name of a metric in results; a metric may have a label of the user's own."""
        return {"anyOf": [{"enum": self.metric_names()}, {"type": "string"}]}

    def metric_names(self) -> list[str]:
        """The names in results of metrics without labels."""
        parts: list[Any] = [cls for name, cls in self.parts("metric").items() if name != "function"]
        return known_metrics(cls() for cls in parts)

    def _own(self) -> dict[str, Schema]:
        return {name: self.field(SGD, name) for name in field_types(SGD)}

    def _or_function(self, kind: str) -> Schema:
        return {"anyOf": [FUNCTION, {"allOf": [self.kind(kind), with_name(kind)]}]}


def about(cls: type[Any]) -> str:
    """The docstring of a class, one paragraph per line."""
    return "\n".join(text for text in summary(cls) if text)


def sentences(cls: type[Any], field: str) -> str:
    """What the docstring of a class, or of its bases, says about a field; else its first line."""
    for base in cls.__mro__[:-1]:
        text = " ".join((base.__doc__ or "").split())
        parts = re.split(r"(?<=[.;])\s+(?=[A-Z`])", text)
        if told := [part for part in parts if re.search(rf"`{field}\b", part)]:
            return " ".join(told)
    return f"Field of: {summary(cls)[0]}"


def plain(default: Any) -> Any:
    """A default as plain data; a part by its name, unless its fields differ from its own defaults."""
    if isinstance(default, Part):
        same = all(getattr(default, f) == field_default(type(default), f) for f in field_types(type(default)))
        return default.name if same else to_config(default)
    return [plain(value) for value in default] if isinstance(default, tuple) else default


def _default(default: Any) -> str:
    """The default of a field, as a sentence."""
    if default is dataclasses.MISSING:
        return " Required."
    return "" if default is None else f" Default: {json.dumps(plain(default))}."


def name_keys(kind: str) -> Iterable[str]:
    """The keys of a table that may have the part's name."""
    return ("name", ALIAS[kind]) if kind in ALIAS else ("name",)


def without_name(kind: str) -> Schema:
    """A table that names no part."""
    return {"type": "object", "not": {"anyOf": [{"required": [key]} for key in name_keys(kind)]}}


def with_name(kind: str) -> Schema:
    """The rule that a table must name its part."""
    named = [{"required": [key]} for key in name_keys(kind)]
    return {"if": {"type": "object"}, "then": named[0] if len(named) == 1 else {"anyOf": named}}


def _is_part(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Part)


def defined(kind: str, name: str) -> str:
    """The name of a part's definition. Some readers of schemas ignore a plus sign: fedavg+ would be fedavg."""
    return f"{kind}.{name.replace('+', '-plus')}"


def reference(name: str) -> Schema:
    return {"$ref": f"#/definitions/{name}"}
