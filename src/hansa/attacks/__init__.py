"""Inference attacks as audits: measure what a run or a job reveals. Poisoning attacks are in `hansa.adversary`."""

from hansa.attacks.audit import NAMES, AttackAudit, attack

__all__ = ["NAMES", "AttackAudit", "attack"]
