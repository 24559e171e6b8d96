"""What ops, solvers, wrappers and algorithms are told: the party, the seed, the initial model, what was sent."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor

import hansa
from hansa.core.algorithm import Problem
from hansa.core.ask import Ask
from hansa.core.federation import Federation
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.predictor import NetworkPredictor
from hansa.core.registry import register
from hansa.core.wrapper import Around, Wrapper
from hansa.holdings.gateway import SampleGateway
from hansa.local import SGD, Context, LocalSolver
from hansa.local.solver import Carry
from hansa.numerics import rng
from hansa.numerics.params import Params, ParamSpec
from hansa.plumbing.errors import AlgorithmError, ConfigError, PartyError

SIZES = (9, 12, 7, 12)


def task(**given: Any) -> hansa.Task:
    draws = torch.Generator().manual_seed(1)
    pairs = [
        (torch.randn(n, 3, generator=draws, dtype=torch.float64), torch.randint(0, 2, (n,), generator=draws))
        for n in SIZES
    ]
    fields = {
        "model": lambda: torch.nn.Linear(3, 2).double(),
        "loss": "cross_entropy",
        "parties": pairs,
        "test": pairs[0],
    }
    return hansa.Task(**{**fields, **given})


# A wrapper whose second half knows what its first half computed


@register("test-shifted")
@dataclass(frozen=True)
class Shifted(Wrapper):
    """Train from a model that is shifted by a random draw; send the update from the model that was sent."""

    inner: LocalSolver = SGD()

    def around(self, party: Party, payload: Payload, memory: Memory) -> Around:
        w = payload["model"]["w"]
        shift = torch.from_numpy(party.rng("shift").normal(size=len(w))) * party.n / 100
        reply, memory = yield {**payload, "model": {**payload["model"], "w": w + shift}}
        return replace(reply, tensors={"w": reply.tensors["w"] + shift}), memory


@register("test-shifting")
@dataclass(frozen=True)
class Shifting(hansa.Algorithm):
    """Trains through the wrapper of these tests."""

    local: LocalSolver = SGD()
    twice: bool = False

    def parts(self) -> hansa.Parts:
        return hansa.Parts(self.local)

    @property
    def verbs(self) -> frozenset[str]:
        return frozenset({"reduce"})

    async def round(self, fed: Federation, state: hansa.State) -> hansa.State:
        op = Shifted(Shifted(self.local)) if self.twice else Shifted(self.local)  # type: ignore[arg-type]
        answer = await fed.reduce(op, {"model": state.params._asdict()})
        return state.replace(state.params._replace(w=state.params.w + answer.mean("w")))


@pytest.mark.parametrize("twice", [False, True])
def test_the_halves_of_a_wrapper_share_what_the_first_computed_in_every_engine(twice: bool) -> None:
    results = {
        engine: hansa.simulate(Shifting(twice=twice), task(), rounds=2, engine=engine).state.params.w
        for engine in ("reference", "stacked", "workers")
    }
    assert torch.equal(results["reference"], results["workers"])
    assert torch.allclose(results["reference"], results["stacked"], rtol=0, atol=1e-10)
    assert not torch.allclose(results["reference"], hansa.simulate(hansa.FedAvg(), task(), rounds=2).state.params.w)


def test_a_wrapper_that_yields_twice_is_an_error() -> None:
    @dataclass(frozen=True)
    class Twice(Wrapper):
        name = "twice"
        inner: Op = SGD()

        def around(self, party: Party, payload: Payload, memory: Memory) -> Around:
            yield payload
            reply, memory = yield payload
            return reply, memory

    class Silent(Op):
        name = "silent"

        def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
            return Reply({}), memory

    with pytest.raises(AlgorithmError, match="around must yield once"):
        Twice(Silent()).run(None, {}, {})  # type: ignore[arg-type]


def test_a_party_s_stream_depends_on_seed_purpose_round_and_party_alone() -> None:
    def first(seed: int, purpose: str, round: int, id: int) -> float:
        none = torch.empty(0)
        return float(Party(id, None, SampleGateway((none, none)), seed, round, secret=b"x").rng(purpose).random())  # type: ignore[arg-type]

    draws = {first(s, p, r, i) for s in (0, 1) for p in ("a", "b") for r in (0, 1) for i in (0, 1)}
    assert len(draws) == 16
    assert first(0, "a", 1, 1) == first(0, "a", 1, 1) == float(rng.generator(0, "a", 1, 1).random())


def test_an_algorithm_knows_the_run_s_seed_before_the_first_round() -> None:
    seen: list[int] = []

    @dataclass(frozen=True)
    class Seeded(hansa.FedAvg):
        name = "seeded"

        def init(self, problem: Problem) -> hansa.State:
            seen.append(problem.seed)
            return super().init(problem)

    hansa.simulate(Seeded(), task(), rounds=1, seed=41)
    assert seen == [41]


# A solver whose memory begins with the initial model


@register("test-anchored")
@dataclass(frozen=True)
class Anchored(SGD):
    """Pulled towards the mean of the models that the party was sent, the initial model first."""

    pulls: ClassVar[float] = 0.5

    def remember(self, spec: ParamSpec, initial: Params) -> Memory:
        return {"anchor": initial.w, "count": torch.ones((), dtype=spec.dtype)}

    def start(self, ctx: Context, w: Tensor, payload: Payload, memory: Memory) -> tuple[Tensor, Carry]:
        w, carry = super().start(ctx, w, payload, memory)
        return w, {**carry, "toward": self.pulls * (memory["anchor"] - w), "sent": w}

    def finish(self, ctx: Context, start: Tensor, w: Tensor, carry: Carry,
               memory: Memory) -> tuple[dict[str, Tensor], Memory]:  # fmt: skip
        count = memory["count"] + 1
        return {"w": w - start}, {
            "anchor": memory["anchor"] + (carry["sent"] - memory["anchor"]) / count,
            "count": count,
        }


def test_a_solver_s_memory_begins_with_the_initial_model_in_every_engine() -> None:
    algorithm = hansa.FedAvg(local=Anchored(lr=0.2))
    results = {name: hansa.simulate(algorithm, task(), rounds=3, engine=name) for name in ("reference", "stacked")}
    for result in results.values():
        initial = result.training.objective.initial.w
        one = hansa.simulate(algorithm, task(), rounds=1, engine="reference")
        assert torch.allclose(one.memories[2]["anchor"], initial, rtol=0, atol=0)  # it was sent the initial model
        assert result.memories[2]["count"] == 4
        two = hansa.simulate(algorithm, task(), rounds=2, engine="reference")
        sent = torch.stack([initial, initial, one.state.params.w, two.state.params.w])
        assert torch.allclose(result.memories[2]["anchor"], sent.mean(0), rtol=0, atol=1e-9)


# A predictor that knows the party


@register("test-by-party")
@dataclass(frozen=True)
class ByParty(NetworkPredictor):
    """Each party's model is the global one, scaled by its number of samples and shifted by its id."""

    personal: ClassVar[bool] = True

    def own(self, party: Party, payload: Payload, memory: Memory) -> Payload:
        model = payload["model"]
        return {"model": {**model, "w": model["w"] * party.n + party.id}}


