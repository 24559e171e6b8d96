"""Linear models, exact over the federation: least squares, logistic regression and support vector machines."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from msgspec import Meta
from torch import Tensor

from hansa.classical import inference, newton
from hansa.classical.convex_sums import FEATURES, MOST_FEATURES, ConvexSums, Features
from hansa.core.algorithm import Algorithm, Problem, State
from hansa.core.ask import Reduced
from hansa.core.declared_ops import DeclaredOps, OpenOp
from hansa.core.entries import FreeForm, Nested, Number, Shaped, Sizes, Text, stated
from hansa.core.federation import Federation
from hansa.core.fields import Advice
from hansa.core.op import Payload
from hansa.core.predictor import Predictor
from hansa.core.quantities import Factor, PositiveFactor
from hansa.core.registry import register
from hansa.numerics import rng
from hansa.numerics.objective import Objective
from hansa.numerics.params import Params
from hansa.plumbing.errors import ConfigError, DataError, PartyError

log = logging.getLogger("hansa")
CONVERGED = 1e-18  # the decrease of the mean loss that the quadratic model still promises, where a run ends
ROUNDED = 1e-10  # the same, where a further step does not promise less: sums are rounded
ABSENT = 1e-5  # in average weights of a sample: a class with less weight has no sample; sums are rounded
SEPARATED = 0.1  # a last step that still changes a score by this much on average belongs to no finite optimum


class Sums(NamedTuple):
    """What a round learns, as means over all samples; `hessian` in blocks."""

    parties: int
    n: int
    loss: float
    gradient: Tensor
    hessian: Tensor

    @classmethod
    def of(cls, reduced: Reduced) -> Sums:
        sums, n = reduced.sums, int(reduced.sums["count"])
        return cls(reduced.count, n, float(sums["loss"]) / n, sums["gradient"].cpu() / n,
                   sums["hessian"].cpu() / n if "hessian" in sums else torch.empty(0))  # fmt: skip


@dataclass(frozen=True)
class LinearModel(Algorithm):
    """Base of linear models: Newton's method on sums of the loss, its gradient and its Hessian over all parties.

    The objective is the mean loss over all samples, plus ridge/2 ||w||^2, plus l1 ||w||_1: it does not depend on how
    the samples are divided among parties. Each round asks all parties once; the first asks again about the means of
    columns that are far from zero, and the last again at the solution, for the standard errors. With weights of samples
    the objective is the sum of the weighted losses, divided by the number of samples, plus the same penalties.
    """

    ridge: Factor = 0.0
    l1: Factor = 0.0
    intercept: bool = True
    trains: ClassVar[bool] = False
    participation: ClassVar[Literal["cohort", "all", "own"]] = "all"
    penalised: ClassVar[bool] = False  # whether the penalties include the intercept
    takes_numbers: ClassVar[bool] = False  # whether targets may be numbers

    @property
    def ops(self) -> DeclaredOps:
        return (OpenOp.of("convex-sums", self, "intercept"),)

    @property
    def verbs(self) -> frozenset[str]:
        return frozenset({"reduce"})

    @property
    def weighs(self) -> bool:
        return True

    def op(self, slots: Mapping[str, Any]) -> ConvexSums:
        """The ask of a round."""
        raise TypeError(f"the linear model {self.name!r} does not define op()")

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if not self.takes_numbers and problem.classes is None:
            raise ConfigError(
                f"{self.name} is a classifier: it needs class numbers (whole numbers) as targets; for numbers use "
                "least-squares"
            )

    def init(self, problem: Problem) -> State:
        columns, classes = math.prod(problem.shape), problem.classes
        slots = {"columns": columns, "classes": classes, "key": rng.key(problem.seed, "linear model"), "done": False}
        rows = 1 if classes is None or classes == 2 else classes
        width = self.op(slots).features.width(columns)
        names = list(problem.columns) if self.op(slots).fourier == 0 else []  # random features have none
        w, centre = torch.zeros(rows, width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64)
        return State(Params.none(), slots={**slots, "names": names, "w": w, "centre": centre})

    async def round(self, fed: Federation, state: State) -> State:
        op, slots = self.op(state.slots), dict(state.slots)
        sums = await self._sums(fed, op, slots)
        if "accepted" not in slots and self.intercept and not self.penalised:
            slots["centre"] = newton.far_centre(sums.hessian[0])
            if bool(slots["centre"].any()):
                sums = await self._sums(fed, op, slots)
        if "accepted" not in slots and op.loss == "logistic" and self.intercept and self._has_errors:
            self._check_classes(sums, len(fed.parties))
        slots |= self.next(op, slots, slots["w"], sums)
        if slots["done"] and op.loss == "logistic" and self._has_errors:
            sums = await self._sums(fed, op, slots)
            information = self._hessian(op, sums, len(slots["w"])) * sums.n
            slots["facts"] = inference.facts(slots["w"], slots["centre"], information, sums.n, slots["free"], None)
        return state.replace(**slots)

    async def _sums(self, fed: Federation, op: ConvexSums, slots: Mapping[str, Any]) -> Sums:
        """The sums at the parameters of the slots, with features about their centre."""
        centre = {"centre": slots["centre"]} if bool(slots["centre"].any()) else {}
        return Sums.of(await fed.reduce(op, {"w": slots["w"], **centre}))

    @property
    def _has_errors(self) -> bool:
        """Whether coefficients have standard errors: without penalties they are those of a likelihood."""
        return not self.ridge and not self.l1

    def next(self, op: ConvexSums, slots: Mapping[str, Any], at: Tensor, sums: Sums) -> dict[str, Any]:
        """The slots after the sums at a point are known: a step of Newton's method from it, or a shorter step to it."""
        penalty = self._penalty(at)
        value = sums.loss + penalty.value(at)
        rounded = ROUNDED * max(1.0, abs(value))  # what sums may be wrong by
        promised = -slots.get("slope", 0.0) * slots.get("length", 1.0)
        if promised > rounded and sums.n == slots["count"] and value > slots["value"] - newton.ARMIJO * promised:
            length = slots["length"] / 2
            return {"w": slots["accepted"] + length * slots["step"], "length": length}
        free = slots["free"] if "free" in slots else self._free(sums.hessian[0], slots, at)
        sizes = slots["sizes"] if "sizes" in slots else sums.hessian[0].diagonal().sqrt()
        hessian = self._hessian(op, sums, len(at))
        step = newton.step(at, sums.gradient, hessian, penalty, free)
        slope = newton.slope(at, step, sums.gradient, penalty)
        slow = "slope" in slots and slope < slots["slope"] / 4  # Newton's steps shrink faster, except by rounding
        done = -slope <= CONVERGED * max(1.0, abs(value)) or (slow and -slope <= rounded)
        if done and op.loss == "logistic" and self._has_errors:
            self._check_separation((step * sizes).abs(), slots["names"])
        new = {"w": at + step, "accepted": at, "step": step, "length": 1.0, "slope": slope, "value": value,
               "count": sums.n, "free": free, "sizes": sizes, "done": done}  # fmt: skip
        if op.loss == "squared" and self._has_errors and slots["classes"] is None:  # the Hessian is that of all points
            left = 2 * (sums.loss + slope / 2) * sums.n
            new["facts"] = inference.facts(at + step, slots["centre"], hessian * sums.n, sums.n, free, left)
        return new

    def _hessian(self, op: ConvexSums, sums: Sums, rows: int) -> Tensor:
        """The Hessian over all entries of W, of full rank but for columns that depend on others."""
        hessian = newton.whole_hessian(sums.hessian, rows)
        if op.loss == "logistic" and rows > 1 and not self.l1:
            hessian = hessian + newton.of_common_shift(hessian, rows)
        return hessian

    def _penalty(self, w: Tensor) -> newton.Penalty:
        ones = torch.ones_like(w)
        if self.intercept and not self.penalised:
            ones[:, 0] = 0
        return newton.Penalty(self.ridge * ones, self.l1 * ones)

    def _free(self, gram: Tensor, slots: Mapping[str, Any], w: Tensor) -> Tensor:
        """The entries of W that are learned; without penalties, a column that depends on others keeps the value 0."""
        free = torch.ones_like(w, dtype=torch.bool)
        if self.ridge or self.l1:
            return free
        fixed = newton.aliased(gram, slots["centre"])
        if bool(fixed.any()):
            log.warning(
                "%s: constant, or a combination of other columns: %s; its coefficient stays 0 (with ridge above 0 such "
                "columns would share their effect)", self.name, self._columns(fixed, slots["names"]),
            )  # fmt: skip
        return free & ~fixed

    def _columns(self, which: Tensor, names: Sequence[str]) -> str:
        """Some columns by their names, or by their numbers, as text."""
        columns = [at - self.intercept for at in which.nonzero().flatten().tolist()]
        words = ["the intercept" if at < 0 else f"column {at}" if at >= len(names) else f"column {names[at]!r}"
                 for at in columns]  # fmt: skip
        return ", ".join(words[:8]) + (f" and {len(words) - 8} more" if len(words) > 8 else "")

    def _check_classes(self, sums: Sums, parties: int) -> None:
        """Refuse a class of which none of the parties has a sample, by their sums at W = 0: its intercept would fall
        without end. If a party is away, it may have the samples."""
        if sums.parties < parties:
            return
        rows = len(sums.gradient)
        classes = max(2, rows)
        weight = float(sums.hessian[0, 0, 0]) / (1 / classes * (1 - 1 / classes))  # the mean weight of a sample
        apart = sums.gradient[:, 0] if rows > 1 else torch.cat([-sums.gradient[:, 0], sums.gradient[:, 0]])
        absent = (weight / classes - apart) * sums.n < ABSENT * weight
        if bool(absent.any()):
            raise DataError(
                f"{self.name}: no sample has the class {', '.join(map(str, absent.nonzero().flatten().tolist()))}, so "
                "that coefficients grow without end; leave the class out of the task, or set ridge above 0"
            )

    def _check_separation(self, moved: Tensor, names: Sequence[str]) -> None:
        """Refuse classes that are separated: the likelihood has no maximum, and coefficients grow without end."""
        growing = (moved > SEPARATED).any(0)
        if bool(growing.any()):
            raise DataError(
                f"{self.name}: the classes are separated by {self._columns(growing, names)}, so that coefficients grow "
                "without end; set ridge above 0, or leave such columns out"
            )

    def finished(self, state: State) -> bool:
        return bool(state.slots["done"])

    def unfinished(self, state: State) -> str | None:
        exact_or_endless = ("squared", "hinge")  # one round is exact, or steps never end
        if state.slots["done"] or self.op(state.slots).loss in exact_or_endless:
            return None
        lacking = " and have no standard errors" if self._has_errors else ""
        return f"{self.name} has not converged: its coefficients are not final{lacking}; raise run.rounds"

    def predictor(self, state: State) -> tuple[str, dict[str, Any]]:
        slots = state.slots
        return "linear", {"w": newton.about_zero(slots["w"], slots["centre"]),
                          "features": self.op(slots).features._asdict(), "classes": slots["classes"],
                          "facts": slots.get("facts", {}), "loss": self.op(slots).loss}  # fmt: skip


