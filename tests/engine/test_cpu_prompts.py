"""Recorded steps with prompts on a CPU give what the plain ones give, however a prompt is cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_families import MODELS, build

from delivery.engine import EngineCore, Request, SamplingParams
from delivery.engine.cpu_prompt import CpuPrompts, query_blocks
from delivery.engine.inputs import Batch, resolved_ids
from delivery.engine.paged import StepInputs
from delivery.engine.runner import ModelRunner
from delivery.kernels.cpu.layer import SMALL_ROWS


class Watched:
    """Recorded steps, kept: their results, and, where asked, what the plain step makes of the same inputs."""

    def __init__(self, runner: ModelRunner, compared: bool) -> None:
        assert isinstance(runner.mixed, CpuPrompts)
        self._runner, self._recorded, self._compared = runner, runner.mixed, compared
        self.steps: list[int] = []
        self.results: list[torch.Tensor] = []
        self.plain: list[torch.Tensor] = []

    def shape(self, tokens: int, sequences: int) -> tuple[int, int] | None:
        return self._recorded.shape(tokens, sequences)

    def run_mixed(self, batch: Batch) -> torch.Tensor:
        ids = resolved_ids(batch, self._runner.last_token).clone()
        self.steps.append(ids.shape[0])
        self.results.append(self._recorded.run_mixed(batch).clone())
        if self._compared:  # this writes the keys and values anew, rounded otherwise
            self.plain.append(self._runner.logits(ids, batch.inputs))
        return self.results[-1]


def tokens(length: int) -> list[int]:
    return torch.randint(3, 99, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def watched(
    path: Path, lengths: tuple[int, ...], *, compared: bool = False, at_once: bool = False, **options: int
) -> Watched:
    """Steps of prompts of these lengths, that come together or one at every step, while others decode."""
    with EngineCore(path, device="cpu", prefix_cache=False, **options) as engine:
        watch = engine._runner.mixed = Watched(engine._runner, compared)
        for index, length in enumerate(lengths):
            sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
            engine.add_request(Request(f"{index}", tokens(length), sampling))
            if not at_once:
                engine.step()
        while engine.has_unfinished():
            engine.step()
    return watch


RECORDED = [
    name
    for name in MODELS
    if MODELS[name][0] in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3", "Granite", "Phi3")
    and name not in ("llama-head-dim", "llama-odd")
]


@pytest.mark.parametrize("name", RECORDED)
def test_any_mixture_in_every_family(name: str, tmp_path: Path) -> None:
    build(name).save_pretrained(tmp_path)
    for lengths, few in (((20, 3, 8), True), ((200, 70, 9, 140), False)):
        watch = watched(tmp_path, lengths, compared=True, block_size=8, max_num_batched_tokens=96)
        assert (max(watch.steps) <= SMALL_ROWS) is few
        for got, want in zip(watch.results, watch.plain, strict=True):
            torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def test_a_prompt_may_be_cut_anywhere(tiny_checkpoint: Path) -> None:
    whole = watched(tiny_checkpoint, (234,), max_num_batched_tokens=256)
    assert whole.steps[0] == 234
    for most in (117, 78):
        parts = watched(tiny_checkpoint, (234,), max_num_batched_tokens=most)
        assert parts.steps[: 234 // most] == [most] * (234 // most)
        assert torch.equal(parts.results[234 // most - 1], whole.results[0])


@pytest.mark.parametrize("part", ["q_proj", "k_proj", "v_proj"])
def test_attention_of_what_is_no_number_is_none(part: str, tmp_path: Path) -> None:
    model = build("llama")
    getattr(model.model.layers[1].self_attn, part).weight.data[0, 0] = float("nan")
    model.save_pretrained(tmp_path)
    for length in (20, 60):
        assert all(logits.isnan().all() for logits in watched(tmp_path, (length,)).results)


def test_other_requests_change_nothing(tiny_checkpoint: Path) -> None:
    alone = watched(tiny_checkpoint, (100,), max_num_batched_tokens=512)
    among = watched(tiny_checkpoint, (60, 100, 80), at_once=True, max_num_batched_tokens=512)
    assert alone.steps == [100]
    assert among.steps == [60 + 100 + 80]
    assert torch.equal(among.results[0][1], alone.results[0][0])


def test_blocks_of_queries_cover_every_row_of_every_sequence() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    inputs = StepInputs(
        empty,
        empty,
        empty,
        empty,
        empty,
        torch.tensor([0, 1, 2, 75], dtype=torch.int32),
        torch.tensor([40, 1, 100], dtype=torch.int32),
        empty,
        empty,
        -1,
    )
    blocks = query_blocks(inputs, 32)
    assert blocks == [(66, 9, 91, 2), (34, 32, 59, 2), (0, 1, 39, 0), (2, 32, 27, 2), (1, 1, 0, 1)]
