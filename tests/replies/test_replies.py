from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hansa
from hansa.core.ask import Ask, Gathered, Reduced
from hansa.core.op import Replies, Reply
from hansa.core.round_record import Record
from hansa.core.sums import BLOCK, BlockSum
from hansa.local import SGD
from hansa.plumbing.errors import ConfigError, RoundAborted
from hansa.replies.replies import combine
from hansa.replies.reply_checks import Rules, fault, stack_fault
from hansa.run import Run

MODEL = {"w": torch.zeros(3), "stats": torch.zeros(0), "counts": torch.zeros(0, dtype=torch.int64)}
PAYLOAD = {"model": MODEL}


def reply(*values: float, weight: Any = 1, dtype: torch.dtype = torch.float32, **metrics: float) -> Reply:
    return Reply({"w": torch.tensor(values, dtype=dtype)}, weight, metrics=metrics)


def ask(parties: int, verb: Any = "reduce", uniform: bool = False) -> Ask:
    return Ask(verb, 0, "round", 0, SGD(), PAYLOAD, tuple(range(parties)), uniform=uniform)


def reduced(outcomes: list[tuple[int, Reply | str]], uniform: bool = False, rules: Rules | None = None) -> Reduced:
    answer = combine(ask(len(outcomes), uniform=uniform), outcomes, rules or Rules(), Record())
    assert isinstance(answer, Reduced)
    return answer


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (reply(1, math.nan, 1), "not finite"),
        (reply(1, math.inf, 1), "not finite"),
        (reply(1, -math.inf, 1), "not finite"),
        (reply(1, 1), r"shape \(2,\), expected \(3,\)"),
        (Reply({"w": torch.zeros(1, 3)}), r"shape \(1, 3\), expected \(3,\)"),
        (Reply({"w": torch.zeros(())}), r"shape \(\), expected \(3,\)"),
        (reply(1, 1, 1, dtype=torch.float64), "is torch.float64, expected torch.float32"),
        (reply(1, 1, 1, dtype=torch.int64), "is torch.int64, expected torch.float32"),
        (Reply({"v": torch.zeros(3)}), r"has the tensors \['v'\], expected \['w'\]"),
        (Reply({}), r"has the tensors \[\], expected \['w'\]"),
        (Reply({"w": torch.zeros(3), "v": torch.zeros(3)}), r"has the tensors \['v', 'w'\]"),
        (reply(1, 1, 1, weight=0), "weight is 0, expected a positive whole number"),
        (reply(1, 1, 1, weight=-3), "weight is -3"),
        (reply(1, 1, 1, weight=True), "weight is True"),
        (reply(1, 1, 1, weight=2.0), "weight is 2.0"),
        (reply(1, 1, 1, weight=11), "weight 11 is over the limit of 10"),
        (reply(3, 4, 0.1), "norm of its update, 5.001, is over the limit of 5"),
        (reply(1, 1, 1, train_loss=math.nan), "metrics are not finite"),
    ],
)
def test_a_reply_that_may_not_be_fused_is_rejected_with_the_reason(bad: Reply, reason: str) -> None:
    import re

    rules = Rules(max_norm=5.0, max_weight=10)
    assert re.search(reason, fault(bad, SGD(), PAYLOAD, rules) or "")
    record = Record()
    answer = combine(ask(3), [(0, reply(1, 2, 3)), (1, bad), (2, reply(3, 2, 1))], rules, record)
    assert isinstance(answer, Reduced)
    assert answer.mean("w").tolist() == [2, 2, 2]  # as if the bad one had not come
    assert (record.asked, record.accepted, answer.count, answer.weight) == (3, 2, 2, 2)
    assert list(record.rejected) == [1]
    assert re.search(reason, record.rejected[1])


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize(
    ("bad", "rules"),
    [
        (reply(math.nan, 1, 1), Rules()),
        (reply(1, 1, 1, weight=0), Rules()),
        (reply(1, 1, 1, weight=11), Rules(max_weight=10)),
        (reply(1, 1, 1, weight=2**53), Rules()),
        (reply(3, 4, 0.1), Rules(max_norm=5.0)),
        (reply(3, 4, 0.1), Rules(growth=5.0)),
        (reply(1, 1, 1, train_loss=6.0), Rules(worst=5.0)),
        (reply(1, 1, 1, train_loss=-1.0), Rules(named_loss=True)),
        (reply(1, 1, 1, train_loss=math.inf), Rules()),
        (reply(1, 2.0**70, 1), Rules(exact=True)),
    ],
)
def test_a_stack_has_the_fault_of_its_one_bad_reply(bad: Reply, rules: Rules, at: int) -> None:
    replies = [reply(1, 2, 2, train_loss=0.5), reply(0, 0, 4, weight=3, train_loss=5.0), reply(3, 4, 0, train_loss=0.0)]
    payload = {"model": {**MODEL, "w": torch.zeros(3)}}

    def stacked() -> Replies:
        metrics = {"train_loss": [r.metrics.get("train_loss", 0.0) for r in replies]}
        return Replies([0, 1, 2], {"w": torch.stack([r.tensors["w"] for r in replies])},
                       [r.weight for r in replies], {}, metrics)  # fmt: skip

    assert stack_fault(stacked(), SGD(), [payload], rules) is None
    replies[at] = bad
    reason = fault(bad, SGD(), payload, rules)
    assert reason is not None
    assert stack_fault(stacked(), SGD(), [payload], rules) == reason
    assert stack_fault(stacked(), SGD(), [payload, payload, payload], rules) == reason


