"""EngineOptions: the settings of an engine and their defaults. No torch."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from delivery.errors import UsageError, did_you_mean

KV_DTYPES = ("auto", "int8", "int4", "fp8")
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Settings of an engine; None is decided by the device, the model or the engine directory.

    max_model_len: input and output tokens of one request. dtype: of activations; auto is float32 on a
    CPU and the checkpoint's own on a GPU. kv: storage of the KV cache. cache_max_entry_count: number of
    KV blocks if ≥ 1, share of the free memory if < 1. graphs: replay recorded decode steps.
    mismatch: for an engine that was built elsewhere, repeat the tuning ('rebuild') or refuse it
    ('refuse').
    """

    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enable_prefill: bool = True
    adaptive: bool = False
    wait_time_ms: float = 5.0
    ageing_s: float = 10.0
    prefix_cache: bool = True
    kv: str = "auto"
    block_size: int = 64
    cache_max_entry_count: float = 0.8
    graphs: bool = True
    seed: int = 0
    tp: int = 1
    streaming: str = "off"
    mismatch: str = "rebuild"

    @classmethod
    def of(cls, options: dict[str, Any]) -> EngineOptions:
        """Raises UsageError `unknown-engine-option` with the nearest name, or `engine-option-invalid`."""
        known = [f.name for f in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                raise UsageError(
                    "unknown-engine-option",
                    f"an engine has no option {name!r}",
                    hint=did_you_mean(name, known),
                )
        made = cls(**options)
        made._check_choice("kv", KV_DTYPES)
        made._check_choice("dtype", DTYPES)
        made._check_choice("mismatch", ("rebuild", "refuse"))
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "seed", "tp"):
            value = getattr(made, name)
            if value is None and name not in ("block_size", "seed", "tp"):
                continue
            if isinstance(value, bool) or not isinstance(value, Integral):
                raise _invalid(name, value, "a whole number")
            if value < 1 and name != "seed":
                raise _invalid(name, value, "at least 1")
        for name in ("cache_max_entry_count", "ageing_s", "wait_time_ms"):
            value = getattr(made, name)
            good = isinstance(value, int | float) and 0 <= value < math.inf
            if not good or (value == 0 and name != "wait_time_ms"):
                raise _invalid(name, value, "a number from 0" if name == "wait_time_ms" else "over 0")
        for name in ("enable_prefill", "adaptive", "prefix_cache", "graphs"):
            if not isinstance(getattr(made, name), bool):
                raise _invalid(name, getattr(made, name), "True or False")
        if made.tp != 1:
            raise _invalid("tp", made.tp, "1: this engine runs on one device")
        if made.streaming not in ("off", "auto"):
            raise _invalid("streaming", made.streaming, "'off': weights stay on the device")
        return made

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        if getattr(self, name) not in choices:
            raise _invalid(name, getattr(self, name), f"one of {', '.join(choices)}")

    def sequences(self, device: str) -> int:
        """Requests that run at once; a CPU gains nothing from hundreds."""
        return self.max_num_seqs or (512 if device == "cuda" else 64)

    def batched_tokens(self, device: str) -> int:
        """Tokens of a step; a CPU's step of thousands would hold up running decodes for many seconds."""
        return self.max_num_batched_tokens or (8192 if device == "cuda" else 512)


def _invalid(name: str, value: object, expected: str) -> UsageError:
    return UsageError("engine-option-invalid", f"{name} is {value!r}", why=f"expected {expected}")
