"""The gated delta rule: chunks and single steps against the recurrence that defines it."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from delivery.model import delta
from delivery.model.config import DeltaSpec

HEADS, KEY, VALUE = 3, 5, 4


def sequence(tokens: int) -> tuple[torch.Tensor, ...]:
    """q, k, v, decay, beta of one sequence, and a state to begin with; float64."""
    random = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    q, k = (functional.normalize(normal(tokens, HEADS, KEY), dim=-1) for _ in range(2))
    decay = -normal(tokens, HEADS).abs() * 0.3
    return (
        q,
        k,
        normal(tokens, HEADS, VALUE),
        decay,
        normal(tokens, HEADS).sigmoid(),
        normal(HEADS, KEY, VALUE),
    )


def recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token by token and head by head, as the paper writes it."""
    state, out = state.clone(), torch.zeros_like(v)
    for t in range(q.shape[0]):
        for h in range(HEADS):
            kept = decay[t, h].exp() * state[h]
            error = v[t, h] - kept.T @ k[t, h]
            state[h] = kept + beta[t, h] * torch.outer(k[t, h], error)
            out[t, h] = state[h].T @ q[t, h]
    return out, state


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 130])
def test_chunks_are_the_recurrence(tokens: int) -> None:
    inputs = sequence(tokens)
    for made, expected in zip(delta.scan(*inputs), recurrence(*inputs), strict=True):
        torch.testing.assert_close(made, expected, atol=1e-10, rtol=0)


def test_steps_are_the_recurrence() -> None:
    *tokens, state = sequence(9)
    out, expected = recurrence(*tokens, state)  # type: ignore[arg-type]
    states = torch.stack([state, torch.zeros_like(state)])  # a second sequence, which sees other tokens
    for t in range(9):
        pair = [torch.stack([x[t], x[8 - t]]) for x in tokens]
        made, states = delta.step(*pair, states)
        torch.testing.assert_close(made[0], out[t], atol=1e-10, rtol=0)
    torch.testing.assert_close(states[0], expected, atol=1e-10, rtol=0)


def test_strong_decay_overflows_nothing() -> None:
    q, k, v, decay, beta, state = (x.float() for x in sequence(130))
    out, last = delta.scan(q, k, v, decay * 400, beta, state)
    assert bool(torch.isfinite(out).all() & torch.isfinite(last).all())
    torch.testing.assert_close(out, recurrence(q, k, v, decay * 400, beta, state)[0], atol=1e-5, rtol=0)


def test_a_convolution_goes_on_where_it_stopped() -> None:
    random = torch.Generator().manual_seed(0)
    x, kernel = torch.randn(12, 6, generator=random), torch.randn(6, 4, generator=random)
    padded = functional.pad(x.T[None], (3, 0))
    whole = functional.silu(functional.conv1d(padded, kernel[:, None], groups=6))[0].T
    before, pieces = torch.zeros(3, 6), []
    for piece in x.split((5, 1, 1, 5)):
        out, before = delta.convolve(piece, kernel, before)
        pieces.append(out)
    torch.testing.assert_close(torch.cat(pieces), whole, atol=1e-6, rtol=0)
    assert torch.equal(before, x[-3:])


def test_heads_are_of_length_one_and_shared_by_neighbours() -> None:
    spec = DeltaSpec(num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=3, conv_kernel=4)
    mixed = torch.randn(7, delta.channels(spec), generator=torch.Generator().manual_seed(0))
    q, k, v = delta.heads_of(spec, mixed)
    assert q.shape == k.shape == (7, 4, 8)
    assert torch.equal(v, mixed[:, 32:].view(7, 4, 3))
    torch.testing.assert_close(k.norm(dim=-1), torch.ones(7, 4), atol=1e-4, rtol=0)
    torch.testing.assert_close(q.norm(dim=-1), torch.full((7, 4), 8**-0.5), atol=1e-4, rtol=0)
    assert torch.equal(k[:, 0], k[:, 1])
    assert not torch.equal(k[:, 1], k[:, 2])
