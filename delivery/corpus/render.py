"""Turn corpora into calibration samples: token ids as the model sees them in serving."""

from __future__ import annotations

import hashlib
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from delivery.corpus.reading import documents
from delivery.corpus.script import script_shares, uncovered_scripts
from delivery.corpus.spec import parse
from delivery.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from delivery.corpus.document import Document, Split
    from delivery.corpus.spec import Source

RECOMMENDED_SAMPLES = 1024
_FLOOR_TOKENS = 64
_SEPARATOR = "\n\n"
_VOCABULARY_PROBES = 20_000


class TextEncoder(Protocol):
    """What rendering needs of a tokenizer; `delivery.checkpoint.Tokenizer` provides it."""

    @property
    def vocab_size(self) -> int: ...
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def encode_chat(self, messages: Sequence[Mapping[str, object]]) -> list[int]: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence. corpus: label of its source. token_ids: special tokens included."""

    corpus: str
    token_ids: tuple[int, ...]


@dataclass(slots=True)
class CorpusReport:
    """What was read of one corpus. Lengths are in tokens, special tokens of the template included."""

    documents: int = 0
    samples: int = 0
    tokens: int = 0
    truncated: int = 0
    lengths: list[int] = field(default_factory=list)

    def row(self, total_tokens: int) -> dict[str, object]:
        """Plain numbers for a report; `token_share` is of all tokens of the mix."""
        return {
            "documents": self.documents,
            "samples": self.samples,
            "tokens": self.tokens,
            "token_share": round(self.tokens / max(total_tokens, 1), 4),
            "truncated_documents": self.truncated,
            "document_tokens": {
                "min": min(self.lengths, default=0),
                "median": int(statistics.median(self.lengths)) if self.lengths else 0,
                "max": max(self.lengths, default=0),
            },
        }


@dataclass(frozen=True, slots=True)
class Rendered:
    """Calibration text as tokens, with statistics and warnings.

    warnings: sentences for the user. scripts: share of letters per script. requested: (samples,
    tokens each) that were asked for.
    """

    samples: tuple[Sample, ...]
    corpora: dict[str, CorpusReport]
    scripts: dict[str, float]
    warnings: tuple[str, ...]
    requested: tuple[int, int]

    @property
    def tokens(self) -> int:
        return sum(len(s.token_ids) for s in self.samples)

    def summary(self) -> dict[str, object]:
        """The report as plain JSON values, the same for the same text."""
        lengths = [len(s.token_ids) for s in self.samples]
        return {
            "samples": len(self.samples),
            "tokens": self.tokens,
            "requested_samples": self.requested[0],
            "requested_sample_tokens": self.requested[1],
            "sample_tokens": {"min": min(lengths), "max": max(lengths)},
            "corpora": {name: report.row(self.tokens) for name, report in self.corpora.items()},
            "scripts": {name: round(share, 4) for name, share in self.scripts.items()},
            "warnings": list(self.warnings),
        }


def render(
    spec: str | Sequence[str],
    tokenizer: TextEncoder,
    samples: int = 128,
    sequence_length: int = 2048,
    part: Split = "calibration",
    seed: int = 0,
) -> Rendered:
    """Samples of at most `sequence_length` tokens from a weighted mix, in a fixed shuffled order.

    Plain documents of one corpus are joined and cut into full samples, each beginning as a served
    prompt begins (with BOS where the tokenizer adds it). A conversation goes through the chat
    template and is a sample of its own, cut at `sequence_length`.
    Raises DataError `corpus-too-small` under 64 tokens, and what `load` raises.
    """
    sources = parse(spec)
    weight = sum(s.weight for s in sources)
    found: list[Sample] = []
    reports: dict[str, CorpusReport] = {}
    for source in sources:
        share = samples * source.weight / weight
        report = reports.setdefault(source.label, CorpusReport())
        budget = round(share * sequence_length)
        found += _render_one(source, tokenizer, budget, sequence_length, part, seed, report)
    total = sum(len(s.token_ids) for s in found)
    if total < _FLOOR_TOKENS:
        raise DataError(
            "corpus-too-small",
            f"the corpora give {total} tokens",
            why=f"expected at least {_FLOOR_TOKENS} for statistics that mean anything",
            hint="add text, or mix in a built-in corpus: --corpus YOURS=3,legal",
        )
    found.sort(key=lambda s: _order(s, seed))
    shares = script_shares(tokenizer.decode(s.token_ids) for s in found)
    warnings = [*_shortage(found, samples, sequence_length, total), *_script_warnings(tokenizer, shares)]
    return Rendered(tuple(found), reports, shares, tuple(warnings), (samples, sequence_length))


def recommendation(samples: int) -> str | None:
    """The recommendation printed below `RECOMMENDED_SAMPLES` samples."""
    if samples >= RECOMMENDED_SAMPLES:
        return None
    return (
        f"{samples} calibration samples; {RECOMMENDED_SAMPLES} or more of your own domain's text keep "
        "its quality best (--samples, --corpus)"
    )


def serving_prefix(tokenizer: TextEncoder) -> list[int]:
    """The special tokens that the tokenizer puts before a prompt, such as BOS; [] where it adds none."""
    bare = tokenizer.encode("a", add_special_tokens=False)
    full = tokenizer.encode("a", add_special_tokens=True)
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start]
    return []


def _render_one(
    source: Source,
    tokenizer: TextEncoder,
    budget: int,
    length: int,
    part: Split,
    seed: int,
    report: CorpusReport,
) -> list[Sample]:
    prefix = serving_prefix(tokenizer)
    room = length - len(prefix)
    found: list[Sample] = []
    pool: list[int] = []
    used = 0

    def take(ids: list[int]) -> None:
        nonlocal used
        found.append(Sample(source.label, tuple(ids)))
        used += len(ids)

    for document in documents(source, part, seed):
        if used + len(pool) >= budget:
            break
        report.documents += 1
        ids = _encode(document, tokenizer)
        report.lengths.append(len(ids))
        if not ids:
            continue  # a template may leave out what it does not know
        if document.messages:
            report.truncated += len(ids) > length
            take(ids[: min(length, max(budget - used, 1))])
            continue
        pool += ids
        while len(pool) >= room and used < budget:
            take((prefix + pool[:room])[: max(budget - used, 1)])
            pool = pool[room:]
    if pool and used < budget:
        take((prefix + pool)[: min(length, budget - used)])
    report.samples = len(found)
    report.tokens = used
    return found


def _encode(document: Document, tokenizer: TextEncoder) -> list[int]:
    if document.messages:
        return tokenizer.encode_chat(document.messages)
    return tokenizer.encode(document.text + _SEPARATOR, add_special_tokens=False)


def _order(sample: Sample, seed: int) -> bytes:
    text = f"{seed}:{sample.corpus}:{sample.token_ids}"
    return hashlib.sha256(text.encode()).digest()


def _shortage(found: list[Sample], samples: int, length: int, total: int) -> list[str]:
    if total >= 0.9 * samples * length:
        return []
    return [
        f"{total:,} of {samples * length:,} tokens found ({len(found)} samples for {samples} of {length} "
        "tokens): the text is short; statistics come from what is there"
    ]


def _script_warnings(tokenizer: TextEncoder, shares: Mapping[str, float]) -> list[str]:
    return uncovered_scripts(script_shares(_vocabulary(tokenizer)), shares)


def _vocabulary(tokenizer: TextEncoder) -> Iterator[str]:
    step = max(1, tokenizer.vocab_size // _VOCABULARY_PROBES)
    return (tokenizer.decode([i]) for i in range(0, tokenizer.vocab_size, step))