@register("test-by-parties")
@dataclass(frozen=True)
class ByParties(hansa.FedAvg):
    """FedAvg whose parties predict by a predictor of their own."""

    def predictor(self, state: hansa.State) -> tuple[str, dict[str, Any]]:
        return "test-by-party", {"model": state.params._asdict()}


def test_a_personal_predictor_knows_the_party_also_in_a_saved_model(tmp_path: Path) -> None:
    model = hansa.build("model", "logistic", inputs=(3,), outputs=2)
    data = task(model=model, party_tests=[(x[:4].float(), y[:4]) for x, y in task().parties],
                parties=[(x.float(), y) for x, y in task().parties], test=None)  # fmt: skip
    x = data.parties[0][0]
    result = hansa.simulate(ByParties(local=Anchored(lr=0.1)), data, rounds=1)
    for party, n in enumerate(SIZES):
        w = result.state.params.w * n + party
        params = Params(w, result.state.params.stats, result.state.params.counts)
        assert torch.equal(result.predict(x, party), result.training.objective.outputs(params, x))
    loaded = hansa.load(result.save(tmp_path / "run"))
    for party in range(len(SIZES)):
        assert torch.equal(loaded.predict(x, party=party), result.predict(x, party))
    tested = result.history[-1]["parties"]
    for party, (own_x, own_y) in enumerate(data.party_tests):
        scores = result.predict(own_x, party)
        assert tested[str(party)]["accuracy"] == pytest.approx(float((scores.argmax(1) == own_y).double().mean()))


