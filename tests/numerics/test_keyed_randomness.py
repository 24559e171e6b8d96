from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

import hansa
from hansa.numerics import rng
from hansa.numerics.keyed_randomness import KeyedRandomness
from hansa.plumbing.errors import ConfigError

KEYS = rng.step_keys(rng.key(0, "test"), 4)


def keyed(key: Tensor, layer: nn.Module, x: Tensor) -> Tensor:
    with KeyedRandomness(key):
        out: Tensor = layer(x)
    return out


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.4, is_causal=True)


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x) + torch.rand(x.shape, dtype=x.dtype) + torch.bernoulli(torch.full_like(x, 0.3))


RANDOM: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "dropout": (nn.Dropout(0.4), (5, 6)),
    "channels": (nn.Dropout2d(0.4), (5, 6, 2, 2)),
    "attention": (Attention(), (5, 3, 6)),
    "noise": (Noise(), (5, 6)),
}


@pytest.mark.parametrize("name", RANDOM)
def test_a_random_layer_draws_the_same_alone_and_stacked(name: str) -> None:
    layer, shape = RANDOM[name]
    x = torch.randn(4, *shape, dtype=torch.float64)
    together = vmap(lambda key, x: keyed(key, layer, x))(KEYS, x)
    for k, key in enumerate(KEYS):
        assert torch.allclose(together[k], keyed(key, layer, x[k]), atol=1e-15)
    assert not torch.equal(keyed(KEYS[0], layer, x[0]), keyed(KEYS[1], layer, x[0]))


@pytest.mark.parametrize("name", RANDOM)
def test_a_random_layer_neither_uses_nor_moves_the_global_generator(name: str) -> None:
    layer, shape = RANDOM[name]
    x = torch.ones(shape, dtype=torch.float64)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = keyed(KEYS[0], layer, x)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(keyed(KEYS[0], layer, x), first)


def test_dropout_of_a_row_does_not_depend_on_padding_rows() -> None:
    x = torch.ones(3, 8)
    assert torch.equal(keyed(KEYS[0], nn.Dropout(0.5), torch.ones(7, 8))[:3], keyed(KEYS[0], nn.Dropout(0.5), x))


def test_dropout_keeps_the_mean_and_drops_the_share_it_should() -> None:
    out = keyed(KEYS[0], nn.Dropout(0.3), torch.ones(300, 300, dtype=torch.float64))
    assert float((out == 0).double().mean()) == pytest.approx(0.3, abs=0.01)
    assert float(out.mean()) == pytest.approx(1.0, abs=0.02)
    assert out.unique().tolist() == [0.0, pytest.approx(1 / 0.7)]


def test_channel_dropout_drops_whole_channels() -> None:
    out = keyed(KEYS[0], nn.Dropout2d(0.5), torch.ones(20, 10, 3, 3))
    share = (out == 0).double().mean((2, 3))
    assert set(share.unique().tolist()) == {0.0, 1.0}


def test_two_calls_of_one_pass_draw_differently() -> None:
    layer = nn.Dropout(0.5)
    with KeyedRandomness(KEYS[0]) as randomness:
        first, second = layer(torch.ones(50)), layer(torch.ones(50))
    assert randomness.used
    assert not torch.equal(first, second)


def test_without_training_nothing_is_dropped_or_drawn() -> None:
    with KeyedRandomness(KEYS[0]) as randomness:
        out = nn.Dropout(0.5).eval()(torch.ones(9))
    assert torch.equal(out, torch.ones(9))
    assert not randomness.used


def test_attention_without_dropout_is_torchs_own() -> None:
    q = torch.randn(2, 4, 6, dtype=torch.float64)
    causal = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    with KeyedRandomness(KEYS[0]):
        assert torch.equal(F.scaled_dot_product_attention(q, q, q, is_causal=True), causal)
        dropping = F.scaled_dot_product_attention(q, q, q, dropout_p=1e-12, is_causal=True)
    assert torch.allclose(dropping, causal, atol=1e-10)


class Shuffled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(x[:, torch.randperm(3)])
        return y


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], dropout: float) -> None:
        super().__init__()
        self.rnn = kind(3, 4, num_layers=2, dropout=dropout, batch_first=True)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.rnn(x)[0][:, -1])
        return y


@pytest.mark.parametrize("engine", ["reference", "stacked"])
def test_a_model_that_draws_from_the_global_generator_is_refused(engine: str) -> None:
    task = hansa.Task(Shuffled, "cross_entropy", [(torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))])
    with pytest.raises(ConfigError, match=r"calls randperm while it trains.*cannot be replayed"):
        hansa.simulate(hansa.FedAvg(), task, rounds=1, engine=engine)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_dropout_inside_a_recurrent_layer_is_refused_with_the_way_out(kind: type[nn.RNNBase]) -> None:
    parties = [(torch.randn(4, 5, 3), torch.tensor([0, 1, 0, 1]))]
    with pytest.raises(ConfigError, match=r"dropout inside a recurrent layer.*put nn\.Dropout between"):
        hansa.simulate(hansa.FedAvg(), hansa.Task(lambda: Recurrent(kind, 0.2), "cross_entropy", parties), rounds=1)
    done = hansa.simulate(hansa.FedAvg(), hansa.Task(lambda: Recurrent(kind, 0.0), "cross_entropy", parties), rounds=1)
    assert done.history[0]["replies"] == 1
