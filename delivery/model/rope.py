"""Rotary position embedding (Su et al., arXiv 2104.09864) and the ways to stretch it.

Pairs are (i, i + rotary_dim / 2), "half-split"; checkpoints with neighbouring pairs have their rows
reordered when they are read (`families/naming.py`), which leaves every product q·k as it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from delivery.errors import DataError, did_you_mean
from delivery.model.config import RopeSpec


@dataclass(frozen=True, slots=True)
class Frequencies:
    """What turns positions into angles.

    short: float32 [rotary_dim / 2], radians per position. long: the same for sequences of more than
    `switch` tokens (LongRoPE), else None. scale: multiplies cosine and sine.
    """

    short: torch.Tensor
    long: torch.Tensor | None = None
    switch: int | None = None
    scale: float = 1.0


def frequencies(spec: RopeSpec) -> Frequencies:
    """Raises DataError `rope-unknown` for a scaling that is not known, `config-invalid` for a wrong one."""
    kind = str(spec.scaling.get("rope_type", "default"))
    if kind not in _KINDS:
        raise DataError(
            "rope-unknown", f"rotary scaling {kind!r} is not supported", hint=did_you_mean(kind, _KINDS)
        )
    try:
        return _KINDS[kind](spec, dict(spec.scaling))
    except KeyError as error:
        raise DataError(
            "config-invalid", f"config.json: rotary scaling {kind!r} is incomplete", why=f"missing {error}"
        ) from error
    except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise DataError(
            "config-invalid", f"config.json: rotary scaling {kind!r} has a wrong value", why=str(error)
        ) from error


def cos_sin(freq: Frequencies, positions: torch.Tensor, long: torch.Tensor | None = None) -> tuple[Any, Any]:
    """Cosine and sine, float32 [T, rotary_dim / 2], of int64 positions [T].

    long: bool [T], whether the token belongs to a sequence of more than `freq.switch` tokens.
    """
    rates = freq.short.to(positions.device)
    angles = positions[:, None].float() * rates
    if freq.long is not None and long is not None:
        angles = torch.where(long[:, None], positions[:, None].float() * freq.long.to(rates.device), angles)
    return angles.cos() * freq.scale, angles.sin() * freq.scale


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, head_dim] with its first rotary_dim features turned by cos and sin [T, rotary_dim / 2]."""
    half = cos.shape[-1]
    cos, sin = cos[:, None, :].to(x.dtype), sin[:, None, :].to(x.dtype)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def _base(spec: RopeSpec) -> torch.Tensor:
    steps = torch.arange(0, spec.rotary_dim, 2, dtype=torch.int64).float()
    return 1.0 / (spec.theta ** (steps / spec.rotary_dim))


def _default(spec: RopeSpec, _scaling: dict[str, Any]) -> Frequencies:
    return Frequencies(_base(spec))


def _linear(spec: RopeSpec, scaling: dict[str, Any]) -> Frequencies:
    return Frequencies(_base(spec) / scaling["factor"])


def _dynamic(spec: RopeSpec, _scaling: dict[str, Any]) -> Frequencies:
    """Dynamic NTK: rates change for sequences longer than the model's maximum, which none is here."""
    return Frequencies(_base(spec))


def _llama3(spec: RopeSpec, scaling: dict[str, Any]) -> Frequencies:
    """Llama 3.1: low frequencies divided by the factor, high ones kept, a ramp between."""
    rates = _base(spec)
    original = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = original * rates / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return Frequencies((1 - keep) * rates / scaling["factor"] + keep * rates)


def _yarn(spec: RopeSpec, scaling: dict[str, Any]) -> Frequencies:
    """YaRN (Peng et al., arXiv 2309.00071)."""
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]
    rates = _base(spec)

    def dimension_of(turns: float) -> float:
        return spec.rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    first = dimension_of(scaling.get("beta_fast") or 32)
    last = dimension_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, spec.rotary_dim - 1)
    width = (last - first) or 0.001
    ramp = ((torch.arange(spec.rotary_dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    return Frequencies(rates / factor * ramp + rates * (1 - ramp), scale=_yarn_scale(scaling, factor))


def _yarn_scale(scaling: dict[str, Any], factor: float) -> float:
    def grown(by: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return grown(scaling["mscale"]) / grown(scaling["mscale_all_dim"])
    return grown(1.0)


def _longrope(spec: RopeSpec, scaling: dict[str, Any]) -> Frequencies:
    """LongRoPE (Ding et al., arXiv 2402.13753): a factor per frequency, one list for short sequences."""
    rates = _base(spec)
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    scale = scaling.get("attention_factor")
    if scale is None:
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    short, long = (torch.tensor(scaling[name]) for name in ("short_factor", "long_factor"))
    for name, values in (("short_factor", short), ("long_factor", long)):
        if values.shape != rates.shape:
            raise DataError(
                "config-invalid",
                f"config.json: {name} has the wrong length",
                why=f"expected {rates.numel()} (half of the rotary size), got {values.numel()}",
            )
    return Frequencies(rates / short, rates / long, int(original), float(scale))


_KINDS: dict[str, Callable[[RopeSpec, dict[str, Any]], Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
