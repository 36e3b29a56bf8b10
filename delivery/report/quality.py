"""Quality in a report: metrics per corpus, charts, and the comparison with the last release."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from delivery.gate.bleu import bleu4
from delivery.gate.limits import bound_for, judge
from delivery.gate.metrics import corpus_metric, definition
from delivery.gate.outputs.garbling import garbled
from delivery.gate.report import Finding, Metric, Verdict
from delivery.report import charts, compose, words

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from delivery.gate.lookup import Found

LIMITS: Mapping[str, Any] = {
    "perplexity_ratio": 1.15,
    "kl_nats": 0.35,
    "top1_agreement_ratio": 0.75,
}
"""What holds unless the pipeline's `gate: limits:` says otherwise."""
_LARGEST_LOG = 700.0
_SUMMED = ("tokens", "nll", "source_nll", "kl", "same_top1")


def numbers(corpus: Mapping[str, Any]) -> dict[str, float]:
    """Metric name without its corpus → value, from the sums of one corpus."""
    early, late = corpus["early"], corpus["late"]
    both = {key: early[key] + late[key] for key in _SUMMED}
    out = {
        "perplexity": _perplexity(both["nll"], both["tokens"]),
        "source_perplexity": _perplexity(both["source_nll"], both["tokens"]),
        "perplexity_ratio": math.exp(
            min((both["nll"] - both["source_nll"]) / max(both["tokens"], 1), _LARGEST_LOG)
        ),
    }
    for name, part in (("", both), ("early_", early), ("late_", late)):
        if part["tokens"]:
            out[f"kl_{name}nats"] = part["kl"] / part["tokens"]
            share = part["same_top1"] / part["tokens"]
            out[f"top1_{name}ratio" if name else "top1_agreement_ratio"] = share
    return out


def metrics(measured: Mapping[str, Any], limits: Mapping[str, Any]) -> list[Metric]:
    """Every number of every corpus, judged by its limit; the source's perplexity beside the engine's."""
    out = []
    for corpus, sums in measured["corpora"].items():
        values = numbers(sums)
        for name, value in values.items():
            made = judge(corpus_metric(corpus, name), value, limits)
            if name == "perplexity":
                made = replace(made, baseline=values["source_perplexity"])
            out.append(made)
    outputs = measured["continuations"]
    if outputs["engine"]:
        out.append(judge("bleu4_ratio", bleu4(outputs["engine"], outputs["source"]), limits))
    for corpus, shares in _garbled(outputs).items():
        made = judge(corpus_metric(corpus, "garbled_ratio"), shares["engine"], limits)
        out.append(replace(made, baseline=shares["source"]))
    for task, counts in measured["tasks"].items():
        made = judge(corpus_metric(task, "accuracy_ratio"), counts["right"] / counts["questions"], limits)
        out.append(replace(made, baseline=counts["source_right"] / counts["questions"]))
    return out


