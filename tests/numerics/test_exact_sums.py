"""Exact sums and partial sums: any grouping of the parties gives the same bits, and nobody is trusted with a count."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hansa.core import sums
from hansa.core.ask import Ask, Reduced
from hansa.core.op import Replies, Reply
from hansa.core.plain_data import build
from hansa.core.relay import KEYS
from hansa.core.round_record import Record
from hansa.core.sums import StoredReply
from hansa.data.prepare import ColumnMoments
from hansa.local import SGD
from hansa.numerics.exact_sums import (
    EXPONENTS,
    LIMBS,
    WIDE,
    ExactSum,
    from_steps,
    rounded,
    steps_of_limbs,
    steps_to_limbs,
    too_large,
)
from hansa.plumbing import codec
from hansa.plumbing.errors import DataError, RoundAborted
from hansa.replies.partial_sums import PartialSum, ReplySum, unsuitable
from hansa.replies.replies import combine, reply_size
from hansa.replies.reply_checks import Rules, fault
from hansa.transforms import Int8

MODEL = {"w": torch.zeros(3), "stats": torch.zeros(0), "counts": torch.zeros(2, dtype=torch.int64)}
EXACT = Rules(exact=True)
GRID = 2.0 ** EXPONENTS[-1]
FINE = 2.0 ** WIDE[-1]  # of float64


def reply(*values: float, weight: Any = 1, counts: tuple[int, int] = (0, 0), **metrics: float) -> Reply:
    return Reply({"w": torch.tensor(values, dtype=torch.float32)}, weight, {"counts": torch.tensor(counts)}, metrics)


def ask(parties: int, verb: Any = "reduce", uniform: bool = False, op: Any = None) -> Ask:
    return Ask(verb, 0, "round", 0, op or SGD(), {"model": MODEL}, tuple(range(parties)), uniform=uniform)


def summed(replies: list[Reply], uniform: bool = False) -> Reply:
    total = ReplySum(uniform)
    for one in replies:
        total.add(one)
    return total.reply()


def same(a: Any, b: Any) -> bool:
    """Whether two answers have the same bits."""
    return codec.encode(vars(a)) == codec.encode(vars(b))


def product_sum(values: list[float], weights: list[int]) -> float:
    """The sum of weight times value by `math.fsum`, with each product on the grid."""
    return math.fsum(round((v * w) / FINE) * FINE for v, w in zip(values, weights, strict=True))


numbers = (st.floats(-1e15, 1e15, width=64) | st.floats(-1.0, 1.0, width=32) | st.floats(-1e40, 1e40, width=64)
           | st.sampled_from([0.0, -0.0, 1e-30, -GRID, -FINE]))  # fmt: skip
columns = st.lists(st.tuples(numbers, st.integers(1, 1000)), min_size=1, max_size=40)


@given(columns)
@settings(max_examples=150)
def test_an_exact_sum_is_the_nearest_float64_of_the_sum(terms: list[tuple[float, int]]) -> None:
    values, weights = [v for v, _ in terms], [w for _, w in terms]
    total = ExactSum()
    for value, weight in terms:
        total.add({"x": torch.tensor([value], dtype=torch.float64)}, weight)
    assert float(total.result()["x"]) == product_sum(values, weights)
    rows = ExactSum()
    rows.add_rows({"x": torch.tensor(values, dtype=torch.float64).unsqueeze(1)}, weights)
    assert torch.equal(rows.partial()["limbs/x"], total.partial()["limbs/x"])


def test_float32_values_of_usual_sizes_are_summed_without_any_rounding() -> None:
    values = torch.randn(500, generator=torch.Generator().manual_seed(0)) * 1e-3
    weights = [n % 997 + 1 for n in range(500)]
    total = ExactSum()
    total.add_rows({"x": values.unsqueeze(1)}, weights)
    assert float(total.result()["x"]) == math.fsum(float(v) * w for v, w in zip(values, weights, strict=True))


def grouped(draw: Any, replies: list[Reply]) -> list[Reply]:
    """The replies in another order, some of them in partial sums, and partial sums of partial sums."""
    left = list(draw(st.permutations(replies)))
    for _ in range(draw(st.integers(0, 3))):
        size = draw(st.integers(2, max(2, len(left))))
        if len(left) >= size:
            left = [*left[size:], summed(left[:size])]
    return left


@st.composite
def cohorts(draw: Any) -> tuple[list[Reply], list[Reply]]:
    finite = st.floats(-1e9, 1e9, width=32)
    one = st.builds(
        lambda values, weight, counts, metrics: reply(*values, weight=weight, counts=counts, **metrics),
        st.tuples(finite, finite, finite),
        st.integers(1, 10**6),
        st.tuples(st.integers(0, 9), st.integers(0, 9)),
        st.dictionaries(st.just("train_loss"), st.floats(0, 1e6), max_size=1),
    )
    replies = draw(st.lists(one, min_size=2, max_size=12))
    return replies, grouped(draw, replies)


def reduced(replies: list[Reply], rules: Rules = EXACT, uniform: bool = False) -> tuple[Reduced, Record]:
    """The answer to an ask whose replies come in this order, each reply for as many parties as it stands for."""
    outcomes: list[Any] = []
    at = 0
    for one in replies:
        parties = tuple(range(at, at + one.count))
        outcomes.append(PartialSum("relay", parties, one) if one.count > 1 else (at, one))
        at += one.count
    record = Record()
    answer = combine(ask(at, uniform=uniform), outcomes, rules, record)
    assert isinstance(answer, Reduced)
    return answer, record


@given(cohorts())
@settings(max_examples=150)
def test_any_grouping_and_order_of_the_parties_gives_the_same_bits(cohort: tuple[list[Reply], list[Reply]]) -> None:
    single, groups = cohort
    one, record = reduced(single)
    other, recorded = reduced(groups)
    assert same(one, other)
    assert (record.asked, record.accepted, record.fused, record.metrics) == (
        (recorded.asked, recorded.accepted, recorded.fused, recorded.metrics)
    )


@pytest.mark.parametrize("scale", [1e-24, 1.0, 1e36])
def test_moments_of_every_scale_pass_through_partial_sums(scale: float) -> None:
    draws = torch.Generator().manual_seed(0)
    replies = [
        Reply({"count": torch.full((3,), 9), "sum": torch.randn(3, generator=draws, dtype=torch.float64) * scale**0.5,
               "square": torch.rand(3, generator=draws, dtype=torch.float64) * scale}, 9)
        for _ in range(6)
    ]  # fmt: skip
    question = Ask("reduce", 0, "prepare", 0, ColumnMoments(), {"centre": torch.zeros(3).double()}, tuple(range(6)))
    one = combine(question, list(enumerate(replies)), EXACT, Record())
    behind = summed([summed(replies[1:3]), *replies[3:]])
    groups: list[Any] = [(0, replies[0]), PartialSum("relay", (1, 2, 3, 4, 5), behind)]
    record = Record()
    assert same(one, combine(question, groups, EXACT, record)) and not record.rejected
    assert isinstance(one, Reduced)
    squares = [math.fsum(float(reply.tensors["square"][k]) * 9 for reply in replies) for k in range(3)]
    assert one.sums["square"].tolist() == pytest.approx(squares, rel=1e-11, abs=0)


def test_a_stack_and_files_give_the_bits_of_single_replies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draws = torch.Generator().manual_seed(1)
    w = torch.randn(70, 3, generator=draws) * 100
    replies = [reply(*w[k].tolist(), weight=k + 1, train_loss=k / 7) for k in range(70)]
    one, _ = reduced(replies)
    counts = {"counts": torch.zeros(70, 2, dtype=torch.int64)}
    stack = Replies(list(range(70)), {"w": w}, list(range(1, 71)), counts, {"train_loss": [k / 7 for k in range(70)]})
    stacked = combine(ask(70), [stack], EXACT, Record())
    assert same(one, stacked)
    monkeypatch.setattr(sums, "WIDE", 1)
    stored = []
    for k, each in enumerate(replies):
        (tmp_path / str(k)).write_bytes(codec.encode(each.tree()))
        stored.append((k, StoredReply.read(tmp_path / str(k))))
    assert same(one, combine(ask(70), stored, EXACT, Record()))
    halves: list[Any] = [*stored[:35], PartialSum("relay", tuple(range(35, 70)), summed(replies[35:]))]
    assert same(one, combine(ask(70), halves, EXACT, Record()))


def test_the_default_sums_depend_on_the_grouping_and_exact_sums_do_not() -> None:
    values = [1.0, 2.0**-53, 2.0**-53]
    ordered, _ = reduced([Reply({"w": torch.tensor([v] * 3)}, 1, {"counts": torch.zeros(2, dtype=torch.int64)})
                          for v in values], Rules())  # fmt: skip
    exact, _ = reduced([reply(v, v, v) for v in values])
    assert ordered.sums["w"].tolist() == [1.0] * 3
    assert exact.sums["w"].tolist() == [1.0 + 2.0**-52] * 3


def test_limbs_are_carried_in_time_and_hold_the_largest_sums() -> None:
    largest = math.nextafter(2.0**156, 0)
    total, steps = ExactSum(), 0
    big = ExactSum()
    big.add_rows({"x": torch.full((64, 1), largest, dtype=torch.float64)}, [1] * 64)
    for _ in range(600):  # more additions than the limbs hold without a carry
        total.add_partial(big.partial())
        steps += steps_of_limbs(big.partial()["limbs/x"][:, 0].tolist(), WIDE)
    total.add({"x": torch.tensor([-0.3], dtype=torch.float64)}, 1)
    steps += round(-0.3 / FINE)
    assert abs(int(total.partial()["limbs/x"][0])) > 2**53
    assert float(total.result()["x"]) == steps * FINE


def test_limbs_do_not_overflow_in_large_cohorts() -> None:
    total = ExactSum()
    total.add_rows({"x": torch.full((80_000, 1), 2.0**19)}, [1] * 80_000)  # 2^47 units each: 2^63 without a carry
    assert float(total.result()["x"]) == 80_000 * 2.0**19


edges = st.sampled_from([-(2**47), -(2**47) + 1, -1, 0, 1, 2**47 - 1]) | st.integers(-(2**47), 2**47 - 1)


@given(st.integers(-(2**54), 2**54), edges, edges)
@settings(max_examples=500)
def test_limbs_are_rounded_once_to_the_nearest_number(first: int, second: int, third: int) -> None:
    found = rounded(torch.tensor([[first], [second], [third]]))
    assert float(found) == from_steps(steps_of_limbs([first, second, third]))


@given(st.lists(edges | st.just(0), min_size=5, max_size=5), st.sampled_from([0, 0, 1, -1, 2**54]))
def test_six_limbs_are_rounded_once_to_the_nearest_number(rest: list[int], first: int) -> None:
    limbs = [first, *rest]
    assert float(rounded(torch.tensor(limbs).unsqueeze(1))) == steps_of_limbs(limbs, WIDE) * FINE


def test_a_float64_is_exact_where_a_float32_is_not_and_both_add_up() -> None:
    """A rescaled reply may have float64 where others have float32."""
    tiny, huge = 3e-33, 2.0**140
    for values in ([tiny, huge, -huge], [huge, tiny, -huge]):
        total = ExactSum()
        for k, value in enumerate(values):
            total.add({"x": torch.tensor([value, 0.5 * k], dtype=torch.float64)}, 1)
        assert total.result()["x"].tolist() == [pytest.approx(tiny, rel=1e-4), 1.5]
    mixed = ExactSum()
    for k, dtype in enumerate((torch.float32, torch.float64, torch.float32)):
        mixed.add({"x": torch.tensor([1.5 * k], dtype=dtype)}, 2)
        other = ExactSum()
        other.add({"x": torch.tensor([1.0], dtype=dtype)}, 1)
        mixed.add_partial(other.partial())
    assert mixed.result()["x"].tolist() == [12.0]
    assert too_large({"x": torch.tensor([2.0**60])}, 1) is not None
    assert too_large({"x": torch.tensor([2.0**155], dtype=torch.float64)}, 1) is None
    assert "reach 2^156" in str(too_large({"x": torch.tensor([2.0**155], dtype=torch.float64)}, 2))


def test_a_sum_next_to_the_middle_of_two_numbers_goes_to_the_nearer_one() -> None:
    for first in (2**52 + 7, 2**52 + 8, -(2**52) - 7, -(2**52) - 8):  # the next float64 is a whole unit away
        for third in (-1, 0, 1):
            limbs = [first, -(2**47), third]
            assert float(rounded(torch.tensor(limbs).unsqueeze(1))) == from_steps(steps_of_limbs(limbs))


@given(st.integers(-(2**150), 2**150))
def test_limbs_have_one_form_for_each_number(steps: int) -> None:
    limbs = steps_to_limbs(steps)
    assert len(limbs) == LIMBS and steps_of_limbs(limbs) == steps
    assert all(-(2**47) <= limb < 2**47 for limb in limbs[1:])


@pytest.mark.parametrize(("value", "weight", "fits"), [
    (2.0**50, 2**9, True), (2.0**50, 2**10, False), (-(2.0**50), 2**10, False), (3e38, 1, False)
])  # fmt: skip
def test_a_value_that_does_not_fit_is_rejected_with_its_party(value: float, weight: int, fits: bool) -> None:
    replies = [reply(1, 2, 3), reply(0, value, 0, weight=weight), reply(3, 2, 1)]
    answer, record = reduced(replies)
    assert answer.count == (3 if fits else 2)
    assert record.rejected == ({} if fits else {
        1: "w has values that reach 2^60 when multiplied by its weight, too large for an exact sum"})  # fmt: skip
    tensors = {"w": torch.stack([one.tensors["w"] for one in replies])}
    counts = {"counts": torch.zeros(3, 2, dtype=torch.int64)}
    stack = Replies([0, 1, 2], tensors, [1, weight, 1], counts)
    assert same(answer, combine(ask(3), [stack], EXACT, Record()))
    assert fault(replies[1], SGD(), {"model": MODEL}, Rules()) is None  # the default sums take it
    total = ReplySum()
    if not fits:
        with pytest.raises(DataError, match=r"2\^60"):
            total.add(replies[1])
    for bad in (reply(0, math.nan, 0), reply(0, 0, math.inf), reply(0, 0, 0, train_loss=1e30)):
        with pytest.raises(DataError):
            total.add(bad)


def test_integers_and_counters_are_part_of_a_partial_sum() -> None:
    replies = [Reply({"n": torch.tensor([k, -k])}, 2, {"most": torch.tensor([k])}) for k in range(5)]
    total = summed(replies)
    assert total.tensors["n"].tolist() == [20, -20] and total.tensors["n"].dtype == torch.int64
    assert total.maxima["most"].tolist() == [4] and (total.weight, total.count) == (10, 5)
    assert summed(replies, uniform=True).tensors["n"].tolist() == [10, -10]


# Nobody is trusted with a count


def changed(**fields: Any) -> Reply:
    """A partial sum of two parties with other fields, or with other tensors."""
    total = summed([reply(1, 2, 3, weight=4, train_loss=1.0), reply(3, 2, 1, weight=6, train_loss=3.0)])
    for name, value in fields.items():
        if name in ("count", "weight", "metrics"):
            setattr(total, name, value)
        else:
            total.tensors[name.replace("__", "/")] = value
    return total


def limbs(first: int = 0, second: int = 0) -> Tensor:
    return torch.tensor([[first] * 3, [second] * 3, [0] * 3])


def metric(weight: int = 10, count: int = 2, mean: float = 1.0) -> Tensor:
    return torch.tensor([*steps_to_limbs(round(mean * weight / GRID)), weight, count])


@pytest.mark.parametrize(("partial", "reason"), [
    (changed(count=3), "it stands for 3 parties, and its sender was given 2"),
    (changed(count=1), "it stands for 1 parties, and its sender was given 2"),
    (changed(count=0), "it stands for 0 parties"),
    (changed(count=-2), "it stands for -2 parties"),
    (changed(count=True), "it stands for True parties"),
    (changed(count=2.0), "it stands for 2.0 parties"),
    (changed(weight=201), "its weight is 201, and that of 2 parties lies in 2..200"),
    (changed(weight=1), "its weight is 1"),
    (changed(weight=-4), "its weight is -4"),
    (changed(limbs__w=torch.zeros(3, 4, dtype=torch.int64)), r"limbs/w has the shape (3, 4), expected (3, 3)"),
    (changed(limbs__w=torch.zeros(3, 3)), "limbs/w is torch.float32, expected torch.int64"),
    (changed(w=torch.zeros(3)), "it has the tensors ['limbs/w', 'w'], expected ['limbs/w']"),
    (changed(limbs__w=limbs(second=2**47)), "the sums limbs/w are not in canonical form"),
    (changed(limbs__w=limbs(first=2**42)), "the sums limbs/w are larger than the sum of 2 parties can be"),
    (changed(limbs__w=limbs(first=-(2**63))), "larger than the sum of 2 parties can be"),
    (changed(metrics={"train_loss": 1.0}), "it has metrics outside its sums"),
    (changed(metrics__fame=metric()), "it has the metrics ['fame'], which were not asked for"),
    (changed(metrics__train_loss=metric(weight=11)), "its metric train_loss has the weight 11 of 2 parties"),
    (changed(metrics__train_loss=metric(count=3)), "the weight 10 of 3 parties"),
    (changed(metrics__train_loss=metric(weight=0)), "the weight 0 of 2 parties"),
    (changed(metrics__train_loss=torch.zeros(4, dtype=torch.int64)), "is not 5 whole numbers"),
    (changed(metrics__train_loss=metric(mean=-1.0)), "its metric train_loss is -1, and must lie in 0.."),
])  # fmt: skip
def test_a_partial_sum_that_lies_is_rejected_by_its_senders_name(partial: Reply, reason: str) -> None:
    rules, record = Rules(exact=True, max_weight=100, named_loss=True), Record()
    honest = reply(1, 1, 1, weight=2)
    answer = combine(ask(3), [(0, honest), PartialSum("relay eve", (1, 2), partial)], rules, record)
    assert isinstance(answer, Reduced)
    assert answer.sums["w"].tolist() == [2, 2, 2]  # as if the partial sum had not come
    assert (record.asked, record.accepted, answer.count, answer.weight) == (3, 1, 1, 2)
    assert set(record.rejected) == {1, 2}
    for why in record.rejected.values():
        assert why.startswith("the partial sum of relay eve: ") and reason in why


def test_the_partial_sum_of_the_hostile_test_is_fine_when_nothing_is_changed() -> None:
    rules, record = Rules(exact=True, max_weight=100, named_loss=True), Record()
    answer = combine(ask(2), [PartialSum("relay eve", (0, 1), changed())], rules, record)
    assert isinstance(answer, Reduced)
    assert answer.sums["w"].tolist() == [22, 20, 18] and answer.metrics == {"train_loss": 2.2}
    assert not record.rejected and record.fused == {0, 1}


@pytest.mark.parametrize("parties", [(1, 1), (0, 1), (2, 3)], ids=["twice", "answered", "not asked"])
def test_a_party_is_in_one_answer_only(parties: tuple[int, int]) -> None:
    record = Record()
    answer = combine(ask(3), [(0, reply(1, 1, 1)), PartialSum("relay", parties, changed())], EXACT, record)
    assert isinstance(answer, Reduced) and answer.count == 1
    assert "it names a party that was not asked, or that has answered already" in record.rejected[parties[1]]


def test_a_party_cannot_stand_for_others() -> None:
    for count in (0, -1, 2, 10**9):
        boast = reply(1, 2, 3, weight=5)
        boast.count = count
        for rules in (Rules(), EXACT):
            why = fault(Reply.of_tree(codec.decode(codec.encode(boast.tree()))), SGD(), {"model": MODEL}, rules)
            assert why == f"it stands for {count} parties, and a party answers for itself alone"


def test_uniform_weights_count_parties() -> None:
    replies = [reply(1, 2, 3, weight=4), reply(3, 2, 1, weight=6)]
    one, _ = reduced(replies, uniform=True)
    record = Record()
    outcomes = [PartialSum("relay", (0, 1), summed(replies, uniform=True))]
    assert same(one, combine(ask(2, uniform=True), outcomes, EXACT, record))
    heavy = [PartialSum("relay", (0, 1), summed(replies)), (2, reply(1, 1, 1))]
    combine(ask(3, uniform=True), heavy, EXACT, record)
    assert "its weight is 10, and that of 2 parties lies in 2..2" in record.rejected[0]


@pytest.mark.parametrize(("verb", "rules", "op", "reason"), [
    ("gather", EXACT, None, "the ask does not sum replies"),
    ("reduce", Rules(), None, "run.sums is not 'exact'"),
    ("reduce", Rules(exact=True, max_norm=1.0), None, "the norm of each update is limited"),
    ("reduce", Rules(exact=True, growth=1e9), None, "the norm of each update is limited"),
    ("reduce", Rules(exact=True, max_stats=1.0), None, "the running statistics of each party are limited"),
    ("reduce", EXACT, Int8().around(SGD()), "each reply is packed by a transform"),
])  # fmt: skip
def test_what_looks_at_each_party_excludes_partial_sums(verb: Any, rules: Rules, op: Any, reason: str) -> None:
    question, record = ask(3, verb, op=op), Record()
    assert reason in str(unsuitable(question, rules))
    with pytest.raises(RoundAborted, match="0 usable replies"):
        combine(question, [PartialSum("relay", (0, 1), changed()), (2, "it is away")], rules, record)
    assert f"it stands for several parties, which is not possible here: {reason}" in record.rejected[0]


def test_sums_outside_the_rounds_are_exact_too_but_those_of_a_protocol_keep_their_own_numbers() -> None:
    assert EXACT.of(Ask("reduce", 0, "evaluate", 0, SGD(), {}, (0,))).exact
    assert not EXACT.of(Ask("gather", 0, "round.0", 0, build("op", KEYS), {}, (0,))).exact


def test_a_capped_weight_or_a_recorded_loss_excludes_partial_sums() -> None:
    partial = PartialSum("relay", (0, 1), changed())
    record = Record()
    combine(ask(3), [partial, (2, reply(1, 1, 1))], EXACT, record, heaviest=10)
    assert "the weight of each party is capped" in record.rejected[0]
    record = Record(each={})
    combine(ask(3), [partial, (2, reply(1, 1, 1))], EXACT, record)
    assert "the loss of each party is recorded" in record.rejected[1]


def test_a_reply_for_one_party_travels_as_before() -> None:
    one = reply(1, 2, 3, weight=5, train_loss=0.5)
    assert set(one.tree()) == {"tensors", "weight", "maxima", "metrics"}
    total = summed([one, one])
    back = Reply.of_tree(codec.decode(codec.encode(total.tree())))
    assert (back.count, back.weight) == (2, 10) and same(back, total)
    assert reply_size(one) == len(codec.encode(one.tree()))
    assert reply_size(total) == len(codec.encode(total.tree()))
    for bad in (torch.tensor(2.0), torch.tensor([2]), 2):
        with pytest.raises(DataError, match="its count is not one whole number"):
            Reply.of_tree({**one.tree(), "count": bad})
