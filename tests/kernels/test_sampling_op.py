"""Sampling: frequencies, independence of the batch, and the filters' edges."""

from __future__ import annotations

import torch

from delivery.kernels import OPS
from delivery.kernels.sampling import gumbel


def draw(logits: torch.Tensor, **settings: float) -> torch.Tensor:
    rows = logits.shape[0]
    fill = {"temperature": 1.0, "top_k": 0.0, "top_p": 1.0} | settings
    position = torch.arange(rows)
    return OPS["sample"](
        logits,
        torch.full((rows,), fill["temperature"]),
        torch.full((rows,), int(fill["top_k"]), dtype=torch.int32),
        torch.full((rows,), fill["top_p"]),
        torch.full((rows,), 7, dtype=torch.int64),
        position,
    )


def test_tokens_come_at_the_rate_of_their_probability() -> None:
    share = torch.tensor([0.5, 0.25, 0.125, 0.125])
    drawn = draw(share.log().expand(20000, 4).contiguous())
    seen = torch.bincount(drawn, minlength=4) / 20000
    # Four standard deviations of a share of 20,000 draws are at most 0.0142.
    assert (seen - share).abs().max() < 0.0142


def test_noise_of_different_seeds_and_positions_is_unrelated() -> None:
    seeds, positions = torch.tensor([1, 1, 2, 1 << 32]), torch.tensor([0, 1, 0, 0])
    noise = gumbel(seeds, positions, 4096)
    related = torch.corrcoef(noise) - torch.eye(4, dtype=noise.dtype)
    assert related.abs().max() < 0.07
    assert noise.isfinite().all()


def test_a_request_draws_the_same_token_in_any_batch() -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(1))
    together = draw(logits, top_p=0.9)
    # Row 0 has position 0 in both calls; the others differ in company only.
    assert draw(logits[:1], top_p=0.9)[0] == together[0]


def test_top_k_of_one_and_a_tiny_top_p_are_greedy() -> None:
    logits = torch.randn(50, 97, generator=torch.Generator().manual_seed(2))
    best = logits.argmax(-1)
    assert torch.equal(draw(logits, top_k=1.0), best)
    assert torch.equal(draw(logits, top_p=1e-6), best)
    assert torch.equal(draw(logits, temperature=0.0, top_k=3.0), best)


def test_filters_never_let_a_lesser_token_through() -> None:
    logits = torch.randn(2000, 60, generator=torch.Generator().manual_seed(3))
    rank = (logits > logits.gather(1, draw(logits, top_k=5.0, temperature=3.0)[:, None])).sum(-1)
    assert rank.max() == 4  # reached, and not exceeded
