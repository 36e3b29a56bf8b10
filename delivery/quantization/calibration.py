"""The calibration artifact: token ids as rendered, statistics of the float model, and the report.

tokens.safetensors      token_ids int32 [T], lengths int32 [S]: all samples, one after the other
samples.jsonl           a line per sample: corpus, tokens, text
statistics.safetensors  layers.<i>.<input>.{absmax,mean_abs,l2} float32 [K], .range_999 [2]
calibration.json        tokens and shares per corpus and script, lengths, warnings
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from delivery.errors import DataError

TOKENS = "tokens.safetensors"
SAMPLES = "samples.jsonl"
STATISTICS = "statistics.safetensors"
REPORT = "calibration.json"


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a calibration artifact holds for a quantiser. samples: token ids of each sequence."""

    samples: tuple[tuple[int, ...], ...]
    report: Mapping[str, Any]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.samples))


def write_tokens(directory: Path, samples: Sequence[Sequence[int]]) -> None:
    """Write the token ids of all samples."""
    flat = torch.tensor([t for s in samples for t in s], dtype=torch.int32)
    lengths = torch.tensor([len(s) for s in samples], dtype=torch.int32)
    save_file({"token_ids": flat, "lengths": lengths}, directory / TOKENS)


def read_calibration(directory: Path) -> Calibration:
    """Read what the calibrate step wrote. Raises DataError `calibration-damaged`."""
    try:
        tensors = load_file(directory / TOKENS)
        flat, lengths = tensors["token_ids"].tolist(), tensors["lengths"].tolist()
        report = json.loads((directory / REPORT).read_text("utf-8"))
    except (OSError, KeyError, ValueError, RuntimeError) as error:
        raise _damaged(directory, f"{type(error).__name__}: {error}") from error
    if sum(lengths) != len(flat) or not flat or min(lengths) < 1:
        raise _damaged(
            directory, f"{len(lengths)} lengths add up to {sum(lengths)}, there are {len(flat)} tokens"
        )
    samples, start = [], 0
    for length in lengths:
        samples.append(tuple(flat[start : start + length]))
        start += length
    return Calibration(tuple(samples), report)


def read_samples(directory: Path, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """The token ids alone, for a model of that vocabulary. Raises as the two others do."""
    calibration = read_calibration(directory)
    check_vocabulary(calibration, vocab_size)
    return calibration.samples


def check_vocabulary(calibration: Calibration, vocab_size: int) -> None:
    """Raises DataError `calibration-mismatch` when a token id is outside the model's vocabulary."""
    largest = max(max(s) for s in calibration.samples)
    if largest >= vocab_size:
        raise DataError(
            "calibration-mismatch",
            "the calibration was made with another tokenizer",
            why=f"it holds token id {largest}, the model has {vocab_size} tokens",
            hint="deliver calibrate --checkpoint DIR for this model",
        )


def read_statistics(directory: Path, layer: int) -> dict[str, torch.Tensor]:
    """The statistics of one layer: `<input>.<kind>` → float32 tensor, e.g. `q_proj.absmax`."""
    prefix = f"layers.{layer}."
    with safe_open(directory / STATISTICS, "pt") as stored:
        return {n.removeprefix(prefix): stored.get_tensor(n) for n in stored.keys() if n.startswith(prefix)}  # noqa: SIM118


def _damaged(directory: Path, why: str) -> DataError:
    return DataError(
        "calibration-damaged",
        f"{directory} cannot be read as a calibration",
        why=why,
        hint="run the calibrate step again",
    )