def test_a_reply_at_the_limits_is_fused() -> None:
    assert fault(reply(3, 4, 0, weight=10), SGD(), PAYLOAD, Rules(max_norm=5.0, max_weight=10)) is None


def test_weights_are_those_of_the_parties_that_replied() -> None:
    one, other = reply(1, 0, 0, weight=1), reply(0, 0, 4, weight=3)
    outcomes: list[tuple[int, Reply | str]] = [(0, one), (1, "gone"), (2, other)]
    assert reduced(outcomes).mean("w").tolist() == [0.25, 0, 3]
    assert reduced(outcomes, uniform=True).mean("w").tolist() == [0.5, 0, 2]


def test_metrics_are_averaged_with_the_same_weights_and_counters_take_the_maximum() -> None:
    one = Reply({"w": torch.ones(3)}, 1, {"counts": torch.tensor([5, 1])}, {"train_loss": 1.0})
    two = Reply({"w": torch.ones(3)}, 3, {"counts": torch.tensor([2, 9])}, {"train_loss": 3.0})
    counting = {"model": {**MODEL, "counts": torch.zeros(2, dtype=torch.int64)}}
    answer = combine(Ask("reduce", 0, "round", 0, SGD(), counting, (0, 1)), [(0, one), (1, two)], Rules(), Record())
    assert isinstance(answer, Reduced)
    assert answer.metrics == {"train_loss": 2.5}
    assert answer.maxima["counts"].tolist() == [5, 9]


def test_an_answer_needs_its_quorum_and_never_fewer_than_one() -> None:
    good: list[tuple[int, Reply | str]] = [(0, reply(1, 1, 1)), (1, "gone"), (2, "gone"), (3, "gone")]
    for quorum, enough in [(0, True), (1, True), (2, False), (0.25, True), (0.26, False), (1.0, False)]:
        record = Record()
        if enough:
            combine(ask(4), good, Rules(quorum), record)
        else:
            with pytest.raises(RoundAborted, match="1 usable replies of 4 parties asked, quorum"):
                combine(ask(4), good, Rules(quorum), record)
        assert (record.asked, record.accepted, list(record.missing)) == (4, 1, [1, 2, 3])
    with pytest.raises(RoundAborted):
        combine(ask(1), [(0, "gone")], Rules(0), Record())


@pytest.mark.parametrize("quorum", [-1, 1.5, -0.1])
def test_an_impossible_quorum_is_refused(quorum: float) -> None:
    with pytest.raises(ConfigError, match="quorum"):
        Rules(quorum)