def _garbled(outputs: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Corpus → {"engine", "source"} → share of that model's continuations that are garbled."""
    found: dict[str, dict[str, list[bool]]] = {}
    for side, texts in outputs["texts"].items():
        for corpus, text in zip(outputs["corpora"], texts, strict=True):
            verdicts = found.setdefault(corpus, {}).setdefault(side, [])
            verdicts.append(bool(garbled(text, cut=True)))
    return {c: {side: sum(v) / len(v) for side, v in sides.items()} for c, sides in found.items()}


def findings(measured: Mapping[str, Any], judged: Sequence[Metric]) -> list[Finding]:
    """A sentence for every metric over its limit."""
    out = []
    for metric in judged:
        if metric.status == Verdict.FAIL:
            limit = f", limit {words.limit(metric)}" if metric.limit is not None else ""
            out.append(
                Finding(
                    "error",
                    f"{words.title(metric.name)} is {words.amount(metric.value, metric.unit)}{limit}",
                )
            )
    for corpus, sums in measured["corpora"].items():
        tokens = sums["early"]["tokens"] + sums["late"]["tokens"]
        out.append(Finding("info", f"{corpus}: {tokens:,} positions in {sums['windows']} windows"))
    return out


def against_release(
    found: Found | None, metrics: Sequence[Metric], drift: float, read_as: Mapping[str, Any]
) -> tuple[list[Metric], list[Finding], dict[str, str] | None]:
    """Perplexities held against the last release's, where it is known: metrics, findings, and the baseline
    as a report shows it. drift: largest ratio of a perplexity to the release's. read_as: what makes texts
    into tokens; where the release's was another, perplexities per token say nothing of each other."""
    if found is None or found.made_now:
        return list(metrics), [], None
    before = found.baseline.anchor or found.baseline.current
    other = [name for name, value in read_as.items() if before.settings.get(name, value) != value]
    if other:
        told = f"not compared with the last release's perplexities: another {' and '.join(other)}"
        return list(metrics), [Finding("warning", told)], None
    judged, findings = against(metrics, before.values, drift)
    return judged, findings, compose.baseline_details(before)


def against(
    judged: Sequence[Metric], before: Mapping[str, float], drift: float
) -> tuple[list[Metric], list[Finding]]:
    """Compare each perplexity with the last release's as well: more than `drift` times it fails."""
    out, found = [], []
    for metric in judged:
        past = before.get(metric.name)
        if past and metric.name.endswith("perplexity") and metric.value > past * drift:
            limit = metric.limit if metric.status == Verdict.FAIL else past * drift  # the one that it broke
            metric = replace(metric, status=Verdict.FAIL.value, limit=limit)
            found.append(
                Finding(
                    "error",
                    f"{words.title(metric.name)} is {words.amount(metric.value, metric.unit)}, "
                    f"{metric.value / past - 1:+.0%} against the last release's {words.number(past)} "
                    f"(limit {drift - 1:+.0%})",
                )
            )
        out.append(metric)
    return out, found


def sureness(measured: Mapping[str, Any]) -> str:
    """How much text the numbers rest on."""
    tokens = sum(part["early"]["tokens"] + part["late"]["tokens"] for part in measured["corpora"].values())
    return f"deterministic: {tokens:,} positions of held-out text, the same for both models"


def charts_of(measured: Mapping[str, Any], limits: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Perplexity, KL by position, agreement by position, and layer errors where they are known."""
    corpora = list(measured["corpora"])
    values = [numbers(measured["corpora"][c]) for c in corpora]

    def series(*names: str) -> list[list[float]]:
        return [[v.get(name, 0.0) for v in values] for name in names]

    source, engine = series("source_perplexity", "perplexity")
    early_kl, late_kl = series("kl_early_nats", "kl_late_nats")
    early_top1, late_top1 = series("top1_early_ratio", "top1_late_ratio")
    bound = bound_for(limits, "perplexity")
    out = [
        charts.bars(
            "Perplexity per corpus",
            "ppl",
            corpora,
            {"source": source, "engine": engine},
            limit=bound.high if bound else None,
        ),
        charts.bars(
            "KL divergence from the source",
            "nats",
            corpora,
            {"before token 128": early_kl, "from token 128 on": late_kl},
        ),
        charts.bars(
            "Top-1 agreement with the source",
            "share",
            corpora,
            {"before token 128": early_top1, "from token 128 on": late_top1},
        ),
    ]
    layers = measured["layers"]
    if layers and all("sqnr_db" in row for row in layers):
        names = [str(row.get("name", i)) for i, row in enumerate(layers)]
        out.append(charts.bars("Layer errors (SQNR)", "dB", names, {"SQNR": [r["sqnr_db"] for r in layers]}))
    return out


def table(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers per corpus, the engine next to the source."""
    rows = []
    for corpus, sums in measured["corpora"].items():
        v = numbers(sums)
        rows.append(
            [
                corpus,
                words.number(v["source_perplexity"]),
                words.number(v["perplexity"]),
                words.number(v["perplexity_ratio"]),
                words.number(v.get("kl_nats", 0.0)),
                words.amount(v.get("top1_agreement_ratio", 0.0), "ratio"),
            ]
        )
    heads = ["corpus", "source perplexity", "engine perplexity", "ratio", "KL, nats", "top-1 agreement"]
    return charts.table("Quality per corpus", heads, rows)


def not_continued(limits: Mapping[str, Any], metrics: Sequence[Metric]) -> list[Finding]:
    """A warning per limit on continuations where none were made."""
    if any(m.name == "bleu4_ratio" for m in metrics):
        return []
    return [
        Finding(
            "warning", f"the limit {name} has no effect here: nothing was continued (--bleu-prompts is 0)"
        )
        for name in ("bleu4_ratio", "garbled_ratio")
        if name in limits
    ]


def unmatched(limits: Mapping[str, Any], metrics: Sequence[Metric]) -> list[Finding]:
    """A warning per limit of one corpus that is none of those measured here: it may be mistyped."""
    known = {m.name for m in metrics}
    named = {name: definition(name) for name in limits}
    return [
        Finding(
            "warning", f"the limit {name} has no effect here: no corpus or task of that name was measured"
        )
        for name, about in named.items()
        if about.per_corpus and name not in (about.name, *known)
    ]


def _perplexity(nll: float, tokens: int) -> float:
    return math.exp(min(nll / max(tokens, 1), _LARGEST_LOG))
