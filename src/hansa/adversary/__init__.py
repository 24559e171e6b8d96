"""Adversaries: attacks by hostile parties of a simulation, on their data or on their updates."""

from hansa.adversary.adversary import Adversary, Scene
from hansa.adversary.alie import ALIE
from hansa.adversary.backdoor import Backdoor
from hansa.adversary.band import Band, adversaries, named
from hansa.adversary.bit_flip import BitFlip
from hansa.adversary.gambler import Gambler
from hansa.adversary.label_flip import LabelFlip
from hansa.adversary.multiples import IPM, Omniscient, SignFlip
from hansa.adversary.noise import FreeRider, GaussianAttack

__all__ = ["ALIE", "IPM", "Adversary", "Backdoor", "Band", "BitFlip", "FreeRider", "Gambler", "GaussianAttack",
           "LabelFlip", "Omniscient", "Scene", "SignFlip", "adversaries", "named"]  # fmt: skip