def test_gathered_replies_are_in_the_order_of_the_parties() -> None:
    outcomes: list[tuple[int, Reply | str]] = [(0, reply(1, 0, 0)), (1, "gone"), (2, reply(0, 1, 0, weight=4))]
    answer = combine(ask(3, "gather"), outcomes, Rules(), Record())
    assert isinstance(answer, Gathered)
    assert answer.parties == (0, 2)
    assert answer.rows("w").tolist() == [[1, 0, 0], [0, 1, 0]]
    assert answer.weights.tolist() == [1, 4]


def test_bytes_are_those_of_the_encoded_replies() -> None:
    from hansa.plumbing import codec

    record = Record()
    sent = [reply(1, 2, 3, weight=5), reply(1, 2, math.nan, weight=50_000), reply(1e30, 2, 3, weight=2**40)]
    combine(ask(3), list(enumerate(sent)), Rules(), record)
    assert record.bytes_up == sum(len(codec.encode(r.tree())) for r in sent)


# --- sums ---


def plain_blocks(rows: list[torch.Tensor], weights: list[int]) -> torch.Tensor:
    """The sum by definition: in order, in blocks of fixed size, block sums in order."""
    total = torch.zeros_like(rows[0], dtype=torch.float64)
    for at in range(0, len(rows), BLOCK):
        block = torch.zeros_like(total)
        for row, weight in list(zip(rows, weights, strict=True))[at : at + BLOCK]:
            block = block + row.double() * weight
        total = total + block
    return total


@given(st.integers(1, 3 * BLOCK + 1), st.integers(0, 10**6))
def test_a_sum_is_taken_in_float64_in_blocks_in_order(count: int, seed: int) -> None:
    make = torch.Generator().manual_seed(seed)
    rows = list(torch.randn(count, 5, generator=make) * 10.0 ** torch.randint(-6, 7, (count, 1), generator=make))
    weights = torch.randint(1, 1000, (count,), generator=make).tolist()
    total = BlockSum()
    for row, weight in zip(rows, weights, strict=True):
        total.add({"w": row}, weight)
    out = total.result()["w"]
    assert out.dtype == torch.float64
    assert torch.equal(out, plain_blocks(rows, weights))


def test_whole_numbers_are_summed_exactly() -> None:
    total = BlockSum()
    for _ in range(3):
        total.add({"c": torch.tensor([2**53 + 1])}, 1)
    assert total.result()["c"].tolist() == [3 * (2**53 + 1)]


# --- cohorts ---


@pytest.mark.parametrize(
    ("share", "parties", "size"),
    [
        (0.29, 100, 29),
        (0.1, 100, 10),
        (1.0, 7, 7),
        (0.5, 3, 1),
        (0.001, 50, 1),
        (0.57, 100, 57),
        (0.7, 10, 7),
    ],
)
def test_a_cohort_has_floor_of_c_times_k_parties_and_at_least_one(share: float, parties: int, size: int) -> None:
    assert Run(cohort=share).size(parties) == size


def test_a_cohort_may_be_a_count_that_the_parties_allow() -> None:
    assert Run(cohort_size=3).size(10) == 3
    with pytest.raises(ConfigError, match="cohort_size is 11, but there are 10 parties"):
        Run(cohort_size=11).size(10)


def test_every_party_is_as_likely_as_another_and_none_is_taken_twice() -> None:
    x, y = torch.zeros(1, 1), torch.zeros(1, 1)
    task = hansa.Task(lambda: torch.nn.Linear(1, 1), "mse", [(x, y)] * 10)
    seen: list[int] = []
    for seed in range(100):
        asked: list[int] = []

        def watch(party: int, round: int, asked: list[int] = asked) -> bool:
            asked.append(party)
            return False

        hansa.simulate(hansa.FedSGD(), task, rounds=1, cohort=0.3, seed=seed, absent=watch, engine="reference")
        assert len(set(asked)) == len(asked) == 3
        assert asked == sorted(asked)
        seen += asked
    counts = torch.bincount(torch.tensor(seen), minlength=10)
    # 300 draws of 10 parties: 30 each, variance 100 * 0.3 * 0.7 = 21; five standard deviations.
    assert float((counts - 30).abs().max()) < 5 * math.sqrt(21)


