"""RequestRecord: one request of a load run. Times are seconds on the run's own clock."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

from delivery.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request: when it was due, sent and answered, its lengths, how it ended.

    `token_times_s` holds the arrival of each chunk that carried tokens. A failed request has an
    `error` and may lack first and last token times.
    """

    id: str
    scheduled_s: float
    sent_s: float
    first_token_s: float | None
    last_token_s: float | None
    prompt_tokens: int
    output_tokens: int
    token_times_s: tuple[float, ...] = ()
    finish_reason: str | None = None
    error: str | None = None

    @property
    def ttft_ms(self) -> float | None:
        """Time to first token from the *scheduled* arrival, so queueing at the sender counts."""
        return None if self.first_token_s is None else (self.first_token_s - self.scheduled_s) * 1e3

    @property
    def e2e_ms(self) -> float | None:
        """Last token from the scheduled arrival."""
        return None if self.last_token_s is None else (self.last_token_s - self.scheduled_s) * 1e3

    @property
    def tpot_ms(self) -> float | None:
        """(E2E − TTFT) / (output tokens − 1); None below two tokens."""
        if self.first_token_s is None or self.last_token_s is None or self.output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) * 1e3 / (self.output_tokens - 1)

    @property
    def schedule_delay_ms(self) -> float:
        """How late the request was sent."""
        return (self.sent_s - self.scheduled_s) * 1e3


def write_records(path: Path, records: Iterable[RequestRecord]) -> None:
    """One JSON object per line."""
    with path.open("w", encoding="utf-8", errors="backslashreplace") as stream:
        for record in records:
            stream.write(json.dumps(asdict(record), ensure_ascii=False) + "\n")


def read_records(path: Path) -> list[RequestRecord]:
    """The records of one file. Raises DataError `records-damaged` with the line number."""
    known = {f.name for f in fields(RequestRecord)}
    out = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            data = json.loads(line)
            data["token_times_s"] = tuple(data.get("token_times_s") or ())
            out.append(RequestRecord(**{k: v for k, v in data.items() if k in known}))
        except (ValueError, TypeError, AttributeError) as error:
            raise DataError(
                "records-damaged", f"{path}:{number} is not a request record", why=str(error)
            ) from error
    return out
