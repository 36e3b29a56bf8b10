"""Steps that are filled up to recorded shapes give what they give as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_families
import torch

from delivery.engine import EngineCore, Request, SamplingParams
from delivery.engine.graphs import MOST_MIXED_TOKENS, decode_sizes, mixed_shapes
from delivery.engine.inputs import ON_THE_DEVICE_ALONE, Batch, resolved_ids
from delivery.engine.runner import ModelRunner
from delivery.engine.warm import mixtures, warm_up
from delivery.kernels.gpu.decode_config import sequence_lanes


class Replayed:
    """Stands for recordings: computes a filled-up step as a recording does, and keeps the shapes used."""

    def __init__(self, runner: ModelRunner, shapes: list[tuple[int, int]]) -> None:
        self._runner = runner
        self._shapes = shapes
        self.used: list[tuple[int, int]] = []

    def shape(self, tokens: int, sequences: int) -> tuple[int, int] | None:
        return next((s for s in self._shapes if s[0] >= tokens and s[1] >= sequences), None)

    def run_mixed(self, batch: Batch) -> torch.Tensor:
        inputs = batch.inputs
        assert inputs.num_decodes == ON_THE_DEVICE_ALONE
        self.used.append((inputs.token_ids.shape[0], inputs.context_lens.shape[0]))
        return self._runner.logits(resolved_ids(batch, self._runner.last_token), inputs)


def generated(path: Path, shapes: list[tuple[int, int]]) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """Greedy tokens of prompts that come at different times, and the recorded shapes that were used."""
    made: dict[str, list[int]] = {}
    with EngineCore(path, device="cpu", block_size=16, max_num_batched_tokens=64, max_num_seqs=4) as engine:
        recorded = Replayed(engine._runner, shapes)
        engine._runner.mixed = recorded if shapes else None
        sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        for index, length in enumerate((1, 5, 40, 100, 17)):
            engine.add_request(Request(f"{index}", [(7 * i + length) % 250 for i in range(length)], sampling))
            made[f"{index}"] = []
            for output in engine.step():
                made[output.request_id] += output.new_token_ids
        while engine.has_unfinished():
            for output in engine.step():
                made[output.request_id] += output.new_token_ids
    return list(made.values()), recorded.used


def test_padding_tokens_and_sequences_change_nothing(tiny_checkpoint: Path) -> None:
    plain, used = generated(tiny_checkpoint, [])
    assert used == []
    padded, used = generated(tiny_checkpoint, [(24, 2), (24, 4), (48, 4), (80, 4)])
    assert padded == plain
    assert len(set(used)) > 1


@pytest.mark.parametrize(("tokens", "sequences"), [(8192, 512), (100, 8), (1, 1)])
def test_recorded_shapes_cover_every_step_up_to_the_largest(tokens: int, sequences: int) -> None:
    shapes = mixed_shapes(tokens, sequences)
    assert shapes == sorted(set(shapes))
    assert max(shapes) == (min(tokens, MOST_MIXED_TOKENS), sequences)
    assert all(size <= tokens and batch <= sequences for size, batch in shapes)
    assert decode_sizes(sequences)[-1] == sequences


@pytest.mark.parametrize(("tokens", "sequences"), [(8192, 512), (8192, 256), (64, 4), (2, 1)])
def test_warming_up_covers_the_classes_of_sequences(tokens: int, sequences: int) -> None:
    found = mixtures(tokens, sequences)
    assert all(size <= tokens and decodes + prompts <= sequences for decodes, prompts, size in found)
    every = {sequence_lanes(n) for n in range(1, sequences + 1)}
    assert {sequence_lanes(prompts) for _, prompts, _ in found} == every
    decoding = {sequence_lanes(n) for n in range(1, sequences)}
    assert {sequence_lanes(decodes) for decodes, _, _ in found if decodes} == decoding


def test_warming_up_changes_no_answer(tiny_checkpoint: Path) -> None:
    plain, _ = generated(tiny_checkpoint, [])
    with EngineCore(tiny_checkpoint, device="cpu", block_size=16, max_num_seqs=4) as engine:
        warm_up(engine._runner, 64, 4)
        sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        engine.add_request(Request("0", [(7 * i + 100) % 250 for i in range(100)], sampling))
        made = [t for _ in range(12) for output in engine.step() for t in output.new_token_ids]
    assert made == plain[3]


class ReplayedDecodes:
    """Stands for recorded decodes: fills every step of decodes alone up to `rows`."""

    def __init__(self, runner: ModelRunner, rows: int) -> None:
        self._runner = runner
        self._rows = rows
        self.runs = 0

    def padded(self, decodes: int) -> int | None:
        return self._rows if decodes <= self._rows else None

    def run(self, batch: Batch, last_token: torch.Tensor) -> torch.Tensor:
        assert batch.inputs.num_decodes == batch.inputs.query_start.shape[0] - 1 == self._rows
        self.runs += 1
        return self._runner.logits(resolved_ids(batch, last_token), batch.inputs)


def test_padded_decodes_leave_states_alone(tmp_path: Path) -> None:
    """Padding has a state of its own: of running requests and of one that is scored none is touched."""
    tiny_families.build("qwen3.5").save_pretrained(tmp_path)
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    made, scored = [], []
    for rows in (0, 4):
        options = {"block_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 32}
        with EngineCore(tmp_path, device="cpu", **options) as engine:
            recorded = ReplayedDecodes(engine._runner, rows)
            engine._runner.recorded = recorded if rows else None
            engine.add_request(Request("a", list(range(3, 20)), sampling))
            engine.step()
            pieces = engine.prompt_logits(list(range(5, 70)))
            logits = [next(pieces)]
            for _ in range(4):
                engine.step()
            logits += list(pieces)
            while engine.has_unfinished():
                engine.step()
            made.append(engine._runner.cache.states[0].memory[:5].clone())
            scored.append(torch.cat(logits))
            assert recorded.runs == (7 if rows else 0)
    torch.testing.assert_close(made[1], made[0])
    torch.testing.assert_close(scored[1], scored[0])
