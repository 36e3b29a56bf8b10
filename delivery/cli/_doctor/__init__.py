"""Whether this machine can do the work: facts gathered once, checks that are functions of them."""

from delivery.cli._doctor.checks import Check, examine
from delivery.cli._doctor.facts import Facts, gather

__all__ = ["Check", "Facts", "examine", "gather"]
