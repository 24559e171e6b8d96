"""Parties' descriptions of their data and of the model: a wrong description excludes its party and does not stop the
job."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from league import PARTIES, Asked, League, draft, samples

import hansa
from hansa.core.op import Reply
from hansa.core.plain_data import build
from hansa.data.describe import CLASSES, DIMENSIONS, KINDS, Description, agreed
from hansa.experiment.tasks import make_model
from hansa.holdings.labels import Labels
from hansa.net.party.samples import PartySamples, preparer
from hansa.net.party.worker import Worker
from hansa.net.transport.wire import Work
from hansa.plumbing import codec
from hansa.plumbing.errors import ConfigError, DataError

pytestmark = pytest.mark.usefixtures("quick")
TASK = {"dataset": "heart", "model": "logistic", "dtype": "float64"}
AT_CLASSES, AT_KIND, AT_MISSING, AT_LOWEST, AT_DISTINCT, AT_WHOLE = (DIMENSIONS + k for k in (1, 2, 4, 5, 6, 7))


def tree(task: dict[str, Any] | None = None, **run: Any) -> dict[str, Any]:
    return {"task": {**TASK, **(task or {})}, "run": {"rounds": 2, **run}}


def join(league: League, change: Callable[[str, PartySamples], PartySamples] = lambda name, given: given) -> None:
    for number, name in enumerate(PARTIES):
        league.join(name, change(name, samples(number)))


@pytest.fixture
def lying(league: League, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[Reply], Reply]], None]:
    """Changes cid's replies of a phase before they are sent."""
    plain = Worker.answer

    def lie(phase: str, change: Callable[[Reply], Reply]) -> None:
        def answer(self: Any, work: Work, *rest: Any) -> tuple[Reply | str, bool]:
            reply, staged = plain(self, work, *rest)
            if work.party == league.number("cid") and work.phase == phase and isinstance(reply, Reply):
                reply = change(reply)
            return reply, staged

        monkeypatch.setattr(Worker, "answer", answer)

    return lie


def said(**at: int) -> Callable[[Reply], Reply]:
    def change(reply: Reply) -> Reply:
        about = reply.tensors["about"].clone()
        for place, value in at.items():
            about[int(place.removeprefix("at_"))] = value
        return Reply({"about": about, "names": reply.tensors["names"]})

    return change


def called(text: bytes) -> Callable[[Reply], Reply]:
    """A description whose columns have these names."""

    def change(reply: Reply) -> Reply:
        names = torch.zeros_like(reply.tensors["names"])
        names[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        return Reply({**reply.tensors, "names": names})

    return change


def simulated(parties: list[Any], task: dict[str, Any] | None = None) -> Any:
    loss = (task or {}).get("loss", "cross_entropy")
    outputs = 2 if loss == "cross_entropy" else 1
    given = hansa.Task(make_model("logistic", "float64", ".", (3,), outputs), loss, parties, names=list(PARTIES),
                       classes=2 if outputs == 2 else None)  # fmt: skip
    return hansa.simulate(build("algorithm", "fedavg"), given, engine="reference", rounds=2).saved_model()


def without_cid(league: League, why: str, **given: Any) -> None:
    """The job continues with the others, and reports why cid does not take part."""
    ended = league.ended(league.submit(tree(**given)))
    assert ended["status"] == "finished", ended["reason"]
    assert [line["members"] for line in ended["rounds"]] == [["ann", "bob"]] * 2
    assert [line["asked"] for line in ended["rounds"]] == [2, 2], "who was rejected is not asked again"
    (entry,) = league.events("not taking part")
    assert entry["party"] == "cid" and why in json.loads(entry["detail"])["why"]


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    ("at", "why"),
    [
        ({"at_1": -1}, "description of its data is invalid"),
        ({"at_0": 9}, "description of its data is invalid"),
        ({"at_0": -1}, "description of its data is invalid"),
        ({"at_0": 2, "at_1": 2**62, "at_2": 0}, "description of its data is invalid"),
        ({"at_0": 2, "at_1": 2**20, "at_2": 2**12}, "samples of 4294967296 numbers"),
        ({"at_1": 4}, "its samples are (4,), those of most parties (3,)"),
        ({f"at_{AT_CLASSES}": -2}, "description of its targets is invalid"),
        ({f"at_{AT_CLASSES}": 0}, "description of its targets is invalid"),
        ({f"at_{AT_CLASSES}": 2**52}, f"more than {CLASSES} classes"),
        ({f"at_{AT_CLASSES}": CLASSES}, "at most 1024 are possible, according to the other parties"),
        ({f"at_{AT_KIND}": 3}, "description of its data is invalid"),
        ({f"at_{AT_KIND}": KINDS.index("real"), f"at_{AT_CLASSES}": 0}, "its targets are real numbers"),
        ({f"at_{AT_MISSING}": 1}, "its features have missing values"),
        ({f"at_{AT_LOWEST}": -1}, "description of its targets is invalid"),
        ({f"at_{AT_DISTINCT}": 3}, "description of its targets is invalid"),
        ({f"at_{AT_CLASSES}": 1000}, "its class numbers reach 999, but at most 6 different ones occur"),
        ({f"at_{AT_CLASSES}": 3, f"at_{AT_LOWEST}": 1}, "its class numbers go from 1 to 2, those of other parties"),
        ({f"at_{AT_WHOLE}": 1}, "whole numbers, those of most parties real numbers; give them as real numbers"),
    ],
)
def test_a_bad_description_is_its_partys_own_rejection(
    league: League, lying: Callable[..., None], at: dict[str, int], why: str
) -> None:
    lying("describe", said(**at))
    join(league)
    without_cid(league, why)


