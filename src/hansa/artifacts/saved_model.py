"""Saved models: predict with `model.safetensors` and `model.json`, without the run that made them.

`model.json` says how to make the model (a registered model by its fields, a function by its name) and the shape of a
sample. If the aggregator has a test set, it has two samples of it as an example. It never has samples of a party.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hansa.artifacts.run_folder import MODEL, PERSONAL, SERVING, beside, read_json
from hansa.core.ask import op_of
from hansa.core.data_op import DataOp
from hansa.core.op import Party, Payload
from hansa.core.party_models import PartyModels, make_models
from hansa.core.plain_data import build, from_config, to_config
from hansa.core.predictor import JointPredictor, NetworkPredictor, Predictor
from hansa.core.registry import Part, own_function
from hansa.core.task import Known, Task
from hansa.holdings.fitting import cast
from hansa.holdings.gateway import Purpose, SampleGateway
from hansa.numerics.objective import Objective
from hansa.numerics.params import Params
from hansa.plumbing import codec
from hansa.plumbing.errors import ConfigError, DataError, PartyError, nearest
from hansa.plumbing.functions import double, searching

EXAMPLES = 2  # test samples in `model.json`
SMALL = 10_000  # largest count of numbers in these samples
TUNED = "finetuned"  # in a model file: the parties have fine-tuned the model; also the predictor for that
OWN = "own"  # in a model file: the payload is that of one party, which exported its own model
SAMPLES = "samples"  # in the file of the parties' own models: their numbers of samples
Make = Callable[[], nn.Module]


def describe(task: Task, objective: Objective, holdings: Known, seed: int) -> dict[str, Any]:
    """What a saved model needs to predict, beside its tensors, as plain data."""
    example = None
    if task.test is not None and math.prod(holdings.shape) * EXAMPLES <= SMALL:
        example = torch.as_tensor(task.test[0][:EXAMPLES]).tolist()
    models = holdings.models
    kind = objective if models is None else models.first
    features = holdings.test[0].dtype if holdings.test is not None else _features(holdings, kind)
    several = {} if models is None else {"models": {name: named(make) for name, make in (task.models or {}).items()},
                                         "turn": list(models.turn)}  # fmt: skip
    # A deployed job does not tell its members to those who get the model.
    simulated = {} if getattr(holdings, "train", None) is None or task.names is None else {"names": list(task.names)}
    return {
        "model": named(task.model), "dtype": str(kind.dtype).removeprefix("torch."), "seed": seed,
        "loss": objective.loss if isinstance(objective.loss, str) else None, "bf16": objective.bf16,
        "shape": list(holdings.shape), "features": str(features).removeprefix("torch."),
        "classes": holdings.classes, "parties": len(holdings), "example": example,
        **several, **simulated, **column_names(task.header, holdings.shape),
    }  # fmt: skip


def column_names(header: Sequence[str], shape: Sequence[int]) -> dict[str, Any]:
    """The entry of `model.json` with the names of the columns (the target, then the features), if they are known."""
    known = len(header) == math.prod(shape) + 1 and all(isinstance(name, str) for name in header)
    return {"header": list(header)} if known else {}


def _features(holdings: Known, objective: Objective) -> torch.dtype:
    train = getattr(holdings, "train", None)
    return objective.dtype if train is None or holdings.layout is not None else train.x.dtype


def named(model: Make | None) -> dict[str, Any] | str | None:
    """How another process can make a model: a registered model by its fields, a function of a module by its name.

    None if it cannot (a lambda, a function of a notebook), or if there is no model.
    """
    if isinstance(model, functools.partial) and model.func is double:
        model = model.args[0]
    if isinstance(model, Part):
        return to_config(model)
    if isinstance(model, functools.partial) and not model.args and _plain(model.keywords):
        function = named(model.func)
        return {"name": function, **model.keywords} if isinstance(function, str) else None
    module, name = getattr(model, "__module__", None), getattr(model, "__qualname__", "<")
    return None if module in (None, "__main__") or "<" in name or "." in name else f"{module}:{name}"


def _plain(fields: Mapping[str, Any]) -> bool:
    return all(isinstance(value, (bool, int, float, str, list)) for value in fields.values())


class AbsentSamples(SampleGateway):
    """The gateway of a party in a saved model, which knows the number of its samples but does not have them."""

    def __init__(self, count: int) -> None:
        none = torch.empty(0)
        super().__init__((none, none))
        self._count = count

    @property
    def n(self) -> int:
        return self._count

    def admit(self, purpose: Purpose) -> None:
        raise PartyError("a saved model does not have the samples of its parties; a predictor must not need them")


@dataclass
class SavedModel:
    """The final model of a run. After saving and loading, `predict` gives the same bits."""

    about: dict[str, Any]
    predictor: Predictor
    objective: Objective
    payload: Payload
    preparation: tuple[DataOp, Payload] | None
    memories: Mapping[int, Any]  # the parties' own parts of the model, if each party has its own model
    samples: Mapping[int, int] = field(default_factory=dict)  # the parties' numbers of samples, where they are known
    models: PartyModels | None = None  # where the parties have several architectures
    exported: bool = False  # whether the payload is that of one party, which exported its own model

    @property
    def personal(self) -> bool:
        """Whether a prediction is that of a party's own model.

        Without the parties' own models, those that have fine-tuned a common model have the common one here.
        """
        if self.exported or not self.predictor.personal:
            return False
        return bool(self.memories) or self.predictor.common(self.payload) is None

    def predict(self, x: Any, party: int | str | None = None) -> Tensor:
        """Outputs (class scores, or values) for samples; `party` says whose model, if each party has its own.

        A model of a table takes a frame (pandas, polars), columns by name, or a list of rows by column name.
        """
        payload = self.payload_of(party)
        objective = self.objective_of(party)
        return self.predictor.outputs(objective, payload, self.prepared(x, objective))

    def fitted(self, x: Any, y: Any) -> SavedModel:
        """The single model for somebody who was no party, chosen by some samples with targets.

        With clusters, the model of least loss on these samples. A ConfigError if parties have models of their own.
        """
        if not self.personal:
            return self
        samples, targets = self.prepared(x, self.objective), torch.as_tensor(y, device=self.objective.device)
        payload = self.predictor.fitted(self.objective, self.payload, samples, targets)
        return dataclasses.replace(self, predictor=NetworkPredictor(), payload=payload, memories={})

    def check_party(self, party: int | str | None) -> None:
        """Raise a ConfigError if a party is named, and the parties have no models of their own."""
        if party is not None and (self.exported or not self.predictor.personal):
            whose = "one party, which exported it" if self.exported else "all parties"
            raise ConfigError(f"--party: the model is that of {whose}; leave the party out")

    def prepared(self, x: Any, objective: Objective) -> Tensor:
        """Samples as the model takes them."""
        dtype = None if objective.module is None else objective.dtype
        if self.preparation is not None and not isinstance(self.predictor, JointPredictor):
            op, learned = self.preparation
            return op.prepared(x, learned, objective.device, dtype)
        return cast(x, objective.device, dtype)

    def objective_of(self, party: int | str | None) -> Objective:
        """The objective of the model, or of a party's model where the parties have several architectures."""
        number = self.number_of(party)
        return self.objective if self.models is None or number is None else self.models.of(number)

    def number_of(self, party: int | str | None) -> int | None:
        """The number of a party that is given by its name or number."""
        if not isinstance(party, str):
            return party
        names = self.about.get("names", [])
        if party in names:
            return int(names.index(party))
        if not party.isdecimal():
            hint = nearest(party, names) if names else ": the model does not have their names; give a number"
            raise ConfigError(f"there is no party {party!r}{hint}")
        return int(party)

    def model(self, party: int | str | None = None) -> nn.Module:
        """The trained module, in evaluation mode; `party` as for `predict`."""
        payload = self.payload_of(party) if self.objective.module is not None or self.models is not None else {}
        objective = self.objective_of(party)
        if "model" not in payload or objective.module is None:
            raise ConfigError(f"{self.predictor.name} trains no torch module; use predict(x)")
        module = copy.deepcopy(objective.module).cpu()
        return objective.spec.load(module, Params(**payload["model"])).eval()

    def payload_of(self, party: int | str | None) -> Payload:
        """The payload of the predictor; that of `party`, if each party has its own model."""
        if self.exported:
            return self.payload
        party = self.number_of(party)
        common = self.predictor.common(self.payload)
        if common is not None and (party is None or not self.predictor.personal):
            return common
        if party is None or party not in range(self.about["parties"]):
            raise ConfigError(
                f"each party has its own model: set party, from party=0 to party={self.about['parties'] - 1}"
            )
        if not self.memories:
            raise ConfigError(
                "each party has its own model, and these models are not saved here: a simulation saves them if they "
                "are not too large; deployed parties keep their own (hansa export, at the party)"
            )
        absent = Party(party, self.objective_of(party), AbsentSamples(self.samples.get(party, 0)), self.about["seed"])
        return self.predictor.own(absent, self.payload, dict(self.memories.get(party, {})))


