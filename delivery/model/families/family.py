"""Family: how one kind of checkpoint names and lays out what `ModelConfig` and `block` speak of.

No torch here: `deliver --help` and the checkpoint reader ask for the list of architectures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from delivery.model.config import ModelConfig

HfConfig = Mapping[str, Any]
ROOTS = ("model", "model.language_model", "language_model.model", "language_model")
"""Where the text model may sit in a checkpoint; vision-language checkpoints nest it."""


@dataclass(frozen=True, slots=True)
class Part:
    """A weight, or some rows of one: `prefix` + ".weight" is its name below the model's root.

    rows: ranges of rows of the stored tensor, in the order wanted; None for all of them. Fused
        tensors (QKV, gate and up) and interleaved rotary layouts are taken apart this way, so every
        caller sees separate, half-split projections whatever the file holds.
    expert: index along the first dimension of a tensor that stacks all experts; the rest is the
        weight [N, K], or [K, N] when `transposed`.
    """

    prefix: str
    rows: tuple[range, ...] | None = None
    expert: int | None = None
    transposed: bool = False
    alternative: Part | None = None
    """Where the weight is when nothing is stored under `prefix`: publishers store experts one by one, or
    all of a layer in one tensor."""


@dataclass(frozen=True, slots=True)
class Family:
    """One family of checkpoints; `families/<name>.py` defines it as `FAMILY`.

    config: the checkpoint's config.json → ModelConfig.
    linears: (config, layer) → canonical name → Part, prefixes relative to the root ("layers.0.…").
    norms: (config, layer) → canonical name → tensor name relative to the root.
    tensors: the same for other per-layer tensors (convolution kernels, decay rates).
    embed, norm, head: names of the ends; `head` is absolute, the others relative to the root.
    """

    name: str
    architectures: tuple[str, ...]
    config: Callable[[HfConfig], ModelConfig]
    linears: Callable[[ModelConfig, int], dict[str, Part]]
    norms: Callable[[ModelConfig, int], dict[str, str]]
    tensors: Callable[[ModelConfig, int], dict[str, str]] = lambda _config, _layer: {}
    embed: str = "embed_tokens"
    norm: str = "norm.weight"
    heads: tuple[str, ...] = ("lm_head", "language_model.lm_head", "model.lm_head")
    roots: tuple[str, ...] = ROOTS
