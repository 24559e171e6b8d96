"""Sums over samples are bounded by the number of samples that their parties state."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hansa.classical.counts import SplitCounts
from hansa.classical.naive_bayes import ClassMoments
from hansa.classical.trees.forest_ops import ForestHistograms
from hansa.core.ask import Ask, Reduced
from hansa.core.class_counts import ClassCounts
from hansa.core.op import Memory, Op, Party, Payload, Replies, Reply, Shape
from hansa.core.registry import register
from hansa.core.round_record import Record
from hansa.core.sample_bounds import Bounds, PerSample, rescaled, sample_fault, share_of
from hansa.core.sums import StoredReply
from hansa.local import SGD
from hansa.plumbing import codec
from hansa.replies.partial_sums import PartialSum, ReplySum
from hansa.replies.replies import combine
from hansa.replies.reply_checks import Rules, fault, stack_fault
from hansa.secure.channel import Encoded
from hansa.secure.masking import Masking


@register("two-sums")
@dataclass(frozen=True)
class TwoSums(Op):
    """Counts, a sum of numbers up to 8 in whole units, a real sum up to 0.5 per sample, and a mark of the party."""

    per_sample: ClassVar[Bounds] = {
        "counts": PerSample(over=(-1,)), "units": PerSample(torch.tensor([8.0, 2.0, 1.0]), signed=True),
        "real": PerSample(0.5, signed=True), "mark": PerSample(per_party=True),
    }  # fmt: skip

    def expects(self, payload: Payload) -> dict[str, Shape]:
        three: Shape = ((3,), torch.int64)
        return {"counts": three, "units": three, "real": ((2,), torch.float64), "mark": ((), torch.int64)}

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        raise NotImplementedError


def sums(n: int, times: int = 1, weight: int | None = None) -> Reply:
    tensors = {"counts": torch.tensor([n // 2, n - n // 2, 0]) * times, "units": torch.tensor([-8 * n, n, 1]) * times,
               "real": torch.tensor([0.5 * n, -0.1]) * times, "mark": torch.tensor(1)}  # fmt: skip
    return Reply({**tensors, "real": tensors["real"].double()}, n if weight is None else weight)


def asked(parties: int, op: Op | None = None) -> Ask:
    return Ask("reduce", 0, "round", 0, op or TwoSums(), {}, tuple(range(parties)), uniform=True)


def answer(replies: list[Reply], rules: Rules | None = None, heaviest: int | None = None) -> tuple[Reduced, Record]:
    record = Record()
    found = combine(asked(len(replies)), list(enumerate(replies)), rules or Rules(), record, heaviest=heaviest)
    assert isinstance(found, Reduced)
    return found, record


@given(st.integers(1, 2**53 - 1), st.integers(1, 2**53 - 1), st.integers(0, 2**53 - 1), st.integers(1, 2**12))
def test_a_rescaled_sum_keeps_to_its_limit_and_to_its_counts(samples: int, limit: int, value: int, most: int) -> None:
    samples, limit = max(samples, limit), min(samples, limit)
    numerator, shift = share_of(samples, limit)
    assert numerator * samples <= limit << shift < (numerator + 1) * samples and 2**8 <= numerator < 2**10
    count = min(value, samples)
    total = min(count * most, 2**53 - 1)
    tensors = {"count": torch.tensor([count]), "sum": torch.tensor([-total])}
    less = rescaled(tensors, {}, samples, limit)
    assert int(less["count"]) == -(-count * numerator >> shift) <= max(1, limit)
    assert abs(int(less["sum"])) <= most * int(less["count"]) and int(less["sum"]) <= 0
    assert (int(less["count"]) > 0) == (count > 0)


def test_a_reply_has_no_more_than_its_samples_add_up_to() -> None:
    assert fault(sums(100), TwoSums(), {}, Rules()) is None
    for name, place, value in (("counts", 2, 1), ("units", 1, 201), ("units", 0, -801), ("real", 1, 50.1)):
        bad = sums(100)
        bad.tensors[name][place] = value
        assert f"its {name} has numbers that are more than 100 samples can add up to" in str(
            fault(bad, TwoSums(), {}, Rules())
        )
    for name, value, reason in (("counts", -1, "negative"), ("mark", 2, "more than a party can"), ("mark", -1, "neg")):
        bad = sums(100)
        bad.tensors[name][...] = value
        assert reason in str(fault(bad, TwoSums(), {}, Rules()))
    wraps = Reply({"counts": torch.full((2**12,), 2**52)}, 10)  # as integers, these numbers add up to 0
    assert "more than 10 samples" in str(fault(wraps, ClassCounts(2**12), {}, Rules()))


def test_a_stack_is_checked_as_single_replies_are() -> None:
    def stacked(replies: list[Reply]) -> Replies:
        tensors = {name: torch.stack([r.tensors[name] for r in replies]) for name in replies[0].tensors}
        return Replies(list(range(len(replies))), tensors, [r.weight for r in replies])

    assert stack_fault(stacked([sums(100), sums(7), sums(1000)]), TwoSums(), [{}], Rules()) is None
    for bad in (sums(7, times=2, weight=7), sums(100, times=10, weight=999)):
        assert fault(bad, TwoSums(), {}, Rules()) is not None
        assert stack_fault(stacked([sums(100), bad, sums(1000)]), TwoSums(), [{}], Rules()) is not None


def test_sums_in_files_are_rescaled_as_those_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hansa.core.sums.WIDE", 1)
    replies, stored = [sums(100), sums(100, times=200, weight=20_000), sums(7)], list[Reply]()
    for k, reply in enumerate(replies):
        (tmp_path / str(k)).write_bytes(codec.encode(reply.tree()))
        stored.append(StoredReply.read(tmp_path / str(k)))
    (found, record), (other, again) = answer(stored, heaviest=1000), answer(replies, heaviest=1000)
    assert list(record.capped) == [1] and record.capped == again.capped
    assert all(torch.equal(found.sums[name], other.sums[name]) for name in other.sums)


def test_multiplied_sums_are_rejected_by_name_or_rescaled() -> None:
    honest = [sums(100 + k) for k in range(6)]
    alone, _ = answer(honest)
    found, record = answer([*honest, sums(100, times=200, weight=100)], heaviest=1000)
    assert list(record.rejected) == [6] and not record.capped
    assert all(torch.equal(found.sums[name], alone.sums[name]) for name in alone.sums)

    found, record = answer([*honest, sums(100, times=200, weight=20_000)], heaviest=1000)
    assert not record.rejected
    assert record.capped == {6: "its sums over 20000 samples count 0.04999 times, as 1000, 10 times the median of the "
                                "replies; run.max_weight sets another limit"}  # fmt: skip
    added = {name: found.sums[name] - alone.sums[name] for name in alone.sums}
    assert added["counts"].tolist() == [500, 500, 0] and added["mark"] == 1
    assert added["units"].tolist() == [-7999, 1000, 10] and 499 < added["real"][0] <= 500


def test_honest_sums_keep_every_bit_whatever_their_sizes_below_the_limit() -> None:
    replies = [sums(n) for n in (3, 100, 1000)]
    plain, record = answer(replies, heaviest=1000)
    free, _ = answer(replies)
    assert not record.capped and all(torch.equal(plain.sums[name], free.sums[name]) for name in free.sums)


def test_a_rescaled_sum_has_the_same_bits_in_exact_sums_and_in_any_order() -> None:
    replies = [sums(100), sums(100), sums(33_333)]
    plain, _ = answer(replies, heaviest=1000)
    record = Record()
    exact = combine(asked(3), list(enumerate(replies))[::-1], Rules(exact=True), record, heaviest=1000)
    assert isinstance(exact, Reduced)
    assert all(torch.equal(plain.sums[name], exact.sums[name]) for name in plain.sums)


def test_rescaled_moments_keep_the_means_of_rare_classes() -> None:
    count = torch.tensor([9997, 3, 0])
    moments = {"count": count, "sum": count[:, None] * torch.tensor([[0.5, 5.0]]).double(),
               "square": count[:, None] * torch.tensor([[1.0, 25.0]]).double()}  # fmt: skip
    less = rescaled(moments, ClassMoments.per_sample, 10_000, 400)
    assert less["count"].tolist() == [400, 1, 0]
    for name, mean in (("sum", [0.5, 5.0]), ("square", [1.0, 25.0])):
        assert torch.allclose(less[name][:2] / less["count"][:2, None], torch.tensor(mean).double(), rtol=1e-14)
        assert not less[name][2].any()


def test_many_small_counts_do_not_grow_when_they_are_rescaled() -> None:
    """Rounded up, each of them would count as a sample."""
    counts = SplitCounts((0, 1), 3, 1000, 2)
    less = counts.rescaled({"splits": torch.ones(2, 3, 1000, 2, dtype=torch.int64)}, 10**9, 400)
    assert not less["splits"].any()
    less = counts.rescaled({"splits": torch.full((2, 3, 1000, 2), 10**6)}, 4 * 10**9, 4000)
    assert 3900 < int(less["splits"].sum((0, 2, 3)).max()) <= 4000
    trees = ForestHistograms(classes=2, drawn=False)  # votes of two classes, and counts
    sums = torch.tensor([1, 0, 1])[None, :, None].repeat(32, 1, 64)
    less = trees.rescaled({"sums": sums}, 10**9, 400)
    assert not less["sums"][:, :2].any() and less["sums"][:, 2].unique().tolist() == [1]
    honest = torch.tensor([30, 70, 100])[None, :, None].repeat(32, 1, 64)
    less = trees.rescaled({"sums": honest}, 6400, 400)
    assert (less["sums"][:, :2].abs() <= less["sums"][:, 2:]).all() and int(less["sums"][0, 1, 0]) == 4


def test_the_record_does_not_speak_of_weights_that_do_not_count() -> None:
    """All replies to a uniform ask weigh 1, whatever they state."""
    w = {"w": torch.zeros(3)}
    model = {"model": {"w": torch.zeros(3), "stats": torch.zeros(0), "counts": torch.zeros(0, dtype=torch.int64)}}
    record = Record()
    ask = Ask("reduce", 0, "round", 0, SGD(), model, (0, 1, 2), uniform=True)
    outcomes: list[Any] = [(0, Reply(dict(w))), (1, Reply(dict(w))), (2, Reply(dict(w), 10**6))]
    found = combine(ask, outcomes, Rules(), record, heaviest=10)
    assert isinstance(found, Reduced) and found.weight == 3 and not record.capped


def test_a_partial_sum_has_no_more_than_its_parties_may_have() -> None:
    rules = Rules(exact=True, max_weight=100)
    for times, fits in ((1, True), (2, False)):
        total = ReplySum(uniform=True)
        for _ in range(2):
            total.add(sums(100, times))
        record = Record()
        partial = PartialSum("relay", (0, 1), total.reply(), checked=True)
        outcomes: list[Any] = [partial, (2, sums(10))]
        combine(asked(3), outcomes, rules, record)
        assert (not record.rejected) == fits, record.rejected
        assert fits or "more than 200 samples can add up to" in record.rejected[0]


def test_a_secure_sum_of_counts_has_no_more_room_than_the_largest_party_needs() -> None:
    channel = Masking(max_weight=1000)
    settings: dict[str, Any] = channel.settings(asked(4, ClassCounts(3)))
    assert settings["bits"] == 11
    settings = channel.settings(asked(4))  # real numbers: the range is the room
    assert settings["range"] == 8000.0
    op = Encoded(**channel.settings(asked(4, ClassCounts(3))))  # type: ignore[arg-type]
    party: Any = None
    small = Reply({"counts": torch.tensor([400, 600, 0])}, 1000)
    assert op.numbers(party, {}, small)[1:].tolist() == [400, 600, 0]
    large = Reply({"counts": torch.tensor([4000, 6000, 3])}, 10_003)
    counts = op.numbers(party, {}, large)[1:].tolist()
    assert sum(counts) <= 1024 and counts[2] == 1 and counts[1] == pytest.approx(1.5 * counts[0], rel=0.01)


def test_sums_without_a_bound_per_sample_keep_the_range_of_statistics() -> None:
    @register("free-sums")
    @dataclass(frozen=True)
    class FreeSums(Op):
        per_sample: ClassVar[Bounds] = {"sum": PerSample(None, signed=True)}

        def expects(self, payload: Payload) -> dict[str, Shape]:
            return {"sum": ((3,), torch.float64)}

    settings = Masking().settings(asked(4, FreeSums()))
    assert settings["range"] == 2.0**30 and settings["bits"] == 53
    assert sample_fault({"sum": torch.full((1, 3), -1e30)}, FreeSums.per_sample, [1]) is None