# An arrival says what its party was sent


@register("test-versions")
@dataclass(frozen=True)
class Versions(hansa.Algorithm):
    """Asynchronous steps from whole models: the arrival says from which model its party trained."""

    local: LocalSolver = SGD()
    participation: ClassVar[Literal["cohort", "all", "own"]] = "own"

    def parts(self) -> hansa.Parts:
        return hansa.Parts(self.local)

    @property
    def verbs(self) -> frozenset[str]:
        return frozenset({"submit", "next"})

    async def round(self, fed: Federation, state: hansa.State) -> hansa.State:
        payload = {"model": state.params._asdict(), "version": fed.round}
        for party in fed.available:
            if party not in fed.busy:
                await fed.submit(self.local, payload, party)
        arrival = await fed.next()
        assert arrival.payload["version"] == arrival.ticket.round
        if arrival.reply is None:
            return state
        theirs = arrival.payload["model"]["w"] + arrival.reply.tensors["w"]
        versions = [*state.slots.get("versions", []), arrival.payload["version"]]
        return state.replace(state.params._replace(w=0.5 * state.params.w + 0.5 * theirs), versions=versions)


def test_an_arrival_says_what_its_party_was_sent_also_after_a_resume(tmp_path: Path) -> None:
    devices = {"compute": {"name": "exponential", "mean": 0.1}, "latency": "exponential"}
    settings: dict[str, Any] = {"rounds": 8, "devices": devices, "checkpoint_seconds": 0.0}
    whole = hansa.simulate(Versions(), task(), **settings)
    assert len(set(whole.state.slots["versions"])) > 2

    class Stop(BaseException):
        pass

    def stop(line: dict[str, Any]) -> None:
        if line["round"] == 4:
            raise Stop

    with pytest.raises(Stop):
        hansa.simulate(Versions(), task(), run_dir=tmp_path / "run", on_round=stop, **settings)
    resumed = hansa.simulate(Versions(), task(), run_dir=tmp_path / "run", resume=True, **settings)
    assert torch.equal(whole.state.params.w, resumed.state.params.w)
    assert resumed.state.slots["versions"] == whole.state.slots["versions"]


# Metrics of several asks


@register("test-known-loss")
@dataclass(frozen=True)
class KnownLoss(Op):
    """Reports the party's id as its training loss."""

    measures: ClassVar[frozenset[str] | None] = frozenset({"train_loss"})
    update: ClassVar[str | None] = "w"

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        reply = Reply({"w": torch.zeros(2)}, weight=party.n, metrics={"train_loss": float(party.id)})
        return reply, memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"w": ((2,), torch.float32)}


@register("test-other-loss")
@dataclass(frozen=True)
class OtherLoss(KnownLoss):
    """The same op under another name."""


@register("test-groups")
@dataclass(frozen=True)
class Groups(hansa.Algorithm):
    """Asks two groups of parties in turn, then perhaps one more op."""

    verb: str = "reduce"
    other: bool = False

    @property
    def verbs(self) -> frozenset[str]:
        return frozenset({self.verb})

    async def round(self, fed: Federation, state: hansa.State) -> hansa.State:
        ask = fed.reduce if self.verb == "reduce" else fed.gather
        for parties in ([0], [1, 2, 3]):
            await ask(KnownLoss(), parties=parties)  # type: ignore[operator]
        if self.other:
            await ask(OtherLoss(), parties=[3])  # type: ignore[operator]
        return state