@register("least-squares")
@dataclass(frozen=True)
class LeastSquares(LinearModel):
    """Least squares, ridge and elastic net over all samples; one round is exact, a second one removes rounding.

    With `ridge` and `l1` the model is that of scikit-learn's ElasticNet with alpha = ridge + l1 and l1_ratio =
    l1 / alpha; with `ridge` alone that of Ridge with alpha = ridge * n. Without penalties coefficients have standard
    errors and p-values (`hansa.classical.coefficients`). Classes are fitted as 1 and -1, one against the rest, as in
    RidgeClassifier.
    """

    takes_numbers: ClassVar[bool] = True

    def op(self, slots: Mapping[str, Any]) -> ConvexSums:
        return ConvexSums("squared", self.intercept)


@register("logistic-regression")
@dataclass(frozen=True)
class LogisticNewton(LinearModel):
    """Logistic regression over all samples by Newton's method; multinomial for more than two classes.

    With `ridge`, that of scikit-learn's LogisticRegression with C = 1 / (ridge * n). Without penalties coefficients
    have standard errors and p-values, and separated classes are refused: their likelihood has no maximum (Albert and
    Anderson 1984).
    """

    def op(self, slots: Mapping[str, Any]) -> ConvexSums:
        return ConvexSums("logistic", self.intercept)


