"""Flower: its own FedAvg over its simulation runtime, two Ray actors of one CPU, the lean trainer in its client.

.envs/flower/bin/python peers/flower/fedavg.py [--model 2nn|cnn] [--rounds 20] [--machines 2]

With `--machines` its actors are on a cluster of as many Ray processes, with one CPU each and a head without CPUs.
"""

from __future__ import annotations

import logging
import os

# Ray gives its actors the niceness 15, by which they hardly run beside other programs: a round took minutes.
os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0",
               "RAY_worker_niceness": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}  # fmt: skip

import lean
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from workload import COHORT, PARTIES, SAMPLES, Laps, arguments, order, ray_machines

server, client = ServerApp(), ClientApp()
laps = Laps()


@client.train()
def train(message: Message, context: Context) -> Message:
    index = int(context.node_config["partition-id"])
    config = message.content["config"]
    # The model travels as one array: fewer pieces to pack.
    start = message.content["arrays"]["flat"].numpy()
    trained = lean.train(str(config["model"]), start, index, order(int(config["server-round"]), index))
    content = {"arrays": ArrayRecord({"flat": Array(trained)}), "metrics": MetricRecord({"num-examples": SAMPLES})}
    return Message(RecordDict(content), reply_to=message)


@server.main()
def serve(grid: Grid, context: Context) -> None:
    strategy = FedAvg(
        fraction_train=COHORT / PARTIES, fraction_evaluate=0.0, min_train_nodes=COHORT, min_available_nodes=PARTIES
    )
    first = ArrayRecord({"flat": Array(lean.trainer(given.model).flat().numpy())})
    strategy.start(
        grid, first, num_rounds=given.rounds + 1, train_config=ConfigRecord({"model": given.model}),
        evaluate_fn=lambda round_, _: laps() if round_ else None,
    )  # fmt: skip


if __name__ == "__main__":
    given = arguments(__doc__, machines={"type": int})
    logging.getLogger("flwr").setLevel(logging.ERROR)
    with ray_machines(given.machines) as address:
        where = {"num_cpus": 2} if address is None else {"address": address}
        run_simulation(
            server, client, PARTIES,
            backend_config={"client_resources": {"num_cpus": 1.0}, "init_args": {**where, "log_to_driver": False}},
        )  # fmt: skip
    laps.report("flwr", "ray", "torch")
