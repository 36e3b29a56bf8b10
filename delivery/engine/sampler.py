"""Sampler: from logits to the next token of every sampling row, on the device."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from delivery.engine.inputs import SPARE_SLOTS
from delivery.engine.outputs import Admitted, TokenLogprobs
from delivery.engine.request import SamplingParams
from delivery.kernels import OPS


@dataclass(frozen=True, slots=True)
class Row:
    """What the host knows of a sampling row. history: prompt and output tokens, for penalties only."""

    slot: int
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...]
    num_output: int
    history: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Sampled:
    """token_ids int64 [S]. For the rows in `logprob_rows`: the token's logprob [R], the top's [R, k]."""

    token_ids: torch.Tensor
    logprob_rows: tuple[int, ...] = ()
    chosen: torch.Tensor | None = None
    top: torch.Tensor | None = None
    top_ids: torch.Tensor | None = None

    def logprobs(self, token_ids: Sequence[int], rows: Sequence[Row]) -> tuple[TokenLogprobs | None, ...]:
        """Per row of the batch, on the host; () when no row asked for any."""
        if self.chosen is None or self.top is None or self.top_ids is None:
            return ()
        out: list[TokenLogprobs | None] = [None] * len(token_ids)
        values, tops, ids = self.chosen.tolist(), self.top.tolist(), self.top_ids.tolist()
        for at, row in enumerate(self.logprob_rows):
            count = rows[row].sampling.logprobs or 0
            pairs = tuple(zip(ids[at][:count], tops[at][:count], strict=True))
            out[row] = TokenLogprobs(token_ids[row], values[at], pairs)
        return tuple(out)


class Sampler:
    """Keeps the parameters of every slot on the device; draws depend on (seed, position) alone."""

    def __init__(self, slots: int, device: torch.device, seed: int) -> None:
        self._seed = seed
        self.temperature = torch.zeros(slots + SPARE_SLOTS, device=device)
        self.top_p = torch.ones(slots + SPARE_SLOTS, device=device)
        self.top_k = torch.zeros(slots + SPARE_SLOTS, dtype=torch.int32, device=device)
        self.seed = torch.zeros(slots + SPARE_SLOTS, dtype=torch.int64, device=device)
        # Parameters of rows that are all greedy, for the kernel that reads them.
        self._cold = torch.zeros(slots + SPARE_SLOTS, device=device)
        self._none = torch.zeros(slots + SPARE_SLOTS, dtype=torch.int64, device=device)
        self._random: set[int] = set()
        self._filtered: set[int] = set()

    def admit(self, new: Admitted) -> None:
        """Take over the parameters of a request that enters a slot."""
        params, slot = new.sampling, new.slot
        for members, belongs in (
            (self._random, not params.greedy),
            (self._filtered, not params.greedy and (params.top_k > 0 or params.top_p < 1.0)),
        ):
            (members.add if belongs else members.discard)(slot)
        self.temperature[slot] = params.temperature
        if params.greedy:
            return
        self.top_p[slot] = params.top_p
        self.top_k[slot] = max(params.top_k, 0)
        self.seed[slot] = self._request_seed(new)

    def _request_seed(self, new: Admitted) -> int:
        if new.sampling.seed is not None:
            return new.sampling.seed & (2**63 - 1)
        # The same after a preemption, in whatever slot the request continues.
        digest = hashlib.blake2b(f"{self._seed}:{new.number}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1

    def sample(
        self, logits: torch.Tensor, rows: Sequence[Row], slots: torch.Tensor, position: torch.Tensor
    ) -> Sampled:
        """logits [S, V] (changed in place where a row asks for it), slots and position int64 [S]; the
        first len(rows) of S are real, the rest is padding."""
        wanted = tuple(i for i, row in enumerate(rows) if row.sampling.logprobs is not None)
        # Log-probabilities are the model's own: before penalties, biases and temperature.
        logprobs = torch.log_softmax(logits[list(wanted)].float(), dim=-1) if wanted else None
        for index, row in enumerate(rows):
            if not _untouched(row):
                self._process(logits[index], row)
        if any(row.slot in self._random for row in rows):
            filtered = any(row.slot in self._filtered for row in rows)
            picked = (self.temperature[slots], self.top_k[slots], self.top_p[slots], self.seed[slots])
            token_ids = OPS["sample"](logits, *picked, position, filtered)
        else:
            token_ids = self._best(logits)
        if logprobs is None:
            return Sampled(token_ids)
        chosen = logprobs.gather(1, token_ids[list(wanted)][:, None])[:, 0]
        most = max(rows[i].sampling.logprobs or 0 for i in wanted)
        top, top_ids = logprobs.topk(min(max(1, most), logprobs.shape[-1]), dim=-1)
        return Sampled(token_ids, wanted, chosen, top, top_ids)

    def warm_up(self, logits: torch.Tensor) -> None:
        """Launch every kernel that a draw may take, on any logits [S, V] of at most `slots` rows."""
        rows = len(logits)
        rules = (self.temperature[:rows], self.top_k[:rows], self.top_p[:rows], self.seed[:rows])
        for filtered in (False, True):
            OPS["sample"](logits, *rules, self._none[:rows], filtered)
        self._best(logits)

    def _best(self, logits: torch.Tensor) -> torch.Tensor:
        """The first largest logit of each row: on a GPU by the sampling kernel, which reads a row faster."""
        if not logits.is_cuda:
            return logits.argmax(dim=-1)
        cold, none = self._cold[: len(logits)], self._none[: len(logits)]
        token_ids: torch.Tensor = OPS["sample"](
            logits, cold, self.top_k[: len(logits)], cold, none, none, False
        )
        return token_ids

    def _process(self, logits: torch.Tensor, row: Row) -> None:
        """Bias, penalties, forbidden ends and min_p of one row [V], in place."""
        params = row.sampling
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), device=logits.device)
            logits[ids] += torch.tensor(
                list(params.logit_bias.values()), dtype=logits.dtype, device=logits.device
            )
        if params.needs_history:
            _penalize(logits, params, row)
        if row.num_output < params.min_tokens:
            ends = (*row.eos_token_ids, *params.stop_token_ids)
            logits[list(ends)] = -math.inf
        if params.min_p > 0.0 and not params.greedy:
            floor = logits.max() + params.temperature * math.log(params.min_p)
            logits.masked_fill_(logits < floor, -math.inf)


def _untouched(row: Row) -> bool:
    """Whether nothing changes a row's logits: so for nearly all, and a view of each row takes its time."""
    params = row.sampling
    return not (
        params.logit_bias or params.needs_history or params.min_p > 0.0 or row.num_output < params.min_tokens
    )


def _penalize(logits: torch.Tensor, params: SamplingParams, row: Row) -> None:
    everything = torch.tensor(row.history, dtype=torch.int64, device=logits.device)
    if params.repetition_penalty != 1.0:
        ids = everything.unique()
        values = logits[ids]
        by = params.repetition_penalty
        logits[ids] = torch.where(values > 0, values / by, values * by)
    if row.num_output and (params.presence_penalty or params.frequency_penalty):
        ids, counts = everything[-row.num_output :].unique(return_counts=True)
        logits[ids] -= params.presence_penalty + params.frequency_penalty * counts.to(logits.dtype)
