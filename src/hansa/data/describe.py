"""Describe the parties' data to the aggregator before a job: shapes, types, classes, column names."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from hansa.core.entries import Text, stated
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.registry import register
from hansa.data.party_files import Header, differing
from hansa.data.statement import CLASSES, NUMBERS, DataStatement
from hansa.data.statement import KINDS as COLUMN_KINDS
from hansa.holdings.labels import Labels, misnumbered
from hansa.numerics.losses import named_loss
from hansa.plumbing.errors import ConfigError, DataError, NotAdmitted
from hansa.plumbing.functions import is_function

T = TypeVar("T")
DIMENSIONS = 8  # of a sample, at most
NAMES = 2**12  # bytes of column names, at most; of longer lists only a hash is sent
HASHED = "sha256 "  # prefix of such a hash
FEW, TIMES = 1024, 64  # a party may have FEW classes; more, only up to TIMES times the median of all parties
NO_LABELS = Labels(0, 0, 0)
KINDS = ("none", "real", "class")  # kinds of targets; none for a party without samples or labels
COLUMNS = {"data": "columns"}  # the payload for parties with different columns


def over_columns(payload: Payload) -> bool:
    """Whether a party is to describe columns that it alone holds."""
    return payload.get("data") == "columns"


@register("describe")
@dataclass(frozen=True)
class Describe(Op):
    """Describe the shape of a party's samples and the kind of its targets.

    The reply has what the party states (`DataStatement`): no sample is read. It has the number of classes (0 for other
    targets), the lowest class and the number of classes that occur; whether the party has its own test samples,
    missing values and whole numbers as features; and the names and kinds of its file's columns. Neither samples nor
    their number are sent. If the loss is known, it decides the kind of the targets. A party declines if its targets do
    not fit the loss. With the payload `COLUMNS` a party declines without ids; it may have no labels, and does not send
    its column names.
    """

    loss: str | None = None
    entries = stated(data=Text(among=("columns",), optional=True))

    def __post_init__(self) -> None:
        if self.loss is not None:
            named_loss(self.loss)

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        stated, rows = party.data.stated, not over_columns(payload)
        if not isinstance(stated, DataStatement):
            raise NotAdmitted("it states nothing about its samples")
        if not rows and not stated.ids:
            raise NotAdmitted(
                "its rows have no ids, and this job matches parties with different columns by them; name the ids "
                "(hansa join --ids)"
            )
        if rows and stated.targets == "none":
            raise NotAdmitted("it has no labels, and this job trains on parties with the same columns and labels")
        if len(stated.shape) > DIMENSIONS:
            raise NotAdmitted(
                f"its samples have {len(stated.shape)} dimensions, and at most {DIMENSIONS} are supported"
            )
        kind, classes, labels = self._targets(stated)
        party.data.admit("describe")
        return Description(
            stated.shape, classes, kind, stated.tests, stated.missing, labels, stated.features == "whole",
            stated.header if rows else (), stated.kinds if rows else (),
        ).reply(), memory  # fmt: skip

    def _targets(self, stated: DataStatement) -> tuple[str, int, Labels]:
        """The kind of the targets, the number of classes, and the class numbers."""
        if stated.targets in ("none", "empty"):
            return "none", 0, NO_LABELS
        own = self.loss is None or is_function(self.loss)  # the targets decide
        if own and stated.targets == "numbers":
            return "real", 0, NO_LABELS
        loss = "cross_entropy" if own else str(self.loss)
        why = stated.refuses_loss(loss)
        if why is not None:
            raise NotAdmitted(why)
        if loss != "cross_entropy" or stated.classes is None:
            return "real", 0, NO_LABELS
        return "class", stated.classes, Labels(stated.lowest_class, stated.classes - 1, stated.distinct)

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"about": ((DIMENSIONS + 8,), torch.int64), "names": ((NAMES,), torch.uint8)}


@dataclass(frozen=True)
class Description:
    """One party's description of its data."""

    shape: tuple[int, ...]
    classes: int
    kind: str
    tests: bool
    missing: bool
    labels: Labels = NO_LABELS
    whole: bool = False  # whether features are whole numbers
    header: Header = ()
    kinds: tuple[str, ...] = ()  # of the feature columns, if they have names

    def reply(self) -> Reply:
        """Encode the description as a reply."""
        shape = [*self.shape, *[0] * (DIMENSIONS - len(self.shape))]
        about = [len(self.shape), *shape, self.classes, KINDS.index(self.kind), self.tests, self.missing,
                 self.labels.lowest, self.labels.distinct, self.whole]  # fmt: skip
        text = "\n".join(_short(self.header)).encode()
        kinds = bytes(1 + COLUMN_KINDS.index(kind) for kind in self.kinds)
        if set(self.kinds) - {"number"} and len(self.header) > 1 and len(text) + len(kinds) + 1 <= NAMES:
            text += b"\0" + kinds  # without them all columns are numbers
        names = torch.zeros(NAMES, dtype=torch.uint8)
        names[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        return Reply({"about": torch.tensor(about, dtype=torch.int64), "names": names})

    @classmethod
    def of(cls, reply: Reply) -> Description:
        """Decode a reply; raise DataError if the description is invalid."""
        dims, *rest = (int(value) for value in reply.tensors["about"])
        classes, kind, tests, missing, lowest, distinct, whole = rest[DIMENSIONS:]
        shape = tuple(rest[: max(dims, 0)])
        if not 0 <= dims <= DIMENSIONS or min(shape, default=1) < 1 or not 0 <= kind < len(KINDS):
            raise DataError("its description of its data is invalid")
        if math.prod(shape) > NUMBERS:
            raise DataError(f"it describes samples of {math.prod(shape)} numbers, and at most {NUMBERS} are supported")
        if classes < 0 or (classes > 0) != (KINDS[kind] == "class"):
            raise DataError("its description of its targets is invalid")
        if classes > CLASSES:
            raise DataError(f"its targets name more than {CLASSES} classes; for numbers, set task.loss = 'mse'")
        if KINDS[kind] == "class" and not (0 <= lowest < classes and 0 <= distinct <= classes - lowest):
            raise DataError("its description of its targets is invalid")
        labels = Labels(lowest, classes - 1, distinct) if KINDS[kind] == "class" else NO_LABELS
        text, _, columns = bytes(reply.tensors["names"].tolist()).rstrip(b"\0").partition(b"\0")
        header = _header(text, shape)
        if columns and (len(columns) != len(header) - 1 or not all(1 <= k <= len(COLUMN_KINDS) for k in columns)):
            raise DataError("its description of its columns is invalid")
        kinds = tuple(COLUMN_KINDS[k - 1] for k in columns) or ("number",) * (len(header) - 1)
        return cls(shape, classes, KINDS[kind], bool(tests), bool(missing), labels, bool(whole), header, kinds)


def _short(header: Header) -> Header:
    """The column names as they are sent: a hash if they are long."""
    text = "\n".join(header).encode()
    return header if len(text) <= NAMES else (HASHED + hashlib.sha256(text).hexdigest(),)


def _header(text: bytes, shape: tuple[int, ...]) -> Header:
    """Decode the column names that a party sent; raise DataError if they do not fit its samples."""
    try:
        names = tuple(text.decode().split("\n"))
    except UnicodeDecodeError:
        raise DataError("its column names are not UTF-8") from None
    if names == ("",) or (len(names) == 1 and names[0].startswith(HASHED)):
        return names if names[0] else ()
    if len(shape) != 1 or len(names) != shape[0] + 1 or len(set(names)) != len(names):
        raise DataError(f"it names {len(names) - 1} columns of features, and its samples are {shape}")
    return names


def agreed(descriptions: Mapping[str, Description], classes: int | None = None, prepared: bool = False,
           own: Header = (), table: bool = False) -> tuple[Description, dict[str, str]]:  # fmt: skip
    """Return the description that most parties agree on, and the reason why each other party is left out.

    `classes` is the number of classes, if it is known; otherwise a single party cannot raise it far above the median.
    Parties with missing values are left out if they are a minority and the job does not fill in values (`prepared`).
    `own` are the column names of the aggregator's own samples. A `table` needs named columns; without it all columns
    must be numbers. Parties without samples fit every job. Raise ConfigError if no description has a majority.
    """
    out: dict[str, str] = {}
    left = {name: one for name, one in descriptions.items() if one.kind != "none"}
    if not left:
        raise ConfigError("none of the parties has a sample")

    def leave(reasons: dict[str, str]) -> None:
        out.update(reasons)
        for name in reasons:
            del left[name]

    for name, one in list(left.items()):
        odd = next((k for k, column in enumerate(one.kinds) if column in ("text", "date")), None)
        if odd is not None and not table:
            leave(
                {name: f"its column {one.header[1 + odd][:40]!r} holds {one.kinds[odd]}s; set task.prepare = 'table'"}
            )
        elif table and not one.kinds:
            leave({name: f"its samples have no named columns (with at most {NAMES} bytes of names), and this job "
                         "prepares a table"})  # fmt: skip
    if not left:
        raise ConfigError(f"the data of no party fit: {out}")
    shape = _most({name: one.shape for name, one in left.items()}, "samples differ in shape")
    leave({
        name: f"its samples are {one.shape}, those of most parties {shape}"
        for name, one in left.items() if one.shape != shape
    })  # fmt: skip
    kind = _most({name: one.kind for name, one in left.items()}, "targets are of different kinds")
    words = {"class": "class numbers", "real": "real numbers"}
    leave({
        name: f"its targets are {words[one.kind]}, those of most parties {words[kind]}; task.loss would decide"
        for name, one in left.items() if one.kind != kind
    })  # fmt: skip
    types, whole = {True: "whole numbers", False: "real numbers"}, False
    if not prepared:  # preparation converts features to real numbers
        kinds_of_features = {name: types[one.whole] for name, one in left.items()}
        whole = _most(kinds_of_features, "features are of different types") == types[True]
    leave({
        name: f"its features are {types[one.whole]}, those of most parties {types[whole]}; give them as "
        f"{types[whole]}"
        for name, one in left.items() if one.whole != whole and not prepared
    })  # fmt: skip
    named = {name: one.header for name, one in left.items() if one.header}
    header, unlike = _columns(named, len(left), own)
    leave(unlike)
    limit = classes or max(FEW, TIMES * statistics.median_low(one.classes for one in left.values()))
    leave({
        name: f"its targets name {one.classes} classes, and at most {limit} are possible"
        + ("" if classes else ", according to the other parties' targets")
        for name, one in left.items() if one.classes > limit
    })  # fmt: skip
    if classes is None and kind == "class":
        reason, misnumbering = misnumbered({name: one.labels for name, one in left.items() if one.labels.distinct})
        if reason is not None:
            raise ConfigError(f"the parties' {reason}")
        leave({name: f"its {why}" for name, why in misnumbering.items()})
    incomplete = [name for name, one in left.items() if one.missing]
    if not prepared and 2 * len(incomplete) < len(left):
        leave(dict.fromkeys(incomplete, "its features have missing values; set task.prepare = 'standardise'"))
    if not left:
        raise ConfigError(f"the data of no party fit: {out}")
    return Description(
        shape,
        max(one.classes for one in left.values()),
        kind,
        any(one.tests for name, one in descriptions.items() if name not in out),
        any(one.missing for one in left.values()),
        whole=whole,
        header=header,
    ), out


def agreed_columns(descriptions: Mapping[str, Description],
                   classes: int | None = None) -> tuple[Description, dict[str, str]]:  # fmt: skip
    """As `agreed`, for parties with different columns: their shapes may differ, and one of them needs labels.

    The description that is returned has no shape. `classes` is the number of classes, if it is known.
    """
    holders = {name: one for name, one in descriptions.items() if one.kind != "none"}
    if not holders:
        raise ConfigError("none of the parties has labels; the party that has them names their column (--target)")
    targets = {name: replace(one, shape=(), whole=False, header=()) for name, one in holders.items()}
    common, out = agreed(targets, classes, prepared=True)
    left = [one for name, one in descriptions.items() if name not in out]
    return replace(common, tests=any(one.tests for one in left), missing=any(one.missing for one in left)), out


def _columns(named: Mapping[str, Header], parties: int, own: Header) -> tuple[Header, dict[str, str]]:
    """Return the common column names, and the reason why parties with other names do not fit.

    The names of the aggregator's own file decide; without them, the majority of the parties that have names. `parties`
    is the number of all parties: a few parties with names can neither end a job nor reorder the columns of the others.
    """
    if own:
        unlike = {name: why for name, head in named.items() if (why := differing(head, _short(own))) is not None}
        if unlike and 2 * len(unlike) >= parties:
            name, why = next(iter(unlike.items()))
            raise ConfigError(f"the aggregator's own samples have other columns than the parties': at {name!r} {why}")
        return own if _short(own) == own else (), unlike
    if not named:
        return (), {}
    kinds = {name: (head[0], frozenset(head[1:])) for name, head in named.items()}
    first, *rest = Counter(kinds.values()).most_common(2)
    usual = Counter(named[name] for name, columns in kinds.items() if columns == first[0]).most_common(1)[0][0]
    unlike = {name: differing(named[name], usual) or "" for name, columns in kinds.items() if columns != first[0]}
    if rest and rest[0][1] == first[1]:
        if 2 * len(named) >= parties:
            name, why = next(iter(unlike.items()))
            raise ConfigError(f"the parties' columns differ, and no side has the majority: at {name!r} {why}")
        return (), dict.fromkeys(named, "its columns differ from those of as many other parties that name theirs")
    return usual if len(usual) > 1 else (), unlike


def _most(values: Mapping[str, T], difference: str) -> T:
    """The value of most parties; raise ConfigError if two values are equally frequent."""
    counts = Counter(values.values()).most_common(2)
    if len(counts) > 1 and counts[0][1] == counts[1][1]:
        raise ConfigError(f"the parties' {difference}, and no side has the majority: {dict(values)}")
    return counts[0][0]
