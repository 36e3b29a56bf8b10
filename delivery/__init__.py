"""From a weight commit to a signed Helm release, with a regression gate in between."""

__version__ = "0.1.0"
