"""A slice of the requests of `interfere`, attacks that once succeeded, and faults that the comparison must notice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from interfere import Campaign, Case, Finding, Pair, compared, names
from releases import BUDGETED, DRAWERS, drawers, watched
from twin_requests import Request, make, seeds
from twins import TASK, Answered, Twin, masked_sum, preparer, samples

from hansa.algorithms.adaptive_top_k import SettleTopK
from hansa.core.ask import op_config, op_of
from hansa.core.op import Op, Party, Payload, Reply
from hansa.core.predictor import Evaluate
from hansa.core.registry import registered
from hansa.holdings.gateway import SampleGateway
from hansa.kernel.grid import Grid
from hansa.local import DPSGD, SGD
from hansa.local.finetune import FineTune
from hansa.local.halves import Halves
from hansa.net.party.after_reading import REFUSAL
from hansa.net.party.vault import PartyVault
from hansa.numerics import rng
from hansa.plumbing import codec
from hansa.plumbing.errors import NotAdmitted, PartyError
from hansa.secure.channel import Encoded
from hansa.secure.masking import Masking
from hansa.secure.paillier_sum import PaillierEncrypt
from hansa.select.power_of_choice import Loss
from hansa.transforms.error_feedback import ERROR, PLACES, VALUES

SIZE = 2 * 30 + 2
MODEL = {"w": torch.zeros(SIZE, dtype=torch.float64), "stats": torch.zeros(0, dtype=torch.float64),
         "counts": torch.zeros(0).long()}  # fmt: skip


@pytest.fixture(scope="module")
def valid() -> Iterator[None]:
    """The valid requests, made once in the process that runs this module."""
    seeds()
    yield


def asked(op: Op, variant: str, **options: Any) -> Request:
    payload = {"model": MODEL, **options.pop("payload", {})}
    return Request(op_config(op), payload, options.pop("kind", "two"), variant, options.pop("task", {}), **options)


def seed(name: str, kind: str, variant: str, **options: Any) -> Request:
    """The first valid request of an op, in other circumstances."""
    op, payload = next((op, payload) for op, payload in seeds()[name] if op["name"] == name)
    op = {**op, **options.pop("fields", {})}
    payload = {**codec.decode(payload), **options.pop("payload", {})}
    return Request(op, payload, kind, variant, options.pop("task", {}), **options)


def sent(floor: str, request: Request) -> Case:
    case = Case(request)
    with watched(), Pair(floor, request.kind, request.variant) as pair:
        pair.send(request, case, "job-1")
    return case


WIDE = {"range": 2.0**100, "statistics": 2.0**60}
TUNING = FineTune(SGD(lr=1e6, steps=3, batch=None))
LAYOUT = {"columns": [["city", "number"]], "missing": ["red", "green", "blue"], "labels": []}
ATTACKS: dict[str, tuple[str, Callable[[], Request]]] = {
    "a fine-tuning that diverges": ("dp", lambda: asked(TUNING, "x1e155")),
    "a fine-tuning that diverges, in a sum": ("active", lambda: asked(TUNING, "x1e155", sum="masked", channel=WIDE)),
    "histograms over the party's own quantiles": (
        "dp", lambda: seed("private-histograms", "two", "x1e3", payload={"points": 3})),
    "words for missing values": (
        "budget", lambda: seed("table-sums", "table", "text", task={"table": LAYOUT})),
    "another answer in the same sum": (
        "active", lambda: asked(SGD(steps=1, batch=None), "x1e30", sum="masked", channel=WIDE, uniform=True,
                                again=[{"model": MODEL, "work": {"lr": 0.2}}])),
    "a number beyond the range of a sum": (
        "dp", lambda: asked(PaillierEncrypt(Evaluate(), range=1.0, statistics=1.0, parties=3, key_bits=1024), "t1e200",
                            payload={"model": {**MODEL, "w": torch.linspace(-0.01, 0.01, SIZE, dtype=torch.float64)},
                                     "secure": codec.decode(seeds()["secure-paillier"][0][1])["secure"]})),
    "a task with an unknown number of classes": (
        "budget", lambda: seed("sample-count", "rare", "newclass", task={"classes": None, "outputs": 2})),
    "a task in a narrower type": ("budget", lambda: seed("sample-count", "two", "x1e100", task={"dtype": "float32"})),
    "histograms of fewer classes": ("dp", lambda: seed("private-histograms", "rare", "newclass")),
    "a belief that is too sharp": (
        "active", lambda: seed("exchange-beliefs", "two", "x1e300", fields={"sharpest": 1e9, "scale": 1e6},
                               sum="masked")),
    "sums of rows for fewer classes": (
        "secure", lambda: seed("convex-sums", "rare", "newclass", sum="masked", channel=WIDE)),
}  # fmt: skip


@pytest.mark.usefixtures("valid")
@pytest.mark.parametrize("attack", ATTACKS)
def test_attack_learns_nothing_unbooked(attack: str) -> None:
    floor, request = ATTACKS[attack]
    case = sent(floor, request())
    assert case.forms and not case.findings, case.findings


@pytest.mark.usefixtures("valid")
def test_parties_asked_for_different_encodings_have_no_sum() -> None:
    twin, task = Twin("active", "two"), {"task": dict(TASK), "preparations": []}
    try:
        alone = twin.worker._prepare(0, dict(TASK), "cpu")
        op = SGD(lr=0.1, steps=1, batch=None)
        update = op.run(alone, {"model": MODEL}, {})[0].tensors["w"]
        answers, total = masked_sum(twin, op, {"model": MODEL}, task, "two", Masking(), "job-1", True,
                                    other=lambda op: dataclasses.replace(op, range=2.0**100))  # fmt: skip
    finally:
        twin.close()
    assert any(answered.replied for answered in answers)
    assert total is None or not torch.allclose(total.sums["w"], update, atol=1e-6)


@pytest.fixture(scope="module")
def party() -> Party:
    return preparer(samples("two"))(0, TASK, "cpu")


def test_rows_without_a_floor_follow_from_public_numbers(party: Party) -> None:
    assert np.array_equal(party.row_draws(5, 2, 0.5), rng.uniforms(rng.folded(5, 2, party.id), party.n))
    assert party.draws(5, 2, 1e-9).sum() == 0


def test_rows_under_a_floor_follow_from_the_secret_and_the_share(party: Party) -> None:
    here = dataclasses.replace(party, rows_secret=b"1" * 32)
    chosen = here.row_draws(5, 2, 0.5)
    assert np.array_equal(chosen, here.row_draws(5, 2, 0.5))
    assert not np.array_equal(chosen, party.row_draws(5, 2, 0.5))
    other = dataclasses.replace(party, rows_secret=b"2" * 32)
    asks = [(here, 5, 2, 0.5), (other, 5, 2, 0.5), (here, 6, 2, 0.5), (here, 5, 3, 0.5), (here, 5, 2, 0.5 + 1e-12)]
    draws = [one.row_draws(key, stream, share) for one, key, stream, share in asks]
    assert len({tuple(each) for each in draws}) == 5  # with a nested draw, two asks would differ by one sample


def test_an_ask_draws_and_leaves_out_enough_rows(party: Party) -> None:
    here = dataclasses.replace(party, rows_secret=b"1" * 32, min_drawn=10)
    assert 10 <= here.draws(5, 2, 0.5).sum() <= party.n - 10
    assert here.draws(5, 2, 1 - 1e-9).all()
    for share in (1e-9, 0.2, 0.95):
        with pytest.raises(NotAdmitted, match="draws at least 10 of its samples and leaves out none"):
            here.draws(5, 2, share)


@pytest.mark.parametrize("solver", [SGD(batch=4, epochs=2), SGD(batch=11), SGD(batch=4, steps=1), SGD(batch=23)])
def test_batches_under_a_floor_are_secret_and_large(party: Party, solver: SGD) -> None:
    public = solver.batches(party.n, party.seed, party.round, party.id)
    assert all(map(np.array_equal, solver.drawn(party), public))
    here = dataclasses.replace(party, rows_secret=b"1" * 32, min_drawn=10, secret=b"1" * 32)
    batches, again = solver.drawn(here), solver.drawn(dataclasses.replace(here))
    assert all(map(np.array_equal, batches, again)) and min(map(len, batches)) >= 10
    used = len(np.unique(np.concatenate(batches)))
    assert used == party.n or used <= party.n - 10
    if used < party.n or len(batches) > 1:
        other = dataclasses.replace(here, secret=b"2" * 32)
        assert len({tuple(one[0]) for one in (public, batches, solver.drawn(other))}) == 3


def alone(party: Party, row: int) -> Party:
    x, y = party.samples("statistics")
    return dataclasses.replace(party, data=SampleGateway((x[row : row + 1], y[row : row + 1])))


def test_few_rows_under_a_floor_are_not_left_out_or_used_alone(party: Party) -> None:
    here = dataclasses.replace(party, rows_secret=b"1" * 32, min_drawn=10)
    assert [len(here.some_rows(5, size)) for size in (1, 12, 15, 23)] == [10, 12, party.n, party.n]
    model = {"model": {**MODEL, "w": torch.randn(SIZE, dtype=torch.float64, generator=torch.manual_seed(0))}}
    losses = [Loss(batch=batch).run(here, model, {})[0].tensors["loss"] for batch in (1, 10, 12)]
    assert losses[0] == losses[1] != losses[2]
    sent = {f"sent/{name}": torch.zeros(0) for name in (ERROR, VALUES)} | {f"sent/{PLACES}": torch.zeros(0).long()}
    none = {f"{name}_values": torch.zeros(0) for name in ("used", "probe")}
    none |= {f"{name}_places": torch.zeros(0).long() for name in ("used", "probe")}
    settled = [SettleTopK("sent").run(one, {**model, **none}, sent)[0].tensors["losses"][0] for one in (party, here)]
    each = [Loss().run(alone(party, row), model, {})[0].tensors["loss"] for row in range(party.n)]
    assert any(torch.isclose(settled[0], loss) for loss in each)
    assert not any(torch.isclose(settled[1], loss) for loss in each)
    for solver in (Halves(batch=4), DPSGD(batch=4, sigma=0.0)):
        with pytest.raises(NotAdmitted, match="its policy requires"):
            solver.run(here, model, {})


@pytest.mark.usefixtures("valid")
@pytest.mark.parametrize("fields", [{}, {"sample": 0.04}, {"held": 0.04}])
def test_masked_sum_of_trees_over_few_rows_is_refused_unread(fields: dict[str, float]) -> None:
    op, payload = seeds()["gradient-histograms"][0]
    twin = Twin("active", "two")
    try:
        tree = {"task": dict(TASK), "preparations": []}
        asked = dataclasses.replace(op_of(op, where="ask"), **{"sample": 1.0, "held": 0.0, "min_rows": 1, **fields})
        answers, total = masked_sum(twin, asked, codec.decode(payload), tree, "two", Masking(), "job-1", True)
    finally:
        twin.close()
    assert (total is None) == bool(fields)
    if fields:
        assert "draws at least 20 of its samples" in answers[-1].form
        assert not any(answered.readings or answered.declined for answered in answers)


@pytest.mark.usefixtures("valid")
def test_slice_of_the_campaign_finds_nothing() -> None:
    campaign = Campaign(sorted(names()), ["dp", "secure", "active", "budget"])
    for place, name in enumerate(campaign.ops):
        floor = campaign.floors[place % 4]
        campaign.one(name, floor, 0, False)
        if campaign.reached[name, floor]:
            campaign.one(name, floor, 5, False)
    assert not campaign.found, list(campaign.where.values())
    assert campaign.counts["accepted"] >= 0.25 * campaign.counts["requests"] > 0


@pytest.mark.usefixtures("valid")
def test_request_is_made_again_from_its_number() -> None:
    one, two = (make("fair", "secure", 17) for _ in range(2))
    assert codec.digest(one.payload) == codec.digest(two.payload) and one.op == two.op and one.variant == two.variant


def test_every_function_that_draws_noise_is_known() -> None:
    assert drawers() == set(DRAWERS)


def test_every_op_with_a_release_of_its_own_is_watched() -> None:
    parts = {**registered("op"), **registered("local")}
    own = {name for name, part in parts.items() if part.__module__.startswith("hansa.") and "release" in vars(part)}
    passing = {name for name in own if {"inner", "local", "private"} & set(parts[name].__dataclass_fields__)}
    assert own - passing == BUDGETED


def test_sum_beyond_its_sensitivity_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    request = asked(DPSGD(steps=1, batch=None, lr=0.1), "x1e3")
    assert not sent("dp", request).findings
    longest = Grid.longest.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(Grid, "longest", property(lambda self: 9 * longest(self)))
    assert [code for code, _ in sent("dp", request).findings] == ["sensitivity"]


def test_decline_that_is_not_booked_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an encoding that fails for large updates."""
    numbers = Encoded.numbers

    def fragile(self: Encoded, party: Party, payload: Payload, reply: Reply) -> Any:
        if float(reply.tensors["w"].abs().max()) > 1e6:
            raise PartyError("a value is too large")
        return numbers(self, party, payload, reply)

    monkeypatch.setattr(Encoded, "numbers", fragile)
    request = asked(SGD(steps=1, batch=None), "x1e30", sum="masked", uniform=True)
    case = sent("active", request)
    assert REFUSAL in sum(case.forms, ()) and not case.findings
    monkeypatch.setattr(PartyVault, "declined", lambda *_: None)
    assert [code for code, _ in sent("active", request).findings] == ["outcome"]