@dataclass(frozen=True)
class VectorMachine(LinearModel):
    """Base of support vector machines: one against the rest, all weights penalised, as in LIBLINEAR."""

    ridge: Annotated[PositiveFactor, Advice("it sets the width of the margin")] = 0.01
    loss: str = "squared-hinge"
    penalised: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.loss not in ("squared-hinge", "hinge"):
            raise ConfigError(f"{self.name}: loss must be 'squared-hinge' or 'hinge', got {self.loss!r}")
        if self.l1 and self.loss == "hinge":
            raise ConfigError(f"{self.name}: l1 needs the loss 'squared-hinge'; the hinge loss is learned without it")

    def next(self, op: ConvexSums, slots: Mapping[str, Any], at: Tensor, sums: Sums) -> dict[str, Any]:
        if self.loss == "squared-hinge":
            return super().next(op, slots, at, sums)
        t = slots.get("t", 0) + 1
        moved = at - (sums.gradient + self.ridge * at) / (self.ridge * t)
        mean = moved if t == 1 else slots["mean"] + 2 / (t + 1) * (moved - slots["mean"])
        return {"w": moved, "mean": mean, "t": t}

    def predictor(self, state: State) -> tuple[str, dict[str, Any]]:
        name, payload = super().predictor(state)
        return name, {**payload, "w": state.slots.get("mean", state.slots["w"])}


