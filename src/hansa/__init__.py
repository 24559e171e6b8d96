"""Hansa: federated learning in which one algorithm object runs in simulation and across organisations, unchanged."""

from __future__ import annotations

from hansa.core.registry import provide, refuse
from hansa.plumbing.lazy import exports

__version__ = "0.2.0"

provide("algorithm", "hansa.algorithms", "hansa.classical", "hansa.matching", "hansa.vertical")
provide("local", "hansa.local")
provide("server", "hansa.server")
provide("fusion", "hansa.fusion", "hansa.matching")
provide("select", "hansa.select")
provide("schedule", "hansa.schedule")
provide("pace", "hansa.schedule")
provide("staleness", "hansa.algorithms")
provide("adversary", "hansa.adversary")
provide("drift", "hansa.drift")
provide("detector", "hansa.drift")
provide("transform", "hansa.transforms")
provide("model", "hansa.models")
provide("dataset", "hansa.data")
provide("partition", "hansa.data")
provide("prepare", "hansa.data")
provide("predictor", "hansa.core.predictor", "hansa.core.own_model", "hansa.local.finetune", "hansa.algorithms",
        "hansa.classical", "hansa.matching")  # fmt: skip
provide("devices", "hansa.sim.devices")
provide("distribution", "hansa.sim.distributions")
provide("availability", "hansa.sim.devices")
provide("relays", "hansa.sim.relays")
provide("engine", "hansa.sim.engines", "hansa.cluster.engines")
_SECURE = ["hansa.secure", *(f"hansa.secure.{m}" for m in ("paillier_sum", "threshold_sum", "functional_sum", "ckks"))]
provide("secure", *_SECURE)
provide("dp", "hansa.privacy")
provide("finetune", "hansa.local.finetune")
provide("metric", "hansa.metrics")
provide("attestation", "hansa.net.attestation")
provide("topology", "hansa.topology")
provide("tracker", *(f"hansa.track.{name}" for name in ("console", "jsonl", "tensorboard", "mlflow")))
provide("op", "hansa.core.predictor", "hansa.core.delivery", "hansa.local.finetune", "hansa.algorithms",
        "hansa.classical", "hansa.matching", "hansa.data", "hansa.select", "hansa.metrics.evaluate",
        "hansa.vertical", *_SECURE, "hansa.secure.routing", "hansa.secure.route_session", "hansa.privacy",
        "hansa.transforms")  # fmt: skip

for _kind in ("algorithm", "local"):
    refuse(_kind, "dpsgd", "is ambiguous: 'd-psgd' is decentralised SGD (an algorithm), 'dp-sgd' is differentially "
           "private SGD (a local solver)")  # fmt: skip

