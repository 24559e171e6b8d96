"""Registered algorithms give the reference's bits over the network."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from every_op import quick
from hansa.algorithms import PruneFL
from hansa.artifacts.run_folder import MODEL
from hansa.core.registry import registered
from hansa.demo import network as demo_net
from hansa.experiment.config import parse
from hansa.plumbing.errors import ConfigError
from hansa.run.simulate import simulate
from hansa.testing import TREE, NetworkPool, check_network, experiment_for, same_bits
from shapes import by_shape

OURS: dict[str, Any] = {
    name: part for name, part in registered("algorithm").items() if part.__module__.startswith("hansa.")
}
ALGORITHMS = {name: part for name, part in OURS.items() if part.data == "rows"}


@pytest.mark.slow
@pytest.mark.parametrize("name", by_shape(ALGORITHMS))
def test_an_algorithm_gives_the_reference_s_bits_over_mutual_tls(name: str, network: NetworkPool) -> None:
    check_network(quick(ALGORITHMS[name]), network)


@pytest.fixture(scope="module")
def column_network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetworkPool]:
    """A federation on loopback whose parties hold different columns."""
    network = NetworkPool(tmp_path_factory.mktemp("columns"), "columns")
    yield network
    network.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", by_shape(sorted(set(OURS) - set(ALGORITHMS))))
def test_an_algorithm_over_columns_gives_the_reference_s_bits_over_mutual_tls(
    name: str, column_network: NetworkPool
) -> None:
    pytest.importorskip("rbcl")
    check_network(quick(OURS[name]), column_network)


@pytest.mark.slow
def test_a_mask_that_changes_in_every_round_gives_the_reference_s_bits_over_mutual_tls(network: NetworkPool) -> None:
    check_network(PruneFL(interval=1, density=0.6, first=2, removable=0.5), network)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("secure", "rounds"),
    [
        ({"secure": "paillier", "key_bits": 1024, "range": 4096}, 2),
        ({"secure": "threshold-paillier", "key_bits": 1024, "range": 4096}, 2),
        ({"secure": "functional", "bits": 12, "max_weight": 512, "range": 4096}, 1),
    ],
)
def test_an_encrypted_sum_gives_the_reference_s_bits_over_mutual_tls(
    secure: dict[str, Any], rounds: int, network: NetworkPool
) -> None:
    """Sums are exact, so the parties' random keys do not matter."""
    task = {name: value for name, value in TREE["task"].items() if name != "prepare"}
    run = {**TREE["run"], "rounds": rounds, "eval_parties": False}
    experiment = parse({**TREE, "task": task, "run": run, "algorithm": {"name": "fedavg"}, "privacy": secure})
    _, model = network.run(experiment)
    settings = {**experiment.settings(), "engine": "reference"}
    reference = simulate(experiment.algorithm, experiment.build_task(), **settings).saved_model()
    assert same_bits(reference, model)


def test_a_precision_that_only_a_simulation_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="tf32"):
        experiment_for(ALGORITHMS["fedavg"](), precision="tf32").check(deployed=True, networked=True)


@pytest.mark.slow
def test_four_hospitals_in_five_processes_train_the_reference_engine_s_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo_net.run(tmp_path / "demo", rounds=3)
    assert "bit-identical to the reference engine's" in capsys.readouterr().out
    deployed, simulated = tmp_path / "demo" / "deployed.safetensors", tmp_path / "demo" / "simulated" / MODEL
    assert deployed.read_bytes() == simulated.read_bytes()
    assert len(deployed.read_bytes()) > 100