def test_metrics_of_several_asks_are_means_over_all_their_parties() -> None:
    (line,) = hansa.simulate(Groups(), task(), rounds=1).history
    assert line["train_loss"] == pytest.approx(sum(k * n for k, n in enumerate(SIZES)) / sum(SIZES), abs=1e-12)
    (line,) = hansa.simulate(Groups("gather"), task(), rounds=1).history  # gathered updates: a median, as for one ask
    assert line["train_loss"] == 1.5
    (line,) = hansa.simulate(Groups(other=True), task(), rounds=1).history
    assert line["train_loss"] == 3.0  # of the op that was asked last


def test_an_ask_below_the_smallest_cohort_adds_no_metrics() -> None:
    (line,) = hansa.simulate(Groups(), task(), rounds=1, min_cohort=3).history
    assert "train_loss" not in line or "empty" in line


def test_metrics_of_several_secure_sums_are_means_over_all_their_parties() -> None:
    @dataclass(frozen=True)
    class Pairs(Groups):
        name = "test-groups"

        async def round(self, fed: Federation, state: hansa.State) -> hansa.State:
            for parties in ([0, 1], [2, 3]):
                await fed.reduce(KnownLoss(), parties=parties)
            return state

    (line,) = hansa.simulate(Pairs(), task(), rounds=1, privacy={"secure": "masking"}).history
    assert line["train_loss"] == pytest.approx(sum(k * n for k, n in enumerate(SIZES)) / sum(SIZES), abs=1e-6)


# Every reply, or no round


@register("test-all-or-none")
@dataclass(frozen=True)
class AllOrNone(hansa.Algorithm):
    """Gathers replies, of all parties or of some."""

    need: Literal["all", "some"] = "all"

    @property
    def verbs(self) -> frozenset[str]:
        return frozenset({"gather"})

    async def round(self, fed: Federation, state: hansa.State) -> hansa.State:
        answer = await fed.gather(KnownLoss(), need="all" if self.need == "all" else None)
        return state.replace(rounds=state.slots.get("rounds", 0) + 1, last=len(answer.replies))


def test_a_gather_that_needs_all_aborts_the_round_without_one_of_them() -> None:
    away: Any = lambda party, round: party == 2 and round == 1  # noqa: E731
    result = hansa.simulate(AllOrNone(), task(), rounds=3, absent=away)
    assert result.state.slots == {"rounds": 2, "last": 4}
    assert result.history[1]["empty"].startswith("3 usable replies of 4 parties asked, and all are needed")
    assert result.history[1]["missing"] == {"2": "it did not answer"}
    assert hansa.simulate(AllOrNone("some"), task(), rounds=3, absent=away).state.slots == {"rounds": 3, "last": 4}


def test_a_gather_that_needs_all_waits_for_all_that_were_over_selected() -> None:
    result = hansa.simulate(AllOrNone(), task(), rounds=1, cohort=0.5, over_select=2.0)
    assert result.state.slots["last"] == 4


@pytest.mark.parametrize("given", [{"need": "most"}, {"need": "all", "enough": 2}])
def test_a_need_that_cannot_be_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(AlgorithmError, match="need must be"):
        Federation(range(2), 0, 0, 2).gather(KnownLoss(), **given).send(None)


def test_an_ask_without_a_need_keeps_its_digest() -> None:
    asks = [Ask("gather", 0, "round", 0, KnownLoss(), {}, (0, 1), need=need) for need in (None, "all")]  # type: ignore[arg-type]
    assert asks[0].digest() != asks[1].digest()
    assert asks[0].digest() == "55cb271f2aa6bf28045952d3d26e3f753d2a0c05fdb8f2d44dacdc42b888f4c1"  # of version 0.2.0