def test_shapes_of_which_none_has_the_majority_fail_the_job_and_name_the_parties(league: League) -> None:
    for number, name in enumerate(PARTIES):
        league.join(name, samples(number, features=3 + number))
    ended = league.ended(league.submit(tree()))
    assert ended["status"] == "failed"
    assert "differ in shape" in ended["reason"] and "'ann': (3,), 'bob': (4,), 'cid': (5,)" in ended["reason"]


def test_missing_values_at_most_parties_are_the_jobs_own_matter(league: League) -> None:
    def change(name: str, given: PartySamples) -> PartySamples:
        if name != "ann":
            given[0][0][0, 0] = torch.nan
        return given

    join(league, change)
    ended = league.ended(league.submit(tree()))
    assert ended["status"] == "failed" and "set task.prepare = 'standardise'" in ended["reason"]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_a_party_without_samples_is_as_in_a_simulation(league: League, dtype: torch.dtype) -> None:
    data = [samples(k)[0] for k in range(3)]
    data[0] = (data[0][0][:0], data[0][1][:0].to(dtype))
    for name, pair in zip(PARTIES, data, strict=True):
        league.join(name, (pair, None))
    job = league.submit(tree())
    ended = league.ended(job)
    assert ended["status"] == "finished", ended["reason"]
    assert [line["members"] for line in ended["rounds"]] == [["bob", "cid"]] * 2
    assert codec.encode(league.model(job)) == codec.encode(simulated(data))


def test_a_job_of_parties_without_any_sample_fails_with_the_reason(league: League) -> None:
    join(league, lambda name, given: ((given[0][0][:0], given[0][1][:0]), None))
    ended = league.ended(league.submit(tree()))
    assert ended["status"] == "failed" and ended["reason"] == "none of the parties has a sample"


@pytest.mark.thin(2)
@pytest.mark.parametrize("loss", ["mse", "mae", "bce", "cross_entropy"])
def test_the_loss_decides_what_targets_of_different_types_are(league: League, loss: str) -> None:
    data = [samples(k)[0] for k in range(3)]
    data[:2] = [(x, y.double()) for x, y in data[:2]]
    for name, pair in zip(PARTIES, data, strict=True):
        league.join(name, (pair, None))
    job = league.submit(tree({"loss": loss}))
    ended = league.ended(job)
    assert ended["status"] == "finished", ended["reason"]
    assert [line["members"] for line in ended["rounds"]] == [list(PARTIES)] * 2
    assert codec.encode(league.model(job)) == codec.encode(simulated(data, {"loss": loss}))


