"""FedJAX: its own federated averaging, each client's step compiled by `jax.jit`.

.envs/fedjax/bin/python peers/fedjax/fedavg.py [--model 2nn|cnn] [--rounds 20]
"""

from __future__ import annotations

import warnings

warnings.filterwarnings("ignore", category=DeprecationWarning)

import fedjax  # noqa: E402
import haiku as hk  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from workload import BATCH, CLASSES, COHORT, PARTIES, PIXELS, RATE, SIDE, Laps, arguments, party  # noqa: E402


def pool(x: jax.Array) -> jax.Array:
    """2 by 2 max pooling, in the form whose gradient XLA's CPU backend computes fastest."""
    batch, height, width, channels = x.shape
    return x.reshape(batch, height // 2, 2, width // 2, 2, channels).max((2, 4))


def network(model: str, x: jax.Array) -> jax.Array:
    if model == "2nn":
        return hk.nets.MLP([200, 200, CLASSES])(x)
    net = hk.Sequential([
        hk.Conv2D(32, 5), jax.nn.relu, pool,
        hk.Conv2D(64, 5), jax.nn.relu, pool,
        hk.Flatten(), hk.Linear(512), jax.nn.relu, hk.Linear(CLASSES),
    ])  # fmt: skip
    return net(x.reshape(-1, SIDE, SIDE, 1))


def main() -> None:
    given = arguments(__doc__)
    net = hk.without_apply_rng(hk.transform(lambda x: network(given.model, x)))

    def loss(params: hk.Params, batch: dict[str, jax.Array], key: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(net.apply(params, batch["x"]), batch["y"]).mean()

    data = fedjax.InMemoryFederatedData({p: dict(zip("xy", party(p), strict=True)) for p in range(PARTIES)})
    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        jax.grad(loss), fedjax.optimizers.sgd(RATE), fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=BATCH, num_epochs=1, drop_remainder=False),
    )  # fmt: skip
    sampler = fedjax.client_samplers.UniformGetClientSampler(data, COHORT, seed=0)
    state = algorithm.init(net.init(jax.random.PRNGKey(0), jnp.zeros((1, PIXELS))))
    laps = Laps()
    for round_ in range(given.rounds + 1):
        sampler.set_round_num(round_)
        state, _ = algorithm.apply(state, sampler.sample())
        jax.block_until_ready(state.params)
        laps()
    laps.report("fedjax", "jax")


if __name__ == "__main__":
    main()
