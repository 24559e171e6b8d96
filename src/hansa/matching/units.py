"""Networks as layers of units, in one form for linear layers, convolutions, LSTMs and embeddings.

A unit is a neuron, a channel, a hidden state with its four gates, or a dimension of an embedding. A layer with u units
over the i units below has `incoming` weights [u, i, block], `bias` [u, b] and `recurrent` weights [u, u, gates]. The
block has all weights between two units: the pixels of a kernel, those of an image that was flattened, or the gates. So
a matching permutes the first dimension of a layer, and the second one of the layer above.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hansa.core.entries import Nested, Shaped, optional, stated
from hansa.core.shapes import UpTo
from hansa.matching.tracing import steps
from hansa.models.chain import UNITS, LayerChain, LayerText, read_layer
from hansa.plumbing.errors import ConfigError

GATES = 4
Size = int | UpTo


WEIGHTS = Shaped(shape=(None, None, None))
LAYER = Nested(entries=stated(incoming=WEIGHTS, bias=Shaped(shape=(None, None)), recurrent=optional(WEIGHTS)))


class Units(NamedTuple):
    """The weights of a layer, by unit."""

    incoming: Tensor  # [units, inputs, block]
    bias: Tensor  # [units, biases]
    recurrent: Tensor  # [units, units, gates]; no gates but for an LSTM

    @property
    def atoms(self) -> Tensor:
        """One vector per unit: its incoming weights and its bias."""
        return torch.cat([self.incoming.flatten(1), self.bias], 1)

    def tree(self) -> dict[str, Tensor]:
        """The layer as named tensors, for messages; without recurrent weights if it has none."""
        named = self._asdict()
        return named if self.recurrent.shape[2] else {name: named[name] for name in ("incoming", "bias")}

    @classmethod
    def of_tree(cls, tree: Mapping[str, Tensor]) -> Units:
        """The inverse of `tree`."""
        count = len(tree["bias"])
        return cls(tree["incoming"], tree["bias"], tree.get("recurrent", tree["bias"].new_zeros(count, count, 0)))

    def above(self, place: Tensor, count: int) -> Units:
        """The layer over `count` units below, of which its own inputs are those at `place`; others have no weight."""
        wide = self.incoming.new_zeros(len(self.incoming), count, self.incoming.shape[2])
        return self._replace(incoming=wide.index_copy_(1, place, self.incoming))

    def taken(self, place: Tensor, below: Tensor | None = None) -> Units:
        """Some of the units, and of the units below; by default all of those."""
        incoming = self.incoming[place] if below is None else self.incoming[place][:, below]
        return Units(incoming, self.bias[place], self.recurrent[place][:, place])


@dataclass(frozen=True)
class UnitLayer:
    """A layer with parameters: where it is, its sizes, and the names of its tensors in the network."""

    text: LayerText
    at: int  # position in the chain
    inputs: int  # units of the layer below, or features of a sample
    units: int
    block: int  # weights between two units
    minor: bool  # whether the units below are the last dimension of what was flattened
    names: tuple[str, ...]

    @property
    def kind(self) -> str:
        return self.text.name

    @property
    def biases(self) -> int:
        """The biases of a unit."""
        has = self.kind != "embedding" and self.text.option("bias", 1)
        return 0 if not has else 2 * GATES if self.kind == "lstm" else 1

    @property
    def gates(self) -> int:
        return GATES if self.kind == "lstm" else 0

    def sizes(self, units: Size, inputs: Size) -> dict[str, tuple[Size, ...]]:
        """The shapes of `Units.tree` for a number of units and of units below, which may be open."""
        shapes: dict[str, tuple[Size, ...]] = {"incoming": (units, inputs, self.block), "bias": (units, self.biases)}
        return {**shapes, "recurrent": (units, units, self.gates)} if self.gates else shapes

    def fits(self, tree: Any, below: int, units: int | None = None) -> bool:
        """Whether named tensors are a layer of this kind over `below` units, with `units` units or any number."""
        if not isinstance(tree, Mapping) or not all(isinstance(value, Tensor) for value in tree.values()):
            return False
        bias = tree.get("bias")
        count = len(bias) if units is None and bias is not None and bias.dim() else units
        wanted = self.sizes(count or 0, below)
        return {name: tuple(value.shape) for name, value in tree.items()} == wanted

    def read(self, tensors: Mapping[str, Tensor]) -> Units:
        """The layer's units, from the network's tensors by name."""
        weight, *rest = (tensors[name] for name in self.names)
        units, inputs = self.units, self.inputs
        none = weight.new_zeros(units, units, 0)
        if self.kind == "embedding":
            return Units(weight.t()[:, :, None], weight.new_zeros(units, 0), none)
        if self.kind == "lstm":
            recurrent, *biases = rest
            bias = [b.view(GATES, units).t() for b in biases]
            return Units(weight.view(GATES, units, inputs).permute(1, 2, 0),
                         torch.cat(bias, 1) if bias else weight.new_zeros(units, 0),
                         recurrent.view(GATES, units, units).permute(1, 2, 0))  # fmt: skip
        flat = weight.reshape(units, self.block, inputs).transpose(1, 2) if self.minor else weight
        return Units(
            flat.reshape(units, inputs, self.block), rest[0][:, None] if rest else weight.new_zeros(units, 0), none
        )

    def write(self, layer: Units) -> dict[str, Tensor]:
        """The network's tensors by name, from the layer's units: the inverse of `read`."""
        incoming, bias, recurrent = layer
        units = len(incoming)
        if self.kind == "embedding":
            return {self.names[0]: incoming[:, :, 0].t().contiguous()}
        if self.kind == "lstm":
            tensors = [incoming.permute(2, 0, 1).reshape(GATES * units, -1),
                       recurrent.permute(2, 0, 1).reshape(GATES * units, units)]  # fmt: skip
            tensors += [part.t().reshape(-1) for part in torch.split(bias, GATES, 1)] if bias.shape[1] else []
            return dict(zip(self.names, (t.contiguous() for t in tensors), strict=True))
        flat = (incoming.transpose(1, 2) if self.minor else incoming).reshape(units, -1)
        if self.kind == "conv":
            kernel = self.text.option("kernel", 1)
            flat = flat.reshape(units, incoming.shape[1], *((kernel, kernel) if isinstance(kernel, int) else kernel))
        tensors = [flat.contiguous(), *([bias[:, 0].contiguous()] if bias.shape[1] else [])]
        return dict(zip(self.names, tensors, strict=True))


@dataclass(frozen=True)
class Network:
    """A chain of layers, and those of them that have parameters. The units of the last one are the outputs."""

    texts: tuple[LayerText, ...]
    layers: tuple[UnitLayer, ...]

    @classmethod
    def of(cls, module: nn.Module) -> Network:
        """Read a module; a ConfigError if it is no chain of layers that can be matched."""
        read = steps(module)
        return cls._of([text for text, _ in read], [names for _, names in read])

    @classmethod
    def of_texts(cls, texts: Sequence[str]) -> Network:
        """The network of a chain's texts; tensors are named as in `chain`."""
        read = [read_layer(text) for text in texts]
        return cls._of(read, _names(read))

    @classmethod
    def _of(cls, texts: Sequence[LayerText], names: Sequence[tuple[str, ...]]) -> Network:
        layers: list[UnitLayer] = []
        minor = flat = False  # whether units are the last dimension (sequences), and whether they were flattened
        for at, (text, own) in enumerate(zip(texts, names, strict=True)):
            flat |= text.name == "flatten"
            if text.name not in UNITS:
                continue
            inputs, units = (int(size) for size in text.sizes)
            below = layers[-1].units if layers else inputs
            if inputs % below or (inputs != below and not flat):
                raise ConfigError(f"the layer {text} takes {inputs} inputs from {below} units below; the model is no "
                                  "chain of layers that can be matched")  # fmt: skip
            kernel = text.option("kernel", 1)
            pixels = kernel**2 if isinstance(kernel, int) else kernel[0] * kernel[1]
            block = GATES if text.name == "lstm" else pixels if text.name == "conv" else inputs // below
            layers.append(UnitLayer(text, at, below, units, block, minor and flat, own))
            minor, flat = text.name in ("lstm", "embedding") or (minor and not flat), False
        if not layers:
            raise ConfigError("the model has no layer with parameters")
        return cls(tuple(texts), tuple(layers))

    @property
    def widths(self) -> tuple[int, ...]:
        """The number of units of each hidden layer."""
        return tuple(layer.units for layer in self.layers[:-1])

    @property
    def outputs(self) -> int:
        return self.layers[-1].units

    def like(self, other: Network) -> bool:
        """Whether another network differs in its widths alone."""
        return self.resized(other.widths).texts == other.texts if len(self.layers) == len(other.layers) else False

    def resized(self, widths: Sequence[int]) -> Network:
        """The chain with hidden layers of other widths; tensors are named as in `chain`."""
        texts, below = list(self.texts), self.layers[0].inputs
        for layer, units in zip(self.layers, (*widths, self.outputs), strict=True):
            spread = int(layer.text.sizes[0]) // layer.inputs
            texts[layer.at] = layer.text._replace(sizes=(below * spread, units))
            below = units
        return self._of(texts, _names(texts))

    def chain(self, shape: Sequence[int]) -> LayerChain:
        """The registered model of this network, for samples of a shape."""
        return LayerChain(tuple(shape), self.outputs, tuple(str(text) for text in self.texts))

    def read(self, tensors: Mapping[str, Tensor]) -> list[Units]:
        """The units of all layers, from the network's tensors by name."""
        return [layer.read(tensors) for layer in self.layers]

    def write(self, units: Sequence[Units]) -> dict[str, Tensor]:
        """The network's tensors by name, from the units of all layers."""
        pairs = zip(self.layers, units, strict=True)
        return dict(itertools.chain.from_iterable(layer.write(own).items() for layer, own in pairs))


def _names(texts: Sequence[LayerText]) -> list[tuple[str, ...]]:
    """The names of the tensors of each layer, in the module of a chain."""
    kinds = {"lstm": (("weight_ih_l0", "weight_hh_l0"), ("bias_ih_l0", "bias_hh_l0")), "embedding": (("weight",), ())}
    names: list[tuple[str, ...]] = []
    for at, text in enumerate(texts):
        weights, biases = kinds.get(text.name, (("weight",), ("bias",))) if text.name in UNITS else ((), ())
        own = (*weights, *(biases if text.option("bias", 1) else ()))
        names.append(tuple(f"{at}.{name}" for name in own))
    return names


def permuted(units: Sequence[Units], orders: Sequence[Tensor]) -> list[Units]:
    """A network with the units of its hidden layers in another order: it computes the same function."""
    below: Tensor | None = None
    out = []
    for layer, order in zip(units, (*orders, None), strict=True):
        whole = torch.arange(len(layer.incoming)) if order is None else order
        out.append(layer.taken(whole, below))
        below = order
    return out
