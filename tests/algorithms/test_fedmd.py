"""FedMD: card 11.5 of the specification. Runs of parties with several models are in run/test_models_and_public.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hansa
from hansa.algorithms.fedmd import DigestAndRevisit, PublicScores, aligned
from hansa.core import own_model
from hansa.core.ask import Reduced
from hansa.core.entries import refuses_payload
from hansa.core.op import Memory, Party, Reply
from hansa.core.plain_data import build
from hansa.holdings.gateway import SampleGateway
from hansa.holdings.public import PublicSamples
from hansa.numerics.objective import Objective
from hansa.numerics.params import Params
from hansa.plumbing.errors import ConfigError, PartyError
from hansa.replies.reply_checks import Rules, fault

DRAWS = torch.Generator().manual_seed(4)
LINES = torch.randn(3, 4, generator=DRAWS, dtype=torch.float64)
WHOLE = hansa.SGD(lr=0.3, batch=None)  # one full-batch step
MODEL = {"model": Params.none()._replace(w=torch.zeros(0, dtype=torch.float64))._asdict()}


def samples(n: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 3, generator=DRAWS, dtype=torch.float64)
    return x, (x @ LINES).argmax(1)


PUBLIC = samples(24)
PAIRS = [samples(8) for _ in range(3)]
TESTS = [samples(30) for _ in range(3)]


def linear() -> nn.Module:
    return nn.Linear(3, 4).double()


def deep() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4)).double()


def task(**fields: Any) -> hansa.Task:
    known = {"models": {"linear": linear, "deep": deep}, "parties": PAIRS, "public": PUBLIC, "classes": 4}
    return hansa.Task(**{**known, **fields})


def run(rounds: int = 2, given: hansa.Task | None = None, settings: Any = None, **fields: Any) -> hansa.Result:
    method = hansa.FedMD(**{"local": WHOLE, "private_epochs": 2, **fields})
    return hansa.simulate(method, given or task(), **{"rounds": rounds, "eval_parties": False, **(settings or {})})


def party(model: Any = deep, public: PublicSamples | None = PublicSamples(*PUBLIC), pair: Any = PAIRS[0]) -> Party:  # noqa: B008
    return Party(0, Objective(model, "cross_entropy", 0), SampleGateway(pair), seed=7, round=3, public=public)


def begun(one: Party) -> tuple[Params, Memory]:
    model = one.initial()
    return model, own_model.remember({}, model)


def stepped(one: Party, model: Params, x: Tensor, loss: Any, lr: float) -> Params:
    """One step of gradient descent, by automatic differentiation."""
    w = model.w.clone().requires_grad_()
    output = torch.func.functional_call(one.objective.network(), one.objective.spec.split(w), (x,))
    return model._replace(w=(w - lr * torch.autograd.grad(loss(output), w)[0]).detach())


# The formulas


def soft(scores: Tensor, temperature: float = 3.0) -> Tensor:
    return torch.softmax(scores / temperature, 1)


DISTANCES: dict[str, tuple[dict[str, Any], Any]] = {
    "mae": ({}, lambda wanted: lambda z: (z - wanted).abs().mean()),
    "mse": ({"loss": "mse"}, lambda wanted: lambda z: ((z - wanted) ** 2).mean()),
    "kl": (
        {"loss": "kl", "temperature": 3.0},
        lambda wanted: lambda z: 9 * (soft(wanted) * (soft(wanted).log() - soft(z).log())).sum(1).mean(),
    ),
}


@pytest.mark.parametrize("loss", DISTANCES)
def test_a_party_takes_a_step_to_the_mean_scores_and_then_one_on_its_samples(loss: str) -> None:
    one, (fields, distance) = party(), DISTANCES[loss]
    model, memory = begun(one)
    wanted = torch.randn(10, 4, generator=DRAWS, dtype=torch.float64)
    op = DigestAndRevisit(WHOLE, WHOLE.at({"lr": 0.7}), align=10, **fields)
    reply, after = op.run(one, {"scores": wanted}, memory)
    public, (x, y) = aligned(one, 10), PAIRS[0]
    digested = stepped(one, model, public, distance(wanted), 0.7)
    revisited = stepped(one, digested, x, lambda z: F.cross_entropy(z, y), 0.3)
    torch.testing.assert_close(after["own/w"], revisited.w, rtol=0, atol=1e-12)
    assert reply.metrics["digest_loss"] == pytest.approx(float(distance(wanted)(one.objective.outputs(model, public))))
    assert reply.metrics["train_loss"] == pytest.approx(float(F.cross_entropy(one.objective.outputs(digested, x), y)))
    assert reply.tensors == {} and reply.weight == len(x)


@pytest.mark.parametrize("labels", [True, False])
def test_a_party_begins_on_the_public_samples_and_then_on_its_own_and_sends_scores(labels: bool) -> None:
    one = party(public=PublicSamples(*PUBLIC) if labels else PublicSamples(PUBLIC[0]))
    op = PublicScores(10, 24, 4, public=WHOLE.at({"lr": 0.7}) if labels else None, private=WHOLE)
    reply, memory = op.run(one, {**MODEL, "begin": True}, {})
    model = one.initial()
    if labels:
        model = stepped(one, model, PUBLIC[0], lambda z: F.cross_entropy(z, PUBLIC[1]), 0.7)
    model = stepped(one, model, PAIRS[0][0], lambda z: F.cross_entropy(z, PAIRS[0][1]), 0.3)
    torch.testing.assert_close(memory["own/w"], model.w, rtol=0, atol=1e-12)
    scores = one.objective.outputs(model, aligned(one, 10)).flatten()
    torch.testing.assert_close(reply.tensors["w"], scores, rtol=0, atol=1e-12)
    again, same = op.run(one, {**MODEL, "begin": True}, memory)  # once is enough
    assert torch.equal(same["own/w"], memory["own/w"]) and torch.equal(again.tensors["w"], reply.tensors["w"])


def test_work_in_the_payload_replaces_that_of_the_first_training_on_own_samples() -> None:
    one, beginning = party(public=PublicSamples(*PUBLIC)), {**MODEL, "begin": True}
    asked, wanted = (PublicScores(10, 24, 4, public=WHOLE, private=each) for each in (WHOLE.at({"lr": 0.7}), WHOLE))
    (_, memory), (_, same) = asked.run(one, {**beginning, "work": {"lr": 0.3}}, {}), wanted.run(one, beginning, {})
    assert torch.equal(memory["own/w"], same["own/w"])


def test_the_consensus_is_the_mean_of_the_parties_scores() -> None:
    result = run(1, private_epochs=0, public_epochs=0, align=10)
    models = result.training.holdings.models
    assert models is not None
    parties = [Party(k, models.of(k), SampleGateway(PAIRS[k]), 0, 0, public=PublicSamples(*PUBLIC)) for k in range(3)]
    scores = torch.stack([one.objective.outputs(one.initial(), aligned(one, 10)) for one in parties])
    torch.testing.assert_close(result.state.slots["scores"], scores.mean(0), rtol=0, atol=1e-12)
    assert float((scores[0] - scores[2]).abs().max()) > 0.1  # one architecture, other initial values


def test_public_samples_are_drawn_by_a_key_that_all_parties_share() -> None:
    rows = aligned(party(), 10)
    other = party(linear, pair=PAIRS[1])
    other.id = 2
    assert torch.equal(rows, aligned(other, 10)) and len(torch.unique(rows, dim=0)) == 10
    other.round = 4
    assert not torch.equal(rows, aligned(other, 10))
    assert torch.equal(aligned(other, 24), PUBLIC[0])


# The invariants


def constant() -> nn.Module:
    """A model whose initial values are the same at every party."""
    module = linear()
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters(), 1):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape) / number)
    return module


@pytest.mark.parametrize("loss", ["mae", "mse", "kl"])
def test_identical_models_agree_with_the_consensus_and_digest_nothing(loss: Any) -> None:
    same = task(models={"constant": constant}, parties=PAIRS[:1] * 4)  # the mean of four equal numbers is exact
    runs = [run(2, same, loss=loss, digest_lr=rate, digest_epochs=3) for rate in (0.01, 50.0)]
    own = [result.memories[k]["own/w"] for result in runs for k in range(4)]
    for w in own[1:]:
        torch.testing.assert_close(w, own[0], rtol=0, atol=1e-12 if loss != "kl" else 1e-9)
    one = party(constant)
    first = run(1, same, private_epochs=0, public_epochs=0).state.slots["scores"]
    assert torch.equal(first, one.objective.outputs(one.initial(), PUBLIC[0]))
    assert all(line["digest_loss"] == pytest.approx(0.0, abs=1e-12) for result in runs for line in result.history)


def test_one_party_digests_its_own_scores_which_changes_nothing() -> None:
    one = task(parties=PAIRS[:1])
    runs = [run(3, one, digest_lr=rate) for rate in (0.05, 50.0)]
    assert torch.equal(runs[0].memories[0]["own/w"], runs[1].memories[0]["own/w"])
    others = [run(3, digest_lr=rate).memories[0]["own/w"] for rate in (0.05, 50.0)]
    assert not torch.equal(*others)


class Doubled(nn.Module):
    """The linear model in another form, with frozen parameters and a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = linear()
        self.identity = nn.Linear(4, 4, bias=False).double().requires_grad_(False)
        nn.init.eye_(self.identity.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.identity(self.inside(x))


def test_only_the_scores_of_a_party_matter_not_its_architecture() -> None:
    plain, other = (
        run(3, task(models={"a": linear, "b": form}, assigned=["a", "b", "a"])) for form in (linear, Doubled)
    )
    for k in range(3):
        torch.testing.assert_close(plain.memories[k]["own/w"], other.memories[k]["own/w"], rtol=0, atol=1e-12)


@pytest.mark.slow
def test_a_party_learns_a_class_that_it_does_not_have() -> None:
    x, y = samples(200)
    pairs = [(x[y != k], y[y != k]) for k in range(4)]
    given = task(parties=pairs, party_tests=[samples(100)] * 4, public=samples(100)[0])
    method: dict[str, Any] = {"local": hansa.SGD(lr=0.05, batch=None), "private_epochs": 200}
    alone, joined = (run(4, given, {"eval_parties": True}, **method, digest_epochs=40, digest_lr=rate).history[-1]
                     for rate in (1e-9, 0.3))  # fmt: skip
    assert alone["accuracy"] < 0.78  # three of four classes
    assert joined["accuracy"] > alone["accuracy"] + 0.1


# What travels, and what a liar gains


def test_scores_are_clipped_by_the_party_and_larger_ones_are_rejected() -> None:
    one = party()
    _, memory = begun(one)
    op = PublicScores(10, 24, 4, max_score=0.25)
    reply, _ = op.run(one, MODEL, memory)
    assert float(reply.tensors["w"].abs().max()) == 0.25
    assert fault(reply, op, MODEL, Rules()) is None
    lie = Reply({"w": reply.tensors["w"].clone().index_fill(0, torch.tensor([3]), 0.26)}, weight=8)
    sentence = "it has values up to 0.26, and the largest that a party may send is 0.25"
    assert fault(lie, op, MODEL, Rules()) == sentence


def test_scores_of_a_model_that_the_party_has_are_another_reading() -> None:
    """With other public samples in every ask, one booked query told the whole model."""

    class Refusing(SampleGateway):
        def admit(self, purpose: str) -> None:
            raise PartyError(f"no {purpose}")

    one = party()
    _, memory = begun(one)
    one.data = Refusing(PAIRS[0])
    with pytest.raises(PartyError, match="no statistics"):
        PublicScores(10, 24, 4).run(one, MODEL, memory)


@pytest.mark.parametrize("fusion", [None, "median"])
def test_a_lying_party_moves_the_consensus_by_at_most_its_share_of_the_bound(
    fusion: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {} if fusion is None else {"fusion": fusion}
    honest, original = run(1, max_score=5.0, **fields), PublicScores.run

    def lying(size: float) -> Any:
        def lie(self: PublicScores, party: Party, payload: Any, memory: Memory) -> tuple[Reply, Memory]:
            reply, memory = original(self, party, payload, memory)
            return (Reply({"w": torch.full_like(reply.tensors["w"], size)}, reply.weight) if party.id == 1 else reply,
                    memory)  # fmt: skip

        return lie

    monkeypatch.setattr(PublicScores, "run", lying(1e6))
    refused = run(1, max_score=5.0, **fields)
    assert refused.history[0]["rejected"] == {
        "1": "it has values up to 1e+06, and the largest that a party may send is 5"
    }
    monkeypatch.setattr(PublicScores, "run", lying(5.0))
    moved = (run(1, max_score=5.0, **fields).state.slots["scores"] - honest.state.slots["scores"]).abs().max()
    assert 0.01 < float(moved) <= (10 / 3 if fusion is None else 5.0)


class HugeSum:
    """A secure sum in which one party lies."""

    async def reduce(self, fed: Any, ask: Any) -> Reduced:
        answer: Reduced = await fed.reduce(ask.op, ask.payload, parties=ask.parties, each=ask.each, uniform=ask.uniform)
        return Reduced({name: total + 1e9 for name, total in answer.sums.items()}, answer.weight, answer.count)


def test_a_hidden_sum_that_is_too_large_aborts_the_round() -> None:
    result = run(1, settings={"protocol": HugeSum()})
    assert "the mean score is over 100: some party sent wrong numbers" in result.history[0]["empty"]
    assert result.memories == {} or all(not memory for memory in result.memories.values())


def test_a_party_checks_what_it_is_sent() -> None:
    one, op = party(), DigestAndRevisit(WHOLE, WHOLE, align=10)
    _, memory = begun(one)
    scores = torch.zeros(10, 4, dtype=torch.float64)
    for payload, sentence in [
        ({}, "scores is missing"),
        ({"scores": scores[:, :3]}, "scores must be a tensor"),
        ({"scores": scores[:9]}, "it needs 10 rows of scores up to 100"),
        ({"scores": scores * torch.nan}, "finite real numbers"),
        ({"scores": scores + 101}, "it needs 10 rows of scores up to 100"),
    ]:
        assert sentence in str(refuses_payload(op, payload, {"classes": 4}))  # type: ignore[arg-type]
    assert refuses_payload(op, {"scores": scores}, {"classes": 4}) is None
    with pytest.raises(PartyError, match="it has no model yet, because it sent no scores"):
        op.run(one, {"scores": scores}, {})
    with pytest.raises(PartyError, match="its model is not finite after training; lower the learning rate"):
        DigestAndRevisit(WHOLE, WHOLE.at({"lr": 1e300, "epochs": 4}), 10, "mse").run(one, {"scores": scores}, memory)
    with pytest.raises(PartyError, match="the ask is about 25 public samples, and there are 24"):
        DigestAndRevisit(WHOLE, WHOLE, 25).run(one, {"scores": torch.zeros(25, 4)}, memory)
    with pytest.raises(PartyError, match="the task has no public samples"):
        op.run(party(public=None), {"scores": scores}, memory)
    for public, sentence in [(PublicSamples(PUBLIC[0]), "no labels to train on"),
                             (PublicSamples(PUBLIC[0][:9]), "about 24 public samples, and there are 9")]:  # fmt: skip
        with pytest.raises(PartyError, match=sentence):
            PublicScores(5, 24, 4, public=WHOLE).run(party(public=public), {**MODEL, "begin": True}, {})


def test_a_party_declines_to_begin_without_leave_and_declares_the_work() -> None:
    op = PublicScores(10, 24, 4, public=hansa.SGD(epochs=3, batch=5), private=hansa.SGD(epochs=2, batch=4))
    with pytest.raises(PartyError, match="it has no model yet, and this ask does not let it begin one"):
        op.run(party(), MODEL, {})
    assert op.demands(8, {**MODEL, "begin": True}) == {"epochs": 3, "steps": 3 * 5 + 2 * 2 + 1}
    assert op.demands(8, {**MODEL, "begin": True, "work": {"epochs": 4}}) == {"epochs": 4, "steps": 3 * 5 + 4 * 2 + 1}
    assert op.demands(8, MODEL) == {"steps": 1}
    learn = DigestAndRevisit(hansa.SGD(epochs=2, batch=4), hansa.SGD(epochs=5, batch=3), align=10)
    assert learn.demands(8, {}) == {"epochs": 5, "steps": 5 * 4 + 2 * 2}
    assert learn.demands(8, {"work": {"epochs": 7}}) == {"epochs": 7, "steps": 5 * 4 + 7 * 2}


def test_a_party_that_was_missing_begins_when_it_is_back() -> None:
    result = run(2, settings={"absent": lambda party, round: party == 1 and round == 0})
    assert "own/w" in result.memories[1] and result.state.slots["begun"].all()
    assert all("1" not in line.get("missing", {}) for line in result.history[1:])
    late = run(1, settings={"absent": lambda party, round: party == 1})
    assert 1 not in late.memories or not late.memories[1]


def test_parties_of_later_cohorts_begin_when_they_are_first_asked() -> None:
    result = run(4, settings={"cohort_size": 1})
    asked = {int(name) for line in result.history for name in line["cohort"]}
    assert {k for k in range(3) if result.memories.get(k)} == asked
    assert result.state.slots["begun"].tolist() == [k in asked for k in range(3)]


def test_parties_of_later_cohorts_begin_in_a_secure_sum_with_signatures_too() -> None:
    result = run(4, settings={"cohort_size": 2, "privacy": {"secure": "masking"}})
    assert all("empty" not in line and len(line["cohort"]) == 2 for line in result.history)
    assert result.state.slots["begun"].all()


# Combinations


@pytest.mark.parametrize("privacy", [{"secure": "masking"}, {"secure": "paillier", "key_bits": 1024}])
@pytest.mark.parametrize("fusion", [{}, {"fusion": "mean"}], ids=["equal weights", "by samples"])
def test_a_hidden_sum_equals_the_clear_one(privacy: Any, fusion: Any) -> None:
    unequal = task(parties=[(x[: 8 - 2 * k], y[: 8 - 2 * k]) for k, (x, y) in enumerate(PAIRS)])
    plain, hidden = (run(1, unequal, given, **fusion) for given in ({}, {"privacy": privacy}))
    torch.testing.assert_close(plain.state.slots["scores"], hidden.state.slots["scores"], rtol=0, atol=1e-6)
    for k in range(3):
        torch.testing.assert_close(plain.memories[k]["own/w"], hidden.memories[k]["own/w"], rtol=0, atol=1e-5)
    assert hidden.history[0]["digest_loss"] == pytest.approx(plain.history[0]["digest_loss"], abs=1e-5)


@pytest.mark.parametrize("rule", ["median", "trimmed-mean", "krum", "geometric-median", "norm-clip", "meamed"])
def test_scores_can_be_fused_by_a_robust_rule(rule: str) -> None:
    given = task(parties=[samples(8) for _ in range(5)])
    result = run(2, given, fusion=rule)
    assert result.history[-1]["fusion"]["rule"] == rule and float(result.state.slots["scores"].abs().max()) > 0


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"align": 25}, {}, "algorithm.align is 25, and there are 24 public samples; lower it, or leave it out"),
    ({"local": "dp-sgd"}, {}, "the epsilon of 'dp-sgd' covers one training per round"),
    ({"local": "gradient"}, {}, "the local solver 'gradient' takes no epochs of batches"),
    ({"local": "scaffold"}, {}, "cannot use the local solver 'scaffold', which is one half of scaffold"),
    ({"fusion": "zeno"}, {"task": {"trusted": PAIRS[0]}}, "zeno judges updates of a model by the server's samples"),
    ({"fusion": "legato"}, {}, "legato compares the layers of updates of different rounds"),
    ({"fusion": "median"}, {"privacy": {"secure": "masking"}}, "median looks at the update of each party"),
    ({}, {"privacy": {"dp": {"kind": "central", "sigma": 1.0, "delta": 1e-5}}}, "parties send more than updates"),
    ({}, {"privacy": {"bound": 1.0}}, "parties bound updates that are summed, and fedmd does something else"),
    ({}, {"compress": "int8"}, "the parties of fedmd send no updates of a model; leave it out"),
    ({}, {"compress_down": "int8"}, "fedmd sends no model to the parties; leave it out"),
    ({"public_epochs": 1}, {"task": {"public": PUBLIC[0]}}, "which have no labels here; leave it out, or give them"),
    ({}, {"task": {"classes": None, "loss": "mse", "public": PUBLIC[0], "parties": [(x, x[:, 0]) for x, _ in PAIRS],
                   "models": {"a": lambda: nn.Linear(3, 1).double()}}}, "the task has no classes"),
    ({}, {"task": {"public": torch.zeros(4, 5)}}, r"public: samples are \(5,\), the parties' \(3,\)"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "settings", "sentence"), REFUSED, ids=[text[:30] for _, _, text in REFUSED])
def test_what_cannot_be_combined_is_refused_in_one_sentence(fields: Any, settings: Any, sentence: str) -> None:
    settings = dict(settings)
    with pytest.raises(hansa.HansaError, match=sentence) as refused:
        run(1, task(**settings.pop("task", {})), settings, **fields)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"align": 0}, "align must be at least 1, got 0; leave it out for all public samples"),
        ({"max_score": 0.0}, "max_score must be above 0 and below 1e\\+30"),
        ({"digest_epochs": 0}, "digest_epochs must be at least 1, got 0"),
        ({"digest_batch": 0}, "digest_batch must be at least 1, got 0"),
        ({"digest_lr": 0.0}, "digest_lr must be above 0, got 0"),
        ({"private_epochs": -1}, "private_epochs must be at least 0, got -1; 0 leaves the training out"),
        ({"public_epochs": -2}, "public_epochs must be at least 0"),
        ({"temperature": 0.0, "loss": "kl"}, "temperature must be above 0, got 0"),
        ({"temperature": 2.0}, "temperature = 2.0 has no effect while loss is 'mae'"),
        ({"loss": "l1"}, "loss"),
    ],
)
def test_a_field_that_makes_no_sense_is_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        build("algorithm", "fedmd", **fields)
