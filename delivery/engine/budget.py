"""How many tokens a step may carry, adapted to the requests that arrive. No torch."""

from __future__ import annotations

SHORT_PROMPT_TOKENS = 16
LONG_PROMPT_TOKENS = 32
SHORT_IN_A_ROW = 3
LOWERED_TOKENS = 2048


class TokenBudget:
    """`max_num_batched_tokens`, lowered to 2,048 while only short requests come.

    Three requests in a row under 16 prompt tokens lower it; one of 32 or more restores it at once;
    those between change nothing and do not break the row.
    """

    def __init__(self, max_num_batched_tokens: int, *, adaptive: bool = False) -> None:
        self.full = max_num_batched_tokens
        self.adaptive = adaptive
        self._short_in_a_row = 0
        self._lowered = False

    @property
    def tokens(self) -> int:
        return min(self.full, LOWERED_TOKENS) if self._lowered else self.full

    def arrived(self, prompt_tokens: int) -> None:
        if not self.adaptive:
            return
        if prompt_tokens >= LONG_PROMPT_TOKENS:
            self._short_in_a_row = 0
            self._lowered = False
        elif prompt_tokens < SHORT_PROMPT_TOKENS:
            self._short_in_a_row += 1
            self._lowered = self._lowered or self._short_in_a_row >= SHORT_IN_A_ROW