def tensors(place: Path) -> dict[str, Any]:
    """The content of a model file, given by its own path or by its run folder."""
    path = place if place.is_file() else place / MODEL
    try:
        tree = codec.decode(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(
            f"{place} has no model yet: the run is not finished; continue it with `hansa resume`"
        ) from None
    except DataError as error:
        raise DataError(f"{path} is damaged: {error}") from None
    if not isinstance(tree, dict) or "predictor" not in tree:
        raise DataError(f"{path} is not a model that Hansa has saved")
    return tree


def load(place: str | Path, folder: str = ".", make: Make | None = None) -> SavedModel:
    """Load the final model from a run folder, or from a model file with its `.json` file next to it.

    A function that makes the model is looked up in the modules of `folder` as well, unless `make` gives one.
    """
    place = Path(place)
    tree, about = tensors(place), read_json(beside(place) if place.is_file() else place / SERVING)
    personal = (place.parent if place.is_file() else place) / PERSONAL
    memories = codec.decode(personal.read_bytes()) if personal.exists() and OWN not in tree else {}
    return opened(tree, about, place, folder, make, memories)


def opened(tree: dict[str, Any], about: dict[str, Any], place: Path, folder: str = ".", make: Make | None = None,
           memories: dict[str, Any] | None = None) -> SavedModel:  # fmt: skip
    """The final model of the content of a model file and of its `.json` file; `place` is named in errors."""
    memories = memories or {}
    with searching(folder):
        objective = Objective(
            _factory(about, tree, folder, make), about["loss"] or "mse", about["seed"], bf16=about["bf16"]
        )
    models = _models(about, tree, folder, objective, make) if "models" in about else None
    if "frozen" in tree and models is None:
        objective.take_frozen(tree["frozen"])
    payload = tree["payload"] if "payload" in tree else {"model": _params(objective, tree["params"], place)._asdict()}
    preparation = None
    if "preparation" in tree:
        op = op_of(tree["preparation"]["op"], "preparation")
        if not isinstance(op, DataOp):
            raise DataError(f"{place} is damaged: its preparation is invalid")
        preparation = (op, tree["preparation"]["payload"])
    counts = memories.pop(SAMPLES, torch.zeros(0, dtype=torch.int64)).tolist()
    by_party = {int(party): memory for party, memory in memories.items()}
    name = tree["predictor"]
    if tree.get(TUNED):
        name, payload = TUNED, {"inner": name, "payload": payload}
    predictor: Predictor = build("predictor", name)
    return SavedModel(about, predictor, objective, payload, preparation, by_party, dict(enumerate(counts)), models,
                      bool(tree.get(OWN)))  # fmt: skip


def _models(about: dict[str, Any], tree: dict[str, Any], folder: str, objective: Objective,
            make: Make | None) -> PartyModels:  # fmt: skip
    """The models of parties with several architectures; `make` makes those that have no name."""
    made = {name: _factory({**about, "model": model}, {"params": {}}, folder, make if model is None else None)
            for name, model in about["models"].items()}  # fmt: skip
    objectives = make_models(made, objective)  # type: ignore[arg-type]
    for name, frozen in tree.get("frozen", {}).items():
        objectives[name].take_frozen(frozen)
    return PartyModels(objectives, about["turn"])


def _factory(about: dict[str, Any], tree: dict[str, Any], beside: str, make: Make | None) -> Make | None:
    model = about["model"]
    if make is not None:
        made = make
    elif model is not None:
        with searching(beside):
            made = own_function(model, "model") or from_config("model", model, "model")
    elif (
        "params" in tree
        or OWN in tree
        or (tree["predictor"] in ("personal", "own-model", "clustered") and "models" not in about)
    ):
        raise ConfigError(
            "the function that makes the model is a lambda, or defined in a notebook or script, so another process "
            "cannot find it; define it in a module, or pass it, as in hansa.load(folder).model(make_model)"
        )
    else:
        return None
    return functools.partial(double, made) if about["dtype"] == "float64" else made


def _params(objective: Objective, stored: dict[str, Tensor], folder: Path) -> Params:
    module, spec = objective.network(), objective.spec
    wanted = {entry.name: entry.shape for entry in (*spec.weights, *spec.stats, *spec.counts, *spec.frozen)}
    saved = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    for name in sorted({*wanted, *saved}):
        if wanted.get(name) != saved.get(name):
            raise ConfigError(
                f"the model in {folder} does not fit the model that its function makes: {name} is "
                f"{saved.get(name, 'missing')} in the folder and {wanted.get(name, 'missing')} in the module"
            )
    module.load_state_dict(stored, strict=False)  # tensors that layers share are saved once
    return spec.flatten(module)