@register("linear-svm")
@dataclass(frozen=True)
class LinearSVM(VectorMachine):
    """A linear support vector machine over all samples: squared hinge by Newton's method, or hinge by subgradients.

    That of scikit-learn's LinearSVC with C = 1 / (ridge * n). The hinge loss takes one subgradient step of the size
    1 / (ridge t) in round t (Shalev-Shwartz et al. 2007); its model is the average of the steps, weighted by t
    (Lacoste-Julien, Schmidt and Bach 2012).
    """

    def op(self, slots: Mapping[str, Any]) -> ConvexSums:
        return ConvexSums(self.loss, self.intercept)


@register("kernel-svm")
@dataclass(frozen=True)
class KernelSVM(VectorMachine):
    """A support vector machine with a Gaussian kernel, by random Fourier features that all parties share.

    Rahimi and Recht 2007: the kernel exp(-gamma ||x - x'||^2) is estimated by `features` cosines. `gamma` 0 stands for
    1 / number of columns. Scale the columns first.
    """

    features: Annotated[int, Meta(ge=1, le=MOST_FEATURES)] = 256
    gamma: Factor = 0.0

    def op(self, slots: Mapping[str, Any]) -> ConvexSums:
        gamma = self.gamma or 1 / max(1, slots["columns"])
        return ConvexSums(self.loss, self.intercept, self.features, gamma, slots["key"])


@register("linear")
@dataclass(frozen=True)
class LinearPredictor(Predictor):
    """The scores of a linear model; for two classes those of class 0 are 0."""

    entries = stated(
        w=Shaped(shape=("rows", None)),
        features=Nested(entries=FEATURES),
        classes=Number(whole=True, least=1, none=True),
        loss=Text(optional=True),
        facts=FreeForm(check="about the coefficients", optional=True),
    )

    def check_payload(self, payload: Payload, sizes: Sizes) -> None:
        width = Features(**payload["features"]).width(sizes.get("features", 0))
        if "features" in sizes and payload["w"].shape[1] != width:
            raise PartyError(
                f"malformed ask: the model has weights for {payload['w'].shape[1]} features, expected {width}"
            )

    def outputs(self, objective: Objective, payload: Payload, x: Tensor) -> Tensor:
        scores: Tensor = Features(**payload["features"]).of(x) @ payload["w"].to(x.device).T
        if payload["classes"] == 2:
            return torch.cat([torch.zeros_like(scores), scores], 1)
        return scores

    def probable(self, payload: Payload) -> bool:
        return bool(payload.get("loss") == "logistic")
