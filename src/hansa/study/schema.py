"""The JSON schema of experiment files with or without a [study] table."""

from __future__ import annotations

from hansa.experiment.baselines import BASELINES
from hansa.experiment.schema import FUNCTION, Schema, SchemaBuilder, name_keys, with_name
from hansa.study.spec import KEYS

COUNT = {"type": "integer", "minimum": 1}
FIELDS = {"type": "object", "description": "Dotted names of fields, and the list of values of each."}


def file_schema(own: bool = False) -> Schema:
    """The schema of an experiment file, as plain data. With `own` it has the parts of Hansa alone."""
    builder = SchemaBuilder(own)
    tables = {**builder.tables(), "study": study_table(builder)}
    named = {kind: with_name(kind) for kind in ("algorithm", "partition")}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Hansa experiment",
        "type": "object",
        "properties": tables,
        "additionalProperties": False,
        "if": {"required": ["study"]},  # a study has a default task, and tables that all its runs share
        "else": {"required": ["task"], "properties": named},
        "definitions": dict(sorted(builder.definitions.items())),
    }


def study_table(builder: SchemaBuilder) -> Schema:
    """The [study] table."""
    seeds = {"anyOf": [COUNT, {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}]}
    attackers = _entry(builder, "adversary")
    attackers = {"anyOf": [*attackers["anyOf"], {"enum": ["", "none"]}, {"type": "array", "items": attackers}]}
    known: dict[str, Schema] = {
        "name": {"type": "string", "description": "Name of the study. Default: the name of the file."},
        "algorithms": _axis("Algorithms to compare.", _entry(builder, "algorithm")),
        "baselines": _axis(
            "Baselines of the algorithms: each party alone, and all samples in one place.", {"enum": list(BASELINES)}
        ),
        "partitions": _axis("Partitions to compare them on.", _entry(builder, "partition")),
        "adversaries": _axis('Attackers to compare them under; "none" for no attack.', attackers),
        "grid": {**FIELDS, "description": "Fields to vary: every combination of their values is run."},
        "seeds": {**seeds, "description": "Number of seeds, or the seeds themselves.", "default": 1},
        "target": {"type": "number", "description": "Metric value for the rounds-to-target column."},
        "metric": {**builder.metric(), "description": "Metric of the comparison. Default: accuracy or loss."},
        "tune": {**FIELDS, "description": "Fields to tune first, and the values to try."},
        "tune_seeds": {**COUNT, "description": "Number of seeds for tuning.", "default": 1},
        "jobs": {**COUNT, "description": "Number of runs in parallel. Default: one per core."},
        "ray": {"type": "string", "description": "Ray cluster for the runs: auto, local or HOST:PORT."},
    }
    return {
        "type": "object",
        "description": "A study: many runs compared (`hansa compare`).",
        "properties": {key: known[key] for key in KEYS},
        "additionalProperties": False,
    }


def _axis(description: str, entry: Schema) -> Schema:
    return {"type": "array", "items": entry, "minItems": 1, "description": description}


def _entry(builder: SchemaBuilder, kind: str) -> Schema:
    """One choice of an axis: a name (with a number after a colon), or a table with a name, a label and fields."""
    names = builder.names(kind)
    text: Schema = {"type": "string", **names}
    if kind != "algorithm":
        text = {"anyOf": [{"type": "string", "pattern": f"^({'|'.join(builder.parts(kind))})(:[^:]+)?$"}, FUNCTION]}
    more = {"label": {"type": "string", "description": "Label in tables and plots."}}
    if kind == "algorithm":
        more["tune"] = {**FIELDS, "description": "Fields to tune for this algorithm alone, and the values to try."}
    keys = {"anyOf": [{"enum": [*more, *builder.keys(kind)]}, {"pattern": "\\."}]}
    named = {"properties": dict.fromkeys(name_keys(kind), FUNCTION), "required": ["name"]}
    own = {"properties": more | {key: names for key in name_keys(kind)}, "if": named, "else": {"propertyNames": keys}}
    return {"anyOf": [text, {"type": "object", "allOf": [own, builder.fields(kind), with_name(kind)]}]}