# --- stacks ---


def stack(count: int, weights: list[int] | None = None, seed: int = 0) -> tuple[Replies, list[tuple[int, Reply]]]:
    """Replies of parties 0, 2, 4, ... as a stack, and the same one by one."""
    draws = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, 3, generator=draws) * 10.0 ** torch.randint(-6, 6, (count, 1), generator=draws)
    weights = weights or [1 + 7 * k for k in range(count)]
    losses = [0.5 + k for k in range(count)]
    parties = [2 * k for k in range(count)]
    one_by_one = [
        (p, Reply({"w": rows[k].clone()}, weights[k], metrics={"train_loss": losses[k]})) for k, p in enumerate(parties)
    ]
    return Replies(parties, {"w": rows}, weights, metrics={"train_loss": losses}), one_by_one


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("count", [1, 31, 32, 33, 100])
def test_a_stack_of_replies_gives_the_bits_of_the_same_replies_one_by_one(count: int, uniform: bool) -> None:
    stacked, alone = stack(count)
    parts = [
        Replies(stacked.parties[a:b], {"w": stacked.tensors["w"][a:b]}, stacked.weights[a:b],
                metrics={"train_loss": stacked.metrics["train_loss"][a:b]})
        for a, b in ((0, count // 3), (count // 3, count)) if b > a
    ]  # fmt: skip
    records = [Record(), Record()]
    answers = [
        combine(ask(2 * count, uniform=uniform), outcomes, Rules(), record)
        for outcomes, record in ((alone, records[0]), (parts, records[1]))
    ]
    one, other = answers
    assert isinstance(one, Reduced) and isinstance(other, Reduced)
    assert torch.equal(one.sums["w"], other.sums["w"])
    assert (one.weight, one.count, one.metrics) == (other.weight, other.count, other.metrics)
    assert records[0].fused == records[1].fused
    assert (records[0].asked, records[0].bytes_up) == (records[1].asked, records[1].bytes_up)


@pytest.mark.parametrize(
    ("spoil", "rules"),
    [
        (lambda s: s.tensors["w"][3].fill_(float("nan")), Rules()),
        (lambda s: s.tensors["w"][3].fill_(float("-inf")), Rules()),
        (lambda s: s.weights.__setitem__(3, 0), Rules()),
        (lambda s: s.weights.__setitem__(3, 2**53), Rules()),
        (lambda s: s.weights.__setitem__(3, 1000), Rules(max_weight=500)),
        (lambda s: s.metrics["train_loss"].__setitem__(3, float("inf")), Rules()),
        (lambda s: s.tensors["w"][3].fill_(1e20), Rules(max_norm=1e15)),
    ],
)
def test_one_bad_reply_of_a_stack_is_rejected_and_the_others_are_fused(spoil: Any, rules: Rules) -> None:
    stacked, _ = stack(6)
    spoil(stacked)
    record = Record()
    answer = combine(ask(12), [stacked], rules, record)
    assert isinstance(answer, Reduced)
    assert set(record.rejected) == {6}
    assert answer.count == 5
    assert record.fused == {0, 2, 4, 8, 10}


def test_numbers_whose_sum_overflows_are_finite_all_the_same() -> None:
    stacked, _ = stack(3)
    stacked.tensors["w"].fill_(3e38)
    record = Record()
    combine(ask(6), [stacked], Rules(), record)
    assert record.accepted == 3


def test_gathered_replies_outlive_the_stack_they_came_in() -> None:
    stacked, alone = stack(4)
    answer = combine(ask(8, "gather"), [stacked], Rules(), Record())
    assert isinstance(answer, Gathered)
    stacked.tensors["w"].zero_()
    assert all(torch.equal(a.tensors["w"], b.tensors["w"]) for a, (_, b) in zip(answer.replies, alone, strict=True))


def test_a_large_weight_does_not_change_how_a_sum_is_rounded() -> None:
    x = torch.tensor([1 / 3, 1e-8, 7.7], dtype=torch.float32)
    for weight in (2**29 - 1, 2**29 + 1, 2**40 + 1):
        total = BlockSum()
        total.add({"w": x}, 3)
        total.add({"w": x}, weight)
        assert torch.equal(total.result()["w"], x.double() * 3 + x.double() * weight)


def test_a_gathered_reply_has_the_seconds_of_its_own_party() -> None:
    record = Record(seconds={0: 1.0, 1: 2.0, 2: 3.0})
    answer = Gathered((0, 2), (reply(0), reply(2)))
    timed = record.timed(answer)
    assert isinstance(timed, Gathered)
    assert timed.seconds == (1.0, 3.0)
    assert Record().timed(answer) is answer


def vector(*values: float) -> dict[str, Any]:
    return {**MODEL, "w": torch.tensor(values, dtype=torch.float32)}


def test_a_reply_is_checked_against_what_its_own_party_was_sent() -> None:
    question = Ask("gather", 0, "round", 0, SGD(), PAYLOAD, (0, 1), each={1: {"model": vector(0, 0)}})
    record = Record()
    answer = combine(question, [(0, "it did not answer"), (1, reply(1, 2))], Rules(), record)
    assert isinstance(answer, Gathered)
    assert (answer.parties, record.rejected) == ((1,), {})
    combine(question, [(0, reply(1, 2, 3)), (1, reply(1, 2, 3))], Rules(), record)
    assert record.rejected == {1: "w has the shape (3,), expected (2,)"}


def test_a_stack_is_checked_against_what_each_of_its_parties_was_sent() -> None:
    both = {party: {"model": vector(0, 0)} for party in (0, 1)}
    rows = Replies([0, 1], {"w": torch.ones(2, 2)}, [1, 1])
    answer = combine(Ask("reduce", 0, "round", 0, SGD(), PAYLOAD, (0, 1), each=both), [rows], Rules(), Record())
    assert isinstance(answer, Reduced)
    assert answer.sums["w"].tolist() == [2, 2]
    record = Record()
    rows = Replies([0, 1], {"w": torch.ones(2, 3)}, [1, 1])
    combine(Ask("reduce", 0, "round", 0, SGD(), PAYLOAD, (0, 1), each={1: both[1]}), [rows], Rules(), record)
    assert record.rejected == {1: "w has the shape (3,), expected (2,)"}


def test_the_length_of_an_update_is_bounded_by_the_model_that_its_party_was_sent() -> None:
    question = Ask("gather", 0, "round", 0, SGD(), PAYLOAD, (0, 1), each={1: {"model": vector(3, 4, 0)}})
    record = Record()
    combine(question, [(0, reply(0, 0, 1.5)), (1, reply(0, 0, 5.5))], Rules(growth=1.0), record)
    assert record.rejected == {0: "the norm of its update, 1.5, is over the limit of 1"}
    record = Record()
    combine(question, [(0, reply(0, 0, 0.5)), (1, reply(0, 0, 6.5))], Rules(growth=1.0), record)
    assert record.rejected == {1: "the norm of its update, 6.5, is over the limit of 6"}


class Own(SGD):
    """A solver that declares its own metric and the metric's range."""

    measures = None
    ranges: ClassVar[dict[str, tuple[float, float]]] = {"kept": (0.0, 1.0)}


@pytest.mark.parametrize(("name", "low", "high"), [
    ("accuracy", 0.0, 1.0), ("auc", 0.0, 1.0), ("r2", -1e100, 1.0), ("rmse", 0.0, 1e100), ("mae", 0.0, 1e100),
    ("train_loss", -1e100, 1e100), ("loss", -1e100, 1e100), ("kept", 0.0, 1.0), ("whatever", -1e100, 1e100),
])  # fmt: skip
def test_a_metric_lies_in_its_range_or_its_reply_is_rejected(name: str, low: float, high: float) -> None:
    op = Own()

    def said(value: float, rules: Rules | None = None) -> str | None:
        one = reply(1, 2, 3, **{name: value})
        whole = Replies([0, 1], {"w": torch.stack([one.tensors["w"]] * 2)}, [1, 1], {}, {name: [0.5, value]})
        found = fault(one, op, PAYLOAD, rules or Rules())
        if rules is None:  # with limits that depend on what a party was sent, replies are looked at one by one
            assert (stack_fault(whole, op, [PAYLOAD], Rules()) is None) == (found is None)
        return found

    assert said(low) is None and said(high) is None
    for beyond in (math.nextafter(low, -math.inf), math.nextafter(high, math.inf), 1.7e308, -1.7e308):
        assert f"its metric {name} is" in str(said(beyond))
    assert said(min(high, 5.0), Rules(worst=5.0)) is None
    assert said(6.0, Rules(worst=5.0)) is not None
    if name in ("loss", "train_loss"):  # relative to the model that the party was sent
        sent = {"model": {**MODEL, "w": torch.tensor([3.0, 4.0, 0.0])}}
        assert fault(reply(1, 2, 3, **{name: 180.0}), op, sent, Rules(worst=5.0)) is None
        assert fault(reply(1, 2, 3, **{name: 180.1}), op, sent, Rules(worst=5.0)) is not None
        assert "must lie in 0.." in str(fault(reply(1, 2, 3, **{name: -1e-9}), op, PAYLOAD, Rules(named_loss=True)))


def test_metrics_are_few_and_have_short_names_where_an_op_lets_any_pass() -> None:
    many = {f"m{k}": 1.0 for k in range(65)}
    assert "more than 64 metrics" in str(fault(reply(1, 2, 3, **many), Own(), PAYLOAD, Rules()))
    many.pop("m0")
    assert fault(reply(1, 2, 3, **many), Own(), PAYLOAD, Rules()) is None
    assert "more than 64 characters" in str(fault(reply(1, 2, 3, **{"m" * 65: 1.0}), Own(), PAYLOAD, Rules()))


@given(st.lists(st.tuples(st.floats(-1e100, 1e100), st.integers(1, 2**53 - 1)), min_size=1, max_size=50))
def test_no_mean_of_metrics_within_their_ranges_overflows(given: list[tuple[float, int]]) -> None:
    outcomes = [(k, reply(1, 2, 3, weight=weight, train_loss=value)) for k, (value, weight) in enumerate(given)]
    record = Record()
    answer = combine(ask(len(given)), outcomes, Rules(), record)
    assert isinstance(answer, Reduced)
    low, high = min(v for v, _ in given), max(v for v, _ in given)
    slack = 1e-9 * max(abs(low), abs(high))
    assert low - slack <= answer.metrics["train_loss"] <= high + slack


def test_a_capped_reply_may_hold_what_its_own_samples_make() -> None:
    """A party with far more samples was once rejected: its counter was compared with the capped weight."""
    steps = {500: 16, 10**6: 31_250}
    payload = {"model": {**MODEL, "counts": torch.zeros(1, dtype=torch.int64)}}
    outcomes = [(k, Reply({"w": torch.full((3,), float(k))}, n, {"counts": torch.tensor([steps[n]])}))
                for k, n in enumerate((500, 500, 10**6))]  # fmt: skip
    record, asked = Record(), Ask("reduce", 0, "round", 0, SGD(batch=32), payload, (0, 1, 2))
    answer = combine(asked, outcomes, Rules(), record, heaviest=5000)
    assert isinstance(answer, Reduced) and not record.rejected and list(record.capped) == [2]
    assert answer.weight == 6000 and torch.equal(answer.sums["w"], torch.full((3,), 500.0 + 10_000.0).double())
    assert answer.maxima["counts"].tolist() == [31_250]
