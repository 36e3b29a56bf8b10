"""Quality of one model against another on the same tokens: log-likelihood, KL divergence, top-1 agreement."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from delivery.engine import LLM

EARLY = 128
"""Positions before this one are early: quantisation errors grow along a sequence."""


@dataclass(slots=True)
class Span:
    """Sums over scored positions; nats."""

    tokens: int = 0
    nll: float = 0.0
    source_nll: float = 0.0
    kl: float = 0.0
    same_top1: int = 0

    def add(self, other: Span) -> None:
        self.tokens += other.tokens
        self.nll += other.nll
        self.source_nll += other.source_nll
        self.kl += other.kl
        self.same_top1 += other.same_top1


@dataclass(frozen=True, slots=True)
class Quality:
    """One corpus: positions before `EARLY`, and the rest."""

    early: Span
    late: Span
    windows: int


def compare_quality(
    engine: LLM, source: LLM, windows: Sequence[Sequence[int]], done: Callable[[int], None]
) -> Quality:
    """Score windows of token ids with both models; `done` is called with the token count of each window.

    KL is KL(source ‖ engine), in float32 over the whole vocabulary. Never more than two pieces of
    logits are in memory. Both need the same `max_num_batched_tokens`, so that pieces match.
    """
    early, late = Span(), Span()
    for ids in windows:
        at = 0
        for ours, theirs in zip(engine.logits(ids), source.logits(ids), strict=True):
            targets = ids[at + 1 : at + 1 + len(ours)]
            cut = min(max(EARLY - at, 0), len(targets))
            early.add(_span(ours[:cut], theirs[:cut], targets[:cut]))
            late.add(_span(ours[cut : len(targets)], theirs[cut : len(targets)], targets[cut:]))
            at += len(ours)
        done(len(ids))
    return Quality(early, late, len(windows))


def in_turn(windows: Mapping[str, Sequence[Sequence[int]]], count: int) -> list[tuple[str, Sequence[int]]]:
    """The first `count` windows, taken from each corpus in turn, each with the name of its corpus."""
    rounds = max(map(len, windows.values()), default=0)
    taken = [(name, each[i]) for i in range(rounds) for name, each in windows.items() if i < len(each)]
    return taken[:count]


def continuations(
    engine: LLM, source: LLM, windows: Sequence[Sequence[int]], prompt_tokens: int, tokens: int
) -> dict[str, list[list[int]]]:
    """Greedy continuations of the first `prompt_tokens` of each window by both models, as token ids."""
    from delivery.engine import SamplingParams

    if not windows:
        return {"engine": [], "source": []}
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    prompts = [list(w[:prompt_tokens]) for w in windows]
    return {
        name: [made.token_ids for made in llm.generate(prompts, sampling)]
        for name, llm in (("engine", engine), ("source", source))
    }


def tokenizer_digest(model: Path) -> str:
    """SHA-256 of a model's tokenizer: perplexities per token compare only where tokens are the same."""
    found = hashlib.sha256()
    for name in ("tokenizer.json", "tokenizer.model"):
        if (path := model / name).is_file():
            found.update(path.read_bytes())
    return found.hexdigest()


def _span(ours: Any, theirs: Any, targets: Sequence[int]) -> Span:
    import torch

    if not targets:
        return Span()
    wanted = torch.tensor(targets, device=ours.device)[:, None]
    q = torch.log_softmax(ours.float(), dim=-1)
    p = torch.log_softmax(theirs.to(ours.device).float(), dim=-1)
    kl = torch.nn.functional.kl_div(q, p, reduction="sum", log_target=True)
    return Span(
        tokens=len(targets),
        nll=-float(q.gather(1, wanted).sum()),
        source_nll=-float(p.gather(1, wanted).sum()),
        kl=max(float(kl), 0.0),
        same_top1=int((q.argmax(-1) == p.argmax(-1)).sum()),
    )


def perplexity_nll(llm: LLM, texts: Sequence[str], done: Callable[[], None]) -> tuple[float, int]:
    """(sum of negative log-likelihood in nats, tokens scored) of texts, as far as the model can hold them."""
    total, count = 0.0, 0
    for text in texts:
        scores = llm.score([llm.encode(text)[: llm.core.max_model_len]])[0]
        total -= float(scores.sum())
        count += int(scores.size)
        done()
    return total, count
