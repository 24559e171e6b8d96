"""The manifest of a job allows every ask of an honest aggregator, and refuses others with the difference."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
from msgspec import structs

from every_op import quick
from hansa.core.algorithm import Algorithm
from hansa.core.ask import Ask, op_config, op_of
from hansa.core.plain_data import field_types, from_config
from hansa.core.registry import registered
from hansa.core.runtime import Request
from hansa.experiment.config import Experiment, parse
from hansa.local import SGD
from hansa.local.finetune import FineTune
from hansa.net.aggregator.manifest import make_manifest
from hansa.net.party.manifest_checks import refuses_ask, trains
from hansa.net.party.manifest_words import changed_lines, manifest_lines
from hansa.net.transport.manifest import MANIFEST, AllowedOp, Manifest, decode_manifest, encode_manifest
from hansa.net.transport.wire import Blob, Work
from hansa.plumbing.errors import DataError
from hansa.run.loop import Training
from hansa.testing import experiment_for
from hansa.testing.experiments import TREE, simulated

OURS = [name for name, part in registered("algorithm").items() if part.__module__.startswith("hansa.")]
NAMES = ("ann", "bob", "cid", "dan")
BLOB = Blob("0" * 64, 1)
SLOW = pytest.mark.slow


def manifest_of(experiment: Experiment, loss: str | None = None) -> Manifest:
    parties = [(name, None) for name in NAMES]
    made = make_manifest("league", "job-1", "job", experiment, loss, None, parties)
    return decode_manifest(encode_manifest(made))


def work(party: int = 0, round: int = 0, min_cohort: int = 1, name: str = "job") -> Work:
    return Work("job-1", name, party, round, "round", 0, BLOB, BLOB, None, None, None, min_cohort, manifest=BLOB)


def refused(manifest: Manifest, op: Any, settings: dict[str, Any] | None = None, payload: dict[str, Any] | None = None,
            preparations: list[Any] | None = None, **about: Any) -> str | None:  # fmt: skip
    """Why a party refuses an ask; `op` is a table."""
    message = {"op": op, "payload": payload or {}, "round": about.get("round", 0)}
    asked = op_of(op, "test")
    return refuses_ask(manifest, NAMES[0], work(**about), asked, message, settings or {}, preparations or [])


def observed(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """All asks of a simulated run, each with the reason why a party with the manifest would refuse it."""
    manifest, out, original = manifest_of(experiment), list[tuple[str, str | None]](), Training.steps
    asked: dict[tuple[int, int], set[int]] = {}

    def watch(run: Generator[Request, Any, Any]) -> Generator[Request, Any, Any]:
        answer: Any = None
        try:
            request = next(run)
            while True:
                if isinstance(request, Ask) and request.op is not None:
                    for party in request.parties[:1]:
                        message = request.message(party)
                        op = op_of(message["op"], "test")
                        about = work(party, request.round)
                        why = refuses_ask(manifest, NAMES[party], about, op, message, {}, [])
                        out.append((request.op.name, why))
                        if trains(op):
                            asked.setdefault((party, request.round), set()).add(len(out))
                answer = yield request
                request = run.send(answer)
        except StopIteration as done:
            return done.value

    monkeypatch.setattr(Training, "steps", lambda self: watch(original(self)))
    simulated(experiment, engine="reference")
    if manifest.trainings is not None:
        assert max(map(len, asked.values())) <= manifest.trainings
    return out


@pytest.mark.thin(5)
@pytest.mark.parametrize("name", OURS)
def test_the_manifest_allows_every_ask_of_a_registered_algorithm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = quick(registered("algorithm")[name])
    assert isinstance(algorithm, Algorithm) and algorithm.ops is not None, f"{name} does not declare its ops"
    asks = observed(experiment_for(algorithm), monkeypatch)
    assert asks and [ask for ask in asks if ask[1] is not None] == []


VARIANTS: list[dict[str, Any]] = [
    {"name": "boosting", "sigma": 1.0, "cuts": "public", "span": [-4.0, 4.0]}, {"name": "boosting", "cuts": "sketch"},
    {"name": "boosting", "cuts": "pax"}, {"name": "boosting", "cuts": "extents"}, {"name": "boosting", "rows": 0.5},
    {"name": "random-forest", "growth": "local", "trees": 6, "per_round": 2},
    {"name": "fsvrg", "form": "full"}, {"name": "ifca", "hidden": True}, {"name": "ifca", "restarts": 2, "trial": 2},
    {"name": "prunefl", "interval": 1, "first_rounds": 0, "density": 1.0}, {"name": "fedmd", "digest_lr": 0.2},
    {"name": "fedavg", "fusion": "median"}, {"name": "admm", "personal": True}, {"name": "fedavg", "local": "dp-sgd"},
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("table", VARIANTS, ids=lambda table: "-".join(map(str, table.values())))
def test_the_manifest_allows_every_ask_of_a_variant(table: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = from_config("algorithm", table, "test")
    if algorithm.budget is None:
        experiment = experiment_for(algorithm)
    else:  # no sums of a preparation, which the guarantee does not cover
        experiment = experiment_with(algorithm=table, task={"prepare": None})
    asks = observed(experiment, monkeypatch)
    assert asks and [ask for ask in asks if ask[1] is not None] == []


SETTINGS: dict[str, dict[str, Any]] = {
    "masked": {"privacy": {"secure": "masking", "active": True}},
    "masked with settings": {"privacy": {"secure": "masking", "range": 8, "bits": 24, "max_weight": 10**4,
                                         "stochastic": True}, "run": {"compress_down": "int8"}},
    "masked and private": {"privacy": {"secure": "masking", "range": 64.0, "dp": {"kind": "central", "sigma": 1.0}},
                           "run": {"eval_parties": False}, "task": {"prepare": None}},
    "paillier": {"privacy": {"secure": "paillier", "key_bits": 1024}, "run": {"rounds": 1}},
    "threshold": {"privacy": {"secure": "threshold-paillier", "key_bits": 1024}, "run": {"rounds": 1}},
    "functional": {"privacy": {"secure": "functional"}, "run": {"rounds": 1}},
    "bounded": {"privacy": {"bound": 1.0}},
    "packed": {"run": {"compress": {"name": "rand-k", "share": 0.5, "shared": True}, "compress_down": "int8"}},
    "by layer": {"run": {"compress": {"*": {"name": "top-k", "share": 0.5}}}},
    "fine-tuned": {"run": {"finetune": {"epochs": 1}}},
    "paced": {"run": {"pace": {"name": "random", "least": 1, "most": 3}}},
    "own work": {"run": {"own": {"1": {"epochs": 2, "lr": 0.3}}}},
    "weighted": {"run": {"select": "weighted", "cohort": 0.5}},
    "by loss": {"run": {"select": {"name": "power-of-choice", "d": 3}, "cohort": 0.5}},
    "tiers": {"run": {"select": {"name": "tiers", "tiers": 2}, "cohort": 0.5}},
    "weighing classes": {"task": {"class_weight": "balanced"}},
}  # fmt: skip
LONG = ("paillier", "threshold", "functional", "tiers", "by loss", "fine-tuned", "weighted", "by layer", "own work")


def experiment_with(**tables: Any) -> Experiment:
    tree = {name: {**TREE.get(name, {}), **tables.get(name, {})} for name in {*TREE, *tables, "algorithm"}}
    tree["algorithm"] = {"name": "fedavg", **tree["algorithm"]}
    tree["task"] = {name: value for name, value in tree["task"].items() if value is not None}
    return parse(tree)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=SLOW) if kind in LONG else kind for kind in SETTINGS])
def test_the_manifest_allows_every_ask_of_a_run_with_these_settings(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asks = observed(experiment_with(**SETTINGS[kind]), monkeypatch)
    assert asks and [ask for ask in asks if ask[1] is not None] == []


def solver(**fields: Any) -> dict[str, Any]:
    return {"kind": "local", "name": "sgd", **fields}


def test_another_field_of_the_solver_is_refused_with_the_difference() -> None:
    manifest = manifest_of(experiment_with(algorithm={"local": {"epochs": 2}}))
    assert refused(manifest, solver(epochs=2)) is None
    why = refused(manifest, solver(epochs=50))
    assert why == "the approved manifest allows sgd.epochs = 2, and the ask has 50"
    assert "sgd.momentum = 0.0, and the ask has 0.9" in str(refused(manifest, solver(epochs=2, momentum=0.9)))


def test_a_field_that_the_manifest_does_not_mention_is_refused() -> None:
    manifest = structs.replace(manifest_of(experiment_with()), ops=(AllowedOp("sgd", {"epochs": 1}),))
    assert refused(manifest, solver()) == "the approved manifest allows no sgd.lr, and the ask has 0.1"


def test_an_ask_has_one_round() -> None:
    message = {"op": solver(), "payload": {}, "round": 1}
    why = refuses_ask(manifest_of(experiment_with()), NAMES[0], work(), op_of(solver(), "test"), message, {}, [])
    assert why == "the approved manifest allows one round per ask, and the ask has 0 and 1"


def test_a_message_sets_only_the_fields_and_ranges_that_the_manifest_names() -> None:
    manifest = manifest_of(experiment_with(run={"pace": {"name": "random", "least": 1, "most": 3}}))
    allowed = {"work": {"epochs": 3, "steps": None}}
    assert refused(manifest, solver(), payload=allowed) is None
    why = refused(manifest, solver(), payload={"work": {"epochs": 4}})
    assert why == "the approved manifest allows epochs 1 to 3, and the ask sets 4"
    assert "no message to set lr" in str(refused(manifest, solver(), payload={"work": {"lr": 9.0}}))
    fixed = manifest_of(experiment_with())
    assert "no message to set steps" in str(refused(fixed, solver(), payload={"work": {"steps": None}}))


@pytest.mark.parametrize("op, named", [
    ({"name": "column-moments"}, None), ({"name": "class-moments"}, "'class-moments'"),
    ({"kind": "local", "name": "gradient"}, "'gradient'"), ({"name": "probe"}, "'probe'"),
])  # fmt: skip
def test_an_op_that_the_manifest_does_not_list_is_refused(op: dict[str, Any], named: str | None) -> None:
    why = refused(manifest_of(experiment_with()), op)
    assert why is None if named is None else f"and the ask has {named}" in str(why)


def test_a_preparation_that_the_manifest_does_not_list_is_refused() -> None:
    manifest = manifest_of(experiment_with(task={"prepare": None}))
    steps = [{"op": {"kind": "op", "name": "apply-standardise"}, "payload": {}}]
    assert "'apply-standardise'" in str(refused(manifest, solver(), preparations=steps))


def test_training_ends_with_the_last_round_and_evaluation_after_it() -> None:
    manifest = manifest_of(experiment_with())
    assert refused(manifest, solver(), round=2) is None
    assert refused(manifest, solver(), round=3) == "the approved manifest allows 3 rounds, and the ask is of round 4"
    assert refused(manifest, {"name": "evaluate"}, round=3) is None
    assert refused(manifest, {"name": "evaluate"}, round=4) is not None


@pytest.mark.parametrize("name", ["pfnm-train", "fedma-train", "fedmd-learn"])
def test_an_op_whose_reply_is_what_a_solver_has_trained_counts_as_training(name: str) -> None:
    """Their replies are no updates; without a count the aggregator asks for any number of them in a round."""
    plain = manifest_of(experiment_with())
    own = AllowedOp(name, {}, {}, tuple(field_types(registered("op")[name])))
    manifest = structs.replace(plain, ops=(*(plain.ops or ()), own), protected=("clip",))
    op = registered("op")[name]()
    assert trains(op) and trains(SGD()) and not trains(FineTune(SGD()))
    assert "updates inside 'clip' alone" in str(refused(manifest, op_config(op)))
    assert "rounds, and the ask is of round" in str(refused(manifest, op_config(op), round=manifest.rounds))


def test_another_job_party_or_cohort_is_refused() -> None:
    manifest = manifest_of(experiment_with(run={"min_cohort": 3}))
    assert refused(manifest, solver(), min_cohort=3) is None
    assert "cohorts of at least 3, and the ask has 2" in str(refused(manifest, solver(), min_cohort=2))
    assert "this party 0 as its number" in str(refused(manifest, solver(), min_cohort=3, party=1))
    assert "the job 'job', and the ask is of 'other'" in str(refused(manifest, solver(), min_cohort=3, name="other"))


def test_an_update_without_the_promised_protection_is_refused() -> None:
    hidden = manifest_of(experiment_with(privacy={"secure": "masking", "bound": 1.0}))
    clipped = {"name": "clip", "clip": 1.0, "inner": solver()}
    masked = {"name": "secure-masked", "parties": 4, "inner": clipped}
    assert refused(hidden, masked) is None
    assert "inside 'secure-masked'" in str(refused(hidden, clipped))
    assert "inside 'clip'" in str(refused(hidden, {**masked, "inner": solver()}))
    assert "clip.clip = 1.0, and the ask has 9.0" in str(refused(hidden, {**masked, "inner": {**clipped, "clip": 9.0}}))
    assert "would reveal its reply" in str(refused(hidden, {"name": "evaluate"}))
    assert "secure-masked.parties 1 to 4" in str(refused(hidden, {**masked, "parties": 5}))
    assert "secure-masked.range = 16.0, and the ask has 1e+30" in str(refused(hidden, {**masked, "range": 1e30}))
    assert "secure-masked.bits = 32, and the ask has 8" in str(refused(hidden, {**masked, "bits": 8}))
    assert "secure-masked.statistics" in str(refused(hidden, {**masked, "statistics": 1.0}))
    assert "secure-masked.max_weight 1 to 1.04858e+06" in str(refused(hidden, {**masked, "max_weight": 2**30}))
    assert "secure-masked.stochastic" in str(refused(hidden, {**masked, "stochastic": True}))
    sums = {**masked, "range": 2.0**30, "bits": 53, "max_weight": 1, "uniform": True}  # of statistics
    assert refused(hidden, {**sums, "inner": {"name": "describe"}}) is None
    assert "secure-masked.bits of at least" not in str(refused(hidden, sums))
    assert "secure-masked.bits 30 to 64" in str(refused(hidden, {**sums, "bits": 24}))
    assert "secure-masked.noise" in str(refused(hidden, {**masked, "noise": 1.0, "uniform": True}))


def test_less_noise_than_promised_is_refused() -> None:
    private = {"secure": "masking", "range": 64.0, "dp": {"kind": "central", "sigma": 1.0, "clip": 1.0}}
    manifest = manifest_of(experiment_with(privacy=private, run={"eval_parties": False}, task={"prepare": None}))
    sent = {"name": "contribution", "clip": 1.0, "inner": solver()}
    enough = {"name": "secure-masked", "parties": 4, "inner": sent, "noise": 1.0, "uniform": True, "range": 64.0}
    assert refused(manifest, enough) is None
    assert "secure-masked.noise of at least" in str(refused(manifest, {**enough, "noise": 0.1}))


TASK = {"model": "logistic", "dtype": "float64", "loss": "cross_entropy", "classes": 2, "party_test": 0.2, "seed": 3,
        "bf16": False}  # fmt: skip


@pytest.mark.parametrize("name, value", [("model", "2nn"), ("loss", "mse"), ("seed", 4), ("party_test", 0.5),
                                         ("bf16", True), ("augment", "my:flip"), ("public", {"digest": "0"}),
                                         ("models", {"a": "2nn"}), ("dtype", "float32")])  # fmt: skip
def test_another_task_is_refused(name: str, value: Any) -> None:
    manifest = manifest_of(experiment_with(), loss="cross_entropy")
    assert refused(manifest, solver(), TASK) is None
    why = str(refused(manifest, solver(), {**TASK, name: value}))
    assert why.startswith(f"the approved manifest allows task.{name} = ")


@pytest.mark.parametrize("name, value", [
    ("model", "2nn"), ("models", {"a": "2nn"}), ("dtype", "float32"), ("party_test", 0.5), ("seed", 9),
    ("augment", "f"), ("bf16", True), ("public", {"digest": "0" * 64}),
])  # fmt: skip
def test_a_part_of_the_task_that_the_manifest_leaves_out_may_not_be_chosen_later(name: str, value: Any) -> None:
    manifest = structs.replace(manifest_of(experiment_for(from_config("algorithm", "fedavg", ""))), task={})
    assert refused(manifest, {"name": "describe"}, settings={"x": 1}) is None
    why = refused(manifest, {"name": "describe"}, settings={name: value})
    assert why is not None and f"task.{name} = " in why


@pytest.mark.parametrize("fields, fault", [
    ({"ops": (AllowedOp("sgd", {"epochs": 1}, {}, ("epochs",)),)}, "'sgd' lists the field 'epochs' twice"),
    ({"ops": (AllowedOp("secure-keys", {"active": True}, {}, ("active",)),)}, "lists the field 'active' twice"),
    ({"ops": (AllowedOp("sgd", {"epochs": 1}, {"epochs": (1.0, 50.0)}),)}, "lists the field 'epochs' twice"),
    ({"parties": (("ann", None), ("ann", "0" * 64), ("ann", None))}, "it lists a party twice"),
])  # fmt: skip
def test_a_manifest_that_can_be_read_in_two_ways_is_refused(fields: dict[str, Any], fault: str) -> None:
    """A rule such as epochs = 1 would read the first value, and the ask would be compared with the second."""
    manifest = manifest_of(experiment_for(from_config("algorithm", "fedavg", "")))
    with pytest.raises(DataError, match=fault):
        decode_manifest(encode_manifest(structs.replace(manifest, **fields)))


def test_a_model_in_place_of_the_tasks_is_refused_unless_the_algorithm_makes_one() -> None:
    payload = {"architecture": {"name": "2nn"}}
    why = refused(manifest_of(experiment_with()), {"name": "evaluate"}, payload=payload)
    assert why == "the approved manifest allows the task's own model, and the ask describes another one"
    inside = {"inner": "network", "payload": payload}  # of the predictor "finetuned"
    assert refused(manifest_of(experiment_with()), {"name": "evaluate"}, payload=inside) == why
    matched: Any = registered("algorithm")["pfnm"]()
    assert refused(manifest_of(experiment_for(matched)), {"name": "evaluate"}, payload=payload) is None


def test_a_job_whose_algorithm_declares_no_ops_says_that_any_op_may_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = experiment_with()
    monkeypatch.setattr(type(experiment.algorithm), "ops", None)
    manifest = manifest_of(experiment)
    assert manifest.ops is None
    assert any("ANY op" in line for line in manifest_lines(manifest))
    assert refused(manifest, {"name": "class-moments"}) is None
    assert refused(manifest, solver(), round=3) is not None


def test_the_words_show_every_limit_and_the_difference_line_by_line() -> None:
    before = manifest_of(experiment_with(algorithm={"local": {"epochs": 2}}))
    now = manifest_of(experiment_with(algorithm={"local": {"epochs": 50}}, privacy={"secure": "masking"}))
    text = "\n".join(manifest_lines(before))
    for piece in ("rounds: at most 3", "the aggregator sees each one", "epochs = 2, lr = 0.1", "party ann",
                  "op evaluate-metrics: any predictor, metrics, classes", 'task model: "logistic"'):  # fmt: skip
        assert piece in text
    lines = changed_lines(before, now)
    assert any(line.startswith("- ") and "epochs = 2" in line for line in lines)
    assert any(line.startswith("+ ") and "hidden in a secure sum" in line for line in lines)
    assert not any("party ann" in line for line in lines)


def test_text_of_the_aggregator_cannot_control_the_terminal() -> None:
    manifest = structs.replace(manifest_of(experiment_with()), algorithm={"name": "fedavg\x1b[2J\nrounds: at most 1"})
    assert all(line.isprintable() for line in manifest_lines(manifest))


@pytest.mark.parametrize("data", [
    b"", b"[]", b"{}", b"nonsense", b'{"job": 3}', b"[" * 10_000, b"0" * (MANIFEST + 1),
    b'{"a":' * 60 + b"1" + b"}" * 60,
])  # fmt: skip
def test_an_invalid_manifest_is_refused_in_one_sentence(data: bytes) -> None:
    with pytest.raises(DataError, match="manifest"):
        decode_manifest(data)


def test_op_tables_of_the_wire_are_compared() -> None:
    manifest = manifest_of(experiment_with())
    assert refused(manifest, op_config(from_config("local", "sgd", "test"))) is None