READ = ({"name": "training ask"},)
DECLINED = (*READ, {"name": "declined ask"})
REPLIES = [Reply({"x": torch.tensor([number])}) for number in (1.0, 2.0)]


@pytest.mark.parametrize(("floor", "one", "two", "codes"), [
    ("budget", ("no", ()), ("no!", ()), ["unread"]),
    ("budget", (REPLIES[0], ()), (REPLIES[1], ()), ["unread"]),
    ("budget", (REPLIES[0], READ), (REPLIES[1], READ), []),
    ("budget", (REPLIES[0], READ), ("no", READ), []),
    ("budget", (REPLIES[0], READ), (REPLIES[1], ()), ["booked"]),
    ("secure", ("no", READ), ("never", READ), ["words"]),
    ("secure", (REPLIES[0], READ), (REPLIES[1], READ), []),
    ("secure", (REPLIES[0], READ), ("no", READ), ["outcome"]),
    ("secure", (REPLIES[0], READ), ("no", DECLINED), []),
    ("secure", ("no", READ), ("never", DECLINED), []),
    ("secure", ("no", DECLINED), ("never", DECLINED), ["words"]),
    ("secure", (REPLIES[0], DECLINED), ("no", READ), ["outcome"]),
    ("dp", (REPLIES[0], READ), (REPLIES[1], READ), ["reply"]),
    ("dp", ("raised ValueError", READ), ("raised ValueError", READ), ["raised", "raised"]),
])  # fmt: skip
def test_difference_of_answers_is_judged_by_what_was_booked(floor: str, one: Any, two: Any, codes: list[str]) -> None:
    found: list[Finding] = compared(floor, "x3", *(Answered("sgd", "", *each, 0.0) for each in (one, two)))
    assert [code for code, _ in found] == codes
