"""NVFLARE: its own FedAvg in its simulator, ten clients in ten threads, the lean trainer in the client.

.envs/nvflare/bin/python peers/nvflare/fedavg.py [--model 2nn|cnn] [--rounds 20]
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from controller import TimedFedAvg
from nvflare.client.config import ExchangeFormat
from nvflare.fuel.utils.constants import FrameworkType
from nvflare.job_config.api import FedJob
from nvflare.job_config.script_runner import ScriptRunner
from workload import COHORT, Laps, arguments


def main() -> None:
    given = arguments(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        ticks = Path(folder) / "ticks"
        job = FedJob(name="fedavg", min_clients=COHORT)
        job.to_server(TimedFedAvg(str(ticks), given.model, num_clients=COHORT, num_rounds=given.rounds + 1))
        job.to_server({"server": {"task_request_interval": 0.05}})  # clients would ask every 2 s
        runner = ScriptRunner(
            script=str(Path(__file__).with_name("client.py")), script_args=given.model, framework=FrameworkType.NUMPY,
            server_expected_format=ExchangeFormat.NUMPY,
        )  # fmt: skip
        job.to_clients(runner)
        job.simulator_run(f"{folder}/workspace", n_clients=COHORT, threads=COHORT, log_config="ERROR")
        laps = Laps()
        laps.ticks = [float(line) for line in ticks.read_text().split()]
        laps.first = laps.ticks[0]
    laps.report("nvflare", "torch")


if __name__ == "__main__":
    main()
