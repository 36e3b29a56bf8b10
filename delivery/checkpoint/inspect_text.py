"""The facts of `describe` as lines for a person."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
_BYTES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def as_lines(facts: Mapping[str, Any]) -> list[str]:
    """Aligned `name: value` lines; what is not known is left out."""
    rows = [
        ("model", _model(facts)),
        ("shape", _shape(facts)),
        ("context", _context(facts)),
        ("weights", _weights(facts)),
        ("quantised", _quantization(facts.get("quantization"))),
        ("tokenizer", _tokenizer(facts.get("tokenizer"))),
        ("licence", facts.get("license")),
    ]
    lines = [f"{name + ':':<11} {text}" for name, text in rows if text]
    for engine, verdict in (facts.get("engines") or {}).items():
        lines.append(f"{'loads in:' if engine == 'deliver' else '':<11} {_engine(engine, verdict)}")
    return lines


def _model(facts: Mapping[str, Any]) -> str:
    family = f" ({facts['family']})" if facts.get("family") else ""
    count, active = facts.get("parameters"), facts.get("active_parameters")
    size = f", {_amount(count, _UNITS)} parameters" if count else ""
    size += f" ({_amount(active, _UNITS)} of them active)" if active else ""
    return f"{facts.get('architecture')}{family}{size}"


def _shape(facts: Mapping[str, Any]) -> str:
    names = {
        "layers": "layers",
        "hidden_size": "hidden",
        "heads": "heads",
        "kv_heads": "KV heads",
        "vocab_size": "tokens in the vocabulary",
    }
    words = [f"{facts[key]} {name}" for key, name in names.items() if facts.get(key)]
    if experts := facts.get("experts"):
        words.append(f"{experts['per_token']} of {experts['count']} experts a token")
    return ", ".join([*words, *(["tied embeddings"] if facts.get("tied_embeddings") else [])])


def _context(facts: Mapping[str, Any]) -> str:
    if not facts.get("context_tokens"):
        return ""
    kv, window = facts.get("kv_bytes_per_token"), facts.get("sliding_window")
    words = [f"{facts['context_tokens']} tokens"]
    words += [f"{_amount(kv, _BYTES)} of KV cache each"] if kv else []
    words += [f"window of {window}"] if window else []
    words += [f"{facts['rope_scaling']} rotary"] if facts.get("rope_scaling") else []
    return ", ".join(words)


def _weights(facts: Mapping[str, Any]) -> str:
    total = facts["size_bytes"] or 1
    shares = [f"{name} {100 * d['bytes'] / total:.0f} %" for name, d in (facts.get("dtypes") or {}).items()]
    bits = facts.get("bits_per_weight")
    words = [f"{_amount(facts['size_bytes'], _BYTES)} of {facts['format']}"]
    words += [f"{bits:.2f} bits per parameter"] if bits else []
    return ", ".join([*words, *shares])


def _quantization(entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return "no"
    words = [str(entry["method"])]
    words += [str(entry["format"])] if entry.get("format") not in (None, entry["method"]) else []
    words += [f"{entry['bits']} bits"] if entry.get("bits") else []
    words += [f"group size {entry['group_size']}"] if entry.get("group_size") else []
    words += [f"KV cache of {entry['kv_cache']} bits"] if entry.get("kv_cache") else []
    words += [f"{len(entry['plain_layers'])} layers left unquantised"] if entry.get("plain_layers") else []
    return ", ".join(words)


def _tokenizer(entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return "none"
    size = f", {entry['vocab_size']} tokens" if entry.get("vocab_size") else ""
    return f"{entry['kind']}{size}, {'with' if entry['chat_template'] else 'no'} chat template"


def _engine(name: str, verdict: Mapping[str, Any]) -> str:
    if not verdict["loads"]:
        return f"{name}: no, {verdict['why_not']}"
    return f"{name}: yes" + (f", needs {verdict['needs']}" if verdict["needs"] else "")


def _amount(value: float, units: tuple[tuple[float, str], ...]) -> str:
    for size, unit in units:
        if value >= size:
            return f"{value / size:.3g} {unit}" if len(unit) > 1 else f"{value / size:.3g}{unit}"
    return f"{value:g} B" if units is _BYTES else f"{value:g}"