def test_large_whole_numbers_are_no_classes_where_the_loss_says_so(league: League) -> None:
    join(league, lambda name, given: ((given[0][0], given[0][1] * 2**40), None))
    ended = league.ended(league.submit(tree({"loss": "mae"})))
    assert ended["status"] == "finished", ended["reason"]
    assert [line["members"] for line in ended["rounds"]] == [list(PARTIES)] * 2


def test_a_party_whose_targets_are_no_classes_refuses_a_job_about_classes(league: League) -> None:
    join(league, lambda name, given: ((given[0][0], given[0][1] + 0.5), None) if name == "cid" else given)
    without_cid(league, "its targets are not whole class numbers", task={"loss": "cross_entropy"})


def test_class_numbers_below_zero_are_said_by_the_party(league: League) -> None:
    join(league, lambda name, given: ((given[0][0], given[0][1] - 1), None) if name == "cid" else given)
    without_cid(league, "its targets are not whole class numbers from 0, which cross_entropy needs")


def test_types_of_which_none_has_the_majority_are_named() -> None:
    parties = {name: Description((3,), 2, "class", False, False, Labels(0, 1, 2), whole) for name, whole in
               (("ann", True), ("bob", False))}  # fmt: skip
    with pytest.raises(hansa.ConfigError, match="'ann': 'whole numbers', 'bob': 'real numbers'"):
        agreed(parties)


SENTENCE = "the model takes no whole numbers as features; give them as floating-point numbers"


def test_whole_features_of_a_model_that_takes_none_fail_with_the_simulations_sentence(league: League) -> None:
    def whole(name: str, given: PartySamples) -> PartySamples:
        return (given[0][0].round().long(), given[0][1]), None

    join(league, whole)
    ended = league.ended(league.submit(tree()))
    assert ended["status"] == "failed" and ended["model"] is None
    assert "no round was fused" in ended["reason"] and f"ann, bob, cid: data: {SENTENCE}" in ended["reason"]
    with pytest.raises(hansa.DataError, match=SENTENCE):
        simulated([whole("", samples(k))[0] for k in range(3)])


def test_whole_features_may_be_prepared(league: League) -> None:
    join(league, lambda name, given: ((given[0][0].round().long(), given[0][1]), None))
    ended = league.ended(league.submit(tree({"prepare": "standardise"})))
    assert ended["status"] == "finished", ended["reason"]
    assert [line["members"] for line in ended["rounds"]] == [list(PARTIES)] * 2


def test_a_round_without_replies_does_not_fail_a_job_that_fused_another(
    league: League, lying: Callable[..., None]
) -> None:
    seen: list[int] = []

    def change(reply: Reply) -> Reply:
        seen.append(1)
        return reply if len(seen) == 1 else Reply(reply.tensors, weight=-1, metrics=reply.metrics)

    lying("round", change)
    join(league)
    ended = league.ended(league.submit(tree(quorum=3)))
    assert ended["status"] == "finished" and ["empty" in line for line in ended["rounds"]] == [False, True]


@pytest.mark.thin(1)
@pytest.mark.parametrize("name", ["round", "replies", "empty", "missing", "seconds", "model", "members", "parties"])
def test_metrics_that_were_not_asked_for_do_not_enter_the_record(
    league: League, lying: Callable[..., None], name: str
) -> None:
    lying("evaluate", lambda reply: Reply({}, reply.weight, metrics={**reply.metrics, name: 77.0}))
    join(league)
    ended = league.ended(league.submit(tree({"party_test": 0.25})))
    assert ended["status"] == "finished", ended["reason"]
    assert [line["round"] for line in ended["rounds"]] == [1, 2]
    for line in ended["rounds"]:
        assert line["replies"] == 3 and sorted(line["parties"]) == ["ann", "bob"] and "empty" not in line
        assert line["seconds"] < 60 and f"party_{name}_mean" not in line


