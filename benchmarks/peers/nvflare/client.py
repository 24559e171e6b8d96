"""A client of NVFLARE with the lean trainer. Client k plays the k-th party of the round's cohort."""

from __future__ import annotations

import sys

import lean
import nvflare.client as flare
from workload import SAMPLES, cohort, order


def main() -> None:
    flare.init()
    place = int(flare.get_site_name().removeprefix("site-")) - 1
    while flare.is_running():
        received = flare.receive()
        if received is None:
            break
        index = cohort(received.current_round)[place]
        trained = lean.train(sys.argv[-1], received.params["flat"], index, order(received.current_round, index))
        flare.send(flare.FLModel(params={"flat": trained}, meta={"NUM_STEPS_CURRENT_ROUND": SAMPLES}))


if __name__ == "__main__":
    main()