_EXPORTS = {
    "CoOp": "hansa.algorithms",
    "ConsensusADMM": "hansa.algorithms",
    "DAPPER": "hansa.algorithms",
    "APFL": "hansa.algorithms",
    "BayesianGossip": "hansa.algorithms",
    "DecentralizedSGD": "hansa.algorithms",
    "PushSum": "hansa.algorithms",
    "SelfAggregation": "hansa.algorithms",
    "Ditto": "hansa.algorithms",
    "FedAvgPlus": "hansa.algorithms",
    "FedCoMedPlus": "hansa.algorithms",
    "FedGeoMedPlus": "hansa.algorithms",
    "FSVRG": "hansa.algorithms",
    "FedAdagrad": "hansa.algorithms",
    "FedAdam": "hansa.algorithms",
    "FedAsync": "hansa.algorithms",
    "FedAvg": "hansa.algorithms",
    "FedAvgM": "hansa.algorithms",
    "FedBuff": "hansa.algorithms",
    "FedSGD": "hansa.algorithms",
    "FedYogi": "hansa.algorithms",
    "Scaffold": "hansa.algorithms",
    "QFedSGD": "hansa.algorithms",
    "PruneFL": "hansa.algorithms",
    "QFedAvg": "hansa.algorithms",
    "FedProx": "hansa.algorithms",
    "FedPer": "hansa.algorithms",
    "HypCluster": "hansa.algorithms",
    "IFCA": "hansa.algorithms",
    "FedRep": "hansa.algorithms",
    "MAPPER": "hansa.algorithms",
    "LGFedAvg": "hansa.algorithms",
    "AdaptiveTopK": "hansa.algorithms",
    "FedMD": "hansa.algorithms",
    "FedNova": "hansa.algorithms",
    "OptimalAveraging": "hansa.algorithms",
    "OverlapSGD": "hansa.algorithms",
    "EASGD": "hansa.algorithms",
    "ZenoPlusPlus": "hansa.algorithms",
    "Boosting": "hansa.classical",
    "GaussianNB": "hansa.classical",
    "ID3": "hansa.classical",
    "KernelSVM": "hansa.classical",
    "LeastSquares": "hansa.classical",
    "RandomForest": "hansa.classical",
    "LinearSVM": "hansa.classical",
    "LogisticNewton": "hansa.classical",
    "MatchPermute": "hansa.matching",
    "PFNM": "hansa.matching",
    "FedMA": "hansa.matching",
    "SPAHM": "hansa.matching",
    "Linkage": "hansa.vertical",
    "PSI": "hansa.vertical",
    "SecureBoost": "hansa.vertical",
    "ColumnForest": "hansa.vertical",
    "Split": "hansa.vertical",
    "SequentialSplit": "hansa.vertical",
    "VerticalLinear": "hansa.vertical",
    "FedV": "hansa.vertical",
    "Gradient": "hansa.local",
    "SGD": "hansa.local",
    "SVRG": "hansa.local",
    "Proximal": "hansa.local",
    "Overlapped": "hansa.local",
    "Normalised": "hansa.local",
    "FairGradient": "hansa.local",
    "Fair": "hansa.local",
    "Elastic": "hansa.local",
    "FineTuning": "hansa.local",
    "Controlled": "hansa.local",
    "Adam": "hansa.local",
    "Descent": "hansa.server",
    "WeightedMean": "hansa.fusion",
    "Bulyan": "hansa.fusion",
    "FLTrust": "hansa.fusion",
    "GeometricMedian": "hansa.fusion",
    "Krum": "hansa.fusion",
    "Legato": "hansa.fusion",
    "MeaMed": "hansa.fusion",
    "Median": "hansa.fusion",
    "MultiKrum": "hansa.fusion",
    "NormClip": "hansa.fusion",
    "TrimmedMean": "hansa.fusion",
    "Zeno": "hansa.fusion",
    "Merit": "hansa.select",
    "PowerOfChoice": "hansa.select",
    "Tiers": "hansa.select",
    "Uniform": "hansa.select",
    "Weighted": "hansa.select",
    "Clip": "hansa.transforms",
    "ByLayer": "hansa.transforms",
    "ErrorFeedback": "hansa.transforms",
    "IdentityTransform": "hansa.transforms",
    "Int8": "hansa.transforms",
    "QSGD": "hansa.transforms",
    "RandK": "hansa.transforms",
    "Sign": "hansa.transforms",
    "StochasticRounding": "hansa.transforms",
    "TopK": "hansa.transforms",
    "Transform": "hansa.transforms",
    "ALIE": "hansa.adversary",
    "Adversary": "hansa.adversary",
    "Backdoor": "hansa.adversary",
    "BitFlip": "hansa.adversary",
    "FreeRider": "hansa.adversary",
    "Gambler": "hansa.adversary",
    "GaussianAttack": "hansa.adversary",
    "IPM": "hansa.adversary",
    "LabelFlip": "hansa.adversary",
    "Omniscient": "hansa.adversary",
    "SignFlip": "hansa.adversary",
    "DayAndNight": "hansa.drift",
    "Drift": "hansa.drift",
    "FeatureNoise": "hansa.drift",
    "Joining": "hansa.drift",
    "LabelShift": "hansa.drift",
    "Leaving": "hansa.drift",
    "NewClasses": "hansa.drift",
    "PageHinkley": "hansa.drift",
    "Rotation": "hansa.drift",
    "ColumnTransformer": "hansa.data",
    "Standardise": "hansa.data",
    "CentralDP": "hansa.privacy",
    "Privacy": "hansa.privacy",
    "Devices": "hansa.sim.devices",
    "Bernoulli": "hansa.sim.devices",
    "DayNight": "hansa.sim.devices",
    "Task": "hansa.core.task",
    "Algorithm": "hansa.core.algorithm",
    "Parts": "hansa.core.algorithm",
    "State": "hansa.core.algorithm",
    "Federation": "hansa.core.federation",
    "HansaError": "hansa.plumbing.errors",
    "ConfigError": "hansa.plumbing.errors",
    "DataError": "hansa.plumbing.errors",
    "Callback": "hansa.run",
    "Result": "hansa.run",
    "StoredRun": "hansa.run",
    "draw_partition": "hansa.report.plots",
    "load": "hansa.run",
    "attack": "hansa.attacks",
    "attack_job": "hansa.attacks.job_audit",
    "compare": "hansa.study",
    "resume": "hansa.run",
    "simulate": "hansa.run",
    "build": "hansa.core.plain_data",
    "register": "hansa.core.registry",
}

_RENAMED = {
    "DPSGD": "hansa.DecentralizedSGD is decentralised SGD (D-PSGD, peer to peer), hansa.local.DPSGD is the "
    "differentially private local solver (DP-SGD)"
}

__all__ = [*sorted(_EXPORTS), "__version__"]
__getattr__ = exports("hansa", _EXPORTS, _RENAMED)


def __dir__() -> list[str]:
    return __all__
