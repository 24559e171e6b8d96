"""Every transform with methods of each kind, in all engines and over mutual TLS; what cannot work is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
from test_every_transform import LOCAL, METHODS, TRANSFORMS

import hansa
from hansa.core.plain_data import to_config
from hansa.plumbing.errors import ConfigError
from hansa.testing import NetworkPool, check_engines, check_network, experiment_for
from hansa.transforms import ByLayer, ErrorFeedback, IdentityTransform, Sign, Transform

EVERY: dict[str, hansa.Algorithm] = {
    **METHODS,
    # The model of the checks has one layer.
    "fedper": hansa.FedPer(local=LOCAL, head=("1.bias",)),
    "fedrep": hansa.FedRep(local=LOCAL, head_epochs=1, head=("1.bias",)),
    "lg-fedavg": hansa.LGFedAvg(local=LOCAL, representation=("1.bias",)),
    "legato": hansa.FedAvg(local=LOCAL, fusion="legato"),  # type: ignore[arg-type]
    "prunefl": hansa.PruneFL(local=LOCAL, interval=1),
}
PARTS = {"fedper", "fedrep", "lg-fedavg"}  # methods whose parties send a part of the model
PACKED: dict[str, Transform] = {
    **TRANSFORMS,
    "groups": ByLayer(("*bias", "*"), (IdentityTransform(), ErrorFeedback(Sign()))),
}


def refusal(method: str, transform: str) -> str | None:
    """Why a method and a transform cannot be combined; None if they can."""
    packing = PACKED[transform]
    if method == "prunefl" and packing.layered:
        return "run.compress: by-layer needs the layers of a vector, and those of prunefl are about other parameters"
    if method == "prunefl" and packing.remembers:
        return f"run.compress: {packing.name} remembers numbers of a vector, and those of prunefl are about other"
    if method in PARTS and transform == "groups":
        return "run.compress: no parameter is left for the pattern '*bias'; the parties send: 1.weight"
    return None


@pytest.mark.thin(0)
@pytest.mark.parametrize("transform", PACKED)
@pytest.mark.parametrize("method", EVERY)
def test_a_method_with_a_transform_gives_one_model_everywhere_or_is_refused(
    method: str, transform: str, network: NetworkPool
) -> None:
    algorithm, settings = EVERY[method], dict[str, Any](rounds=2, compress=to_config(PACKED[transform]))
    reason = refusal(method, transform)
    if reason is None:
        check_engines(algorithm, **settings)
        check_network(algorithm, network, **settings)
        assert all("rejected" not in line and line["replies"] for line in network.history)
        return
    try:
        experiment = experiment_for(algorithm, **settings)
    except ConfigError as early:  # when the file is read
        assert reason in str(early) and len(str(early).splitlines()) == 1
        return
    with pytest.raises(ConfigError, match=re.escape(reason)) as caught:
        check_engines(algorithm, **settings)
    assert len(str(caught.value).splitlines()) == 1
    if method in PARTS:  # names of parameters are known when the parties have described their data
        with pytest.raises(AssertionError, match=re.escape(reason)):
            network.run(experiment)
        assert not network.history
    else:
        with pytest.raises(hansa.HansaError, match=re.escape(reason)):
            network.operator.submit(experiment, "refused")
