"""Models that the federated-learning literature trains most."""

from hansa.models.chain import LayerChain
from hansa.models.char_lstm import CharLstm
from hansa.models.cnn import Cnn
from hansa.models.dense import Logistic, TwoNN
from hansa.models.model import Model
from hansa.models.resnet import ResNetGn

__all__ = ["CharLstm", "Cnn", "LayerChain", "Logistic", "Model", "ResNetGn", "TwoNN"]