def test_a_rounds_own_record_goes_before_what_parties_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even for an op that allows every metric name."""
    from hansa.core import predictor

    monkeypatch.setattr(predictor.Evaluate, "measures", None)
    monkeypatch.setattr(predictor, "evaluate", lambda *given: {"loss": 1.0, "replies": 77.0, "round": 77.0})
    data = [samples(k)[0] for k in range(3)]
    task = hansa.Task(make_model("logistic", "float64", ".", (3,), 2), "cross_entropy", data, party_tests=data)
    (line,) = hansa.simulate(build("algorithm", "fedavg"), task, engine="reference", rounds=1).history
    assert line["round"] == 1 and line["replies"] == 3 and line["loss"] == 1.0


@pytest.mark.thin(1)
@pytest.mark.parametrize(("name", "value"), [("loss", 1e300), ("loss", -1.0), ("accuracy", 1.1), ("auc", -0.1)])
def test_metrics_that_nobody_can_measure_are_left_out(
    league: League, lying: Callable[..., None], name: str, value: float
) -> None:
    lying("evaluate", lambda reply: Reply({}, reply.weight, metrics={**reply.metrics, name: value}))
    join(league)
    ended = league.ended(league.submit(tree({"party_test": 0.25})))
    assert ended["status"] == "finished", ended["reason"]
    for line in ended["rounds"]:
        assert sorted(line["parties"]) == ["ann", "bob"] and 0 <= line["party_loss_variance"] < 10


@pytest.mark.parametrize("group", ["tensors", "maxima", "metrics"])
def test_a_name_that_is_not_unicode_is_a_malformed_reply(league: League, group: str) -> None:
    for number, name in enumerate(PARTIES[:2]):
        league.join(name, samples(number))
    cid = league.enrolled("cid")
    job = league.submit(tree())
    work = cid.work()
    assert work is not None
    ask = Asked(work.job, work.round, work.phase, work.number)
    plain: dict[str, Any] = {"tensors": {}, "maxima": {}, "metrics": {}, "weight": {"$tensor": "weight"}}
    plain[group]["\ud800"] = {"$tensor": f"{group}/\ud800"}
    header = {
        "__metadata__": {"tree": json.dumps(plain)},
        "weight": {"dtype": "I64", "shape": [], "data_offsets": [0, 8]},
        f"{group}/\ud800": {"dtype": "F64", "shape": [], "data_offsets": [8, 16]},
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    blob = cid.upload(ask, struct.pack("<Q", len(text)) + text + struct.pack("<qd", 1, 0.0))
    assert cid.reply(ask, draft(blob)).status == 200
    ended = league.ended(job)
    assert ended["status"] == "finished", ended["reason"]
    assert [line["members"] for line in ended["rounds"]] == [["ann", "bob"]] * 2
    (entry,) = league.events("not taking part")
    assert entry["party"] == "cid" and "not valid Unicode" in entry["detail"]


HEADER = ("sick", "age", "chol", "pulse")


def headed(league: League, **headers: tuple[str, ...]) -> dict[str, PartySamples]:
    """All parties join, each with names of its columns; its features are in the order of these names."""
    given = {}
    for number, name in enumerate(PARTIES):
        x, y = samples(number)[0]
        header = headers.get(name, HEADER)
        order = [HEADER.index(column) - 1 if column in HEADER else k for k, column in enumerate(header[1:])]
        given[name] = PartySamples((x, y))
        league.join(name, PartySamples((x[:, order], y), None, header))
    return given


def test_columns_in_another_order_are_those_of_the_other_parties(league: League) -> None:
    given = headed(league, cid=("sick", "pulse", "age", "chol"))
    job = league.submit(tree())
    ended = league.ended(job)
    assert ended["status"] == "finished", ended["reason"]
    assert codec.encode(league.model(job)) == codec.encode(simulated([one.train for one in given.values()]))


def test_columns_of_other_names_are_the_partys_own_rejection(league: League) -> None:
    headed(league, cid=("sick", "age", "Chol", "pulse"))
    without_cid(league, "its columns lack 'chol' and have besides 'Chol'")


def test_another_target_is_the_partys_own_rejection(league: League) -> None:
    headed(league, cid=("age", "sick", "chol", "pulse"))
    without_cid(league, "its target is the column 'age', not 'sick'")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"sick\nage", "it names 1 columns of features, and its samples are (3,)"),
        (b"sick\nage\nage\nchol", "it names 3 columns of features"),
        (b"\xff\xfe", "its column names are not UTF-8"),
        (b"sha256 " + b"0" * 64, "the names of its columns, or their order, are not those of most parties"),
        (b"\x1b[2J\nage\nchol\npulse", r"its target is the column '\x1b[2J', not 'sick'"),
    ],
)
def test_a_liar_about_names_is_left_out(league: League, lying: Callable[..., None], text: bytes, why: str) -> None:
    lying("describe", called(text))
    headed(league)
    without_cid(league, why)


def test_long_headers_are_compared_by_a_hash() -> None:
    long = ("y", *(f"column {k} {'x' * 60}" for k in range(100)))
    one = Description((100,), 2, "class", False, False, Labels(0, 1, 2), False, long)
    other = replace(one, header=("y", *reversed(long[1:])))
    assert {len(description.reply().tensors["names"]) for description in (one, other)} == {4096}
    said = {
        name: Description.of(description.reply()) for name, description in zip("abc", (one, one, other), strict=True)
    }
    about, out = agreed(said)
    assert list(out) == ["c"] and "or their order" in out["c"] and about.header == ()


def with_columns(**headers: str) -> dict[str, Description]:
    """Descriptions with these column names, the target's first; no names for an empty text."""
    one = Description((3,), 2, "class", False, False, Labels(0, 1, 2), False)
    return {name: replace(one, header=tuple(header)) for name, header in headers.items()}


