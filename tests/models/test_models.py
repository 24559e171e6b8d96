from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap

from hansa.core.plain_data import build, from_config, to_config
from hansa.core.registry import registered
from hansa.models import CharLstm, Cnn, Logistic, Model, ResNetGn, TwoNN
from hansa.models.chain import LayerChain
from hansa.plumbing.errors import ConfigError

MODELS: list[Model] = [
    Logistic(),
    Logistic((13,), 1),
    TwoNN((1, 8, 8), 3, hidden=16),
    Cnn((1, 8, 8), 4),
    CharLstm((12,), 30, hidden=16),
    ResNetGn((1, 28, 28), 10, width=8),
    ResNetGn((3, 32, 32), 5, depth=14, width=4),
]


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def samples(model: Model, count: int, seed: int = 0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    if isinstance(model, CharLstm):
        return torch.randint(model.outputs, (count, *model.inputs), generator=rng)
    return torch.randn(count, *model.inputs, generator=rng)


def test_parameter_counts_are_those_of_mcmahan_2017() -> None:
    assert parameters(TwoNN((1, 28, 28), 10)()) == 199_210
    assert parameters(Cnn((1, 28, 28), 10)()) == 1_663_370


def test_the_lstm_has_the_size_of_reddi_2021_and_torchs_second_bias() -> None:
    assert parameters(CharLstm(outputs=90)()) == 820_522 + 2 * 4 * 256


@pytest.mark.parametrize(("depth", "count"), [(8, 78_042), (14, 175_258), (20, 272_474)])
def test_the_residual_networks_are_small(depth: int, count: int) -> None:
    assert parameters(ResNetGn(depth=depth)()) == count


@pytest.mark.parametrize("model", MODELS, ids=repr)
def test_models_give_one_row_of_outputs_a_sample(model: Model) -> None:
    scores = model()(samples(model, 3))
    positions = model.inputs if isinstance(model, CharLstm) else ()
    assert scores.shape == (3, *positions, model.outputs)


@pytest.mark.parametrize("model", MODELS, ids=repr)
def test_a_sample_is_scored_the_same_alone_and_in_a_batch(model: Model) -> None:
    module, x = model().double(), samples(model, 4)
    x = x.double() if x.is_floating_point() else x
    assert torch.allclose(module(x)[2:3], module(x[2:3]), atol=1e-12)


@pytest.mark.thin(2)
@pytest.mark.parametrize("model", [m for m in MODELS if not isinstance(m, CharLstm)], ids=repr)
def test_gradients_stacked_over_parties_equal_those_of_each_party(model: Model) -> None:
    modules = [model().double() for _ in range(3)]
    x = samples(model, 6).double().view(3, 2, *model.inputs)
    stacked, buffers = stack_module_state(modules)  # type: ignore[arg-type]

    def loss(params: dict[str, Any], buffers: dict[str, Any], batch: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = functional_call(modules[0], (params, buffers), (batch,))
        return scores.square().mean()

    together = vmap(grad(loss))(stacked, buffers, x)
    for party, module in enumerate(modules):
        alone = torch.autograd.grad(module(x[party]).square().mean(), list(module.parameters()))
        for (name, _), expected in zip(module.named_parameters(), alone, strict=True):
            assert torch.allclose(together[name][party], expected, atol=1e-9)


def test_a_chain_takes_no_batch_for_a_sequence() -> None:
    """Samples without positions would be one, so that an output could tell of other samples."""
    flat = LayerChain((4,), 2, ("lstm 4 2",))()
    for rows in (1, 3):
        with pytest.raises(ConfigError, match=r"lstm takes samples of the shape \(positions, values\), got \(4,\)"):
            flat(torch.zeros(rows, 4))
    assert LayerChain((5, 4), 2, ("lstm 4 2", "last"))()(torch.zeros(3, 5, 4)).shape == (3, 2)


def test_the_lstm_reads_sequences_of_any_length_and_only_the_past() -> None:
    model = CharLstm(outputs=20, hidden=8)
    module = model()
    x = torch.randint(20, (2, 37))
    changed = x.clone()
    changed[:, 30] = (changed[:, 30] + 1) % 20
    assert module(x).shape == (2, 37, 20)
    assert torch.equal(module(x)[:, :30], module(changed)[:, :30])
    assert not torch.equal(module(x)[:, 30:], module(changed)[:, 30:])


def test_each_call_makes_a_fresh_module_from_torchs_random_state() -> None:
    torch.manual_seed(1)
    first, second = Logistic()(), Logistic()()
    torch.manual_seed(1)
    again = Logistic()()
    weights = [next(iter(module.parameters())) for module in (first, second, again)]
    assert torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], weights[1])


def test_every_model_is_registered_and_survives_its_configuration() -> None:
    assert set(registered("model")) >= {"logistic", "2nn", "cnn", "char-lstm", "resnet-gn"}
    for model in MODELS:
        assert from_config("model", to_config(model), where="model") == model
    assert build("model", "logistic", inputs=[13], outputs=2) == Logistic((13,), 2)


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("cnn", {"inputs": [13]}, "images"),
        ("cnn", {"inputs": [1, 3, 3]}, "at least 4 by 4"),
        ("resnet-gn", {"inputs": [64]}, "images"),
        ("resnet-gn", {"depth": 9}, "8, 14, 20"),
        ("resnet-gn", {"width": 9}, "groups"),
        ("2nn", {"hidden": 0}, "hidden must be at least 1"),
        ("char-lstm", {"layers": 0}, "layers must be at least 1"),
        ("logistic", {"inputs": []}, "shape of one sample"),
        ("logistic", {"outputs": 0}, "number of classes"),
    ],
)
def test_impossible_shapes_are_refused(name: str, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        build("model", name, **fields)