# Metrics that no place can compute alone


@register("test-disagreement")
@dataclass(frozen=True)
class Disagreement(hansa.FedAvg):
    """FedAvg that also counts the parties that answer an evaluation."""

    verb: str = "gather"

    @property
    def verbs(self) -> frozenset[str]:
        return super().verbs | ({"submit", "next"} if self.verb == "submit" else set())

    async def evaluate(self, fed: Federation, state: hansa.State) -> dict[str, float]:
        if self.verb == "submit":
            await fed.submit(KnownLoss(), {}, 0)
        if self.verb == "reduce":
            sums = await fed.reduce(KnownLoss())
            return {"seen": sums.count}
        answer = await fed.gather(KnownLoss(), parties=fed.parties)
        return {"seen": float(len(answer.replies)), "accuracy": 2.0}


def test_an_algorithm_s_own_metrics_enter_the_line_and_take_no_time() -> None:
    devices = {"compute": {"name": "exponential", "mean": 0.1}, "latency": "exponential"}
    plain = hansa.simulate(hansa.FedAvg(), task(), rounds=4, eval_every=2, devices=devices)
    result = hansa.simulate(Disagreement(), task(), rounds=4, eval_every=2, devices=devices)
    for ours, theirs in zip(result.history, plain.history, strict=True):
        measured = ours["round"] % 2 == 0
        assert ours.get("seen") == (4.0 if measured else None)
        assert ours.get("accuracy") == (2.0 if measured else None)  # the algorithm's own value counts
        for name in ("simulated_seconds", "asked", "replies", "bytes_up", "bytes_down", "train_loss"):
            assert ours[name] == theirs[name]
    assert torch.equal(result.state.params.w, plain.state.params.w)


def test_an_algorithm_s_own_metric_may_stop_a_run_without_a_test_set() -> None:
    result = hansa.simulate(Disagreement(), task(test=None), rounds=9, target=1.5)
    assert len(result.history) == 1


def test_an_evaluation_that_fails_leaves_the_run_and_says_why() -> None:
    @dataclass(frozen=True)
    class Shy(KnownLoss):
        name = "test-shy"

        def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
            if party.id == 1:
                raise PartyError("it does not say")
            return super().run(party, payload, memory)

    @dataclass(frozen=True)
    class Incomplete(Disagreement):
        name = "test-incomplete"

        async def evaluate(self, fed: Federation, state: hansa.State) -> dict[str, float]:
            await fed.gather(Shy(), need="all")
            raise AssertionError

    result = hansa.simulate(Incomplete(), task(), rounds=2)
    for line in result.history:
        assert line["unmeasured"].startswith("3 usable replies of 4 parties asked, and all are needed")
        assert "it does not say" in line["unmeasured"] and 0 <= line["accuracy"] <= 1


@pytest.mark.parametrize(("verb", "privacy"), [("submit", None), ("gather", {"secure": "masking"})])
def test_verbs_that_an_evaluation_must_not_use_are_refused(verb: str, privacy: Any) -> None:
    with pytest.raises(AlgorithmError, match=f"used the verb '{verb}'"):
        hansa.simulate(Disagreement(verb=verb), task(), rounds=1, privacy=privacy)


@pytest.mark.parametrize("private", ["central", "local"])
def test_an_evaluation_that_differential_privacy_does_not_cover_is_refused(private: str) -> None:
    solver = hansa.build("local", "dp-sgd") if private == "local" else SGD()
    settings: dict[str, Any] = {} if private == "local" else {"privacy": {"dp": hansa.CentralDP(sigma=1.0, clip=1.0)}}
    with pytest.raises(ConfigError, match="differential privacy does not cover them"):
        hansa.simulate(Disagreement(local=solver), task(), rounds=1, **settings)


def test_an_evaluation_behind_a_secure_sum_uses_the_sum() -> None:
    (line,) = hansa.simulate(Disagreement(verb="reduce"), task(), rounds=1, privacy={"secure": "masking"}).history
    assert line["seen"] == 4.0