def test_a_single_party_that_names_columns_moves_nobody_elses() -> None:
    """In an earlier version the only party with column names among ten reordered the aggregator's test samples, or
    ended the job."""
    nobody = {f"n{k}": "" for k in range(9)}
    for header in ("ycba", "yqrs"):
        said = with_columns(liar=header, **nobody)
        about, out = agreed(said, own=tuple("yabc"))
        assert about.header == tuple("yabc") and list(out) == (["liar"] if header == "yqrs" else [])
    with pytest.raises(ConfigError, match="aggregator's own samples have other columns than the parties': at 'a' its"):
        agreed(with_columns(a="yqrs", b="yqrs", c=""), own=tuple("yabc"))


def test_the_order_of_columns_is_that_of_most_and_not_of_the_first() -> None:
    about, out = agreed(with_columns(liar="ycba", a="yabc", b="yabc", c=""))
    assert about.header == tuple("yabc") and out == {}


def test_few_that_name_different_columns_do_not_end_the_job() -> None:
    about, out = agreed(with_columns(liar="yqrs", a="yabc", b="", c="", d=""))
    assert about.header == () and list(out) == ["liar", "a"]
    with pytest.raises(ConfigError, match="no side has the majority"):
        agreed(with_columns(liar="yqrs", a="yabc", b="", c=""))


def test_a_long_header_of_the_aggregators_own_is_compared_by_its_hash() -> None:
    long = ("y", *(f"column {k} {'x' * 60}" for k in range(100)))
    one = Description((100,), 2, "class", False, False, Labels(0, 1, 2), False, long)
    said = {name: Description.of(replace(one, header=header).reply())
            for name, header in zip("abc", (long, long, ("y", *reversed(long[1:]))), strict=True)}  # fmt: skip
    about, out = agreed(said, own=long)
    assert about.header == () and list(out) == ["c"]


def test_class_numbers_from_one_fail_the_job_before_a_round(league: League) -> None:
    join(league, lambda name, given: PartySamples((given[0][0], given[0][1] + 1)))
    ended = league.ended(league.submit(tree()))
    assert ended["status"] == "failed" and ended["rounds"] == []
    assert "class numbers go from 1 to 2, and none is 0; number the classes from 0" in ended["reason"]


def test_infinite_features_are_an_error_for_the_owner() -> None:
    x, y = samples(0)[0]
    x[2, 0] = torch.inf
    with pytest.raises(DataError, match="its samples: the features of row 2 have values that are infinite"):
        preparer(PartySamples((x, y)))
