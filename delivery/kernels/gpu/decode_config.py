"""Tile shapes of the decode kernel: what measured best on an H200, cut down to a smaller card's memory."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """tile: tokens a step; stages: tiles in flight and in use; programs: per multiprocessor.

    registers: at most so many a thread (None: no limit), where more programs must be resident.
    """

    tile: int
    stages: int
    warps: int
    programs: int
    registers: int | None = None

    def shared_bytes(self, token_bytes: int) -> int:
        """Shared memory of a program, a little over what it takes; a head's K and V take `token_bytes`."""
        return (self.stages - 1) * self.tile * token_bytes + (8 << 10)


def sequence_lanes(sequences: int) -> int:
    """Lanes in which a program holds the lengths of all sequences: few classes, each compiled for itself."""
    return 16 if sequences <= 16 else max(128, 1 << (sequences - 1).bit_length())


ALONE = 132
"""(sequence, kv head) pairs up to which one program a multiprocessor, with deep tiles, is faster."""


def decode_config(
    layout: str, token_bytes: int, pairs: int, shared_bytes: int, shared_bytes_sm: int
) -> DecodeConfig:
    """The shape for `pairs` (sequence, kv head) pairs whose keys and values take `token_bytes` a token.

    shared_bytes, shared_bytes_sm: shared memory that one program, and all of a multiprocessor's, may use.
    """
    if layout == "auto":
        config = DecodeConfig(64, 4, 4, 1) if pairs <= ALONE else DecodeConfig(64, 3, 4, 2)
    elif pairs <= ALONE // 2:
        config = DecodeConfig(128, 3, 4, 2)
    else:
        config = DecodeConfig(64 if layout == "int4" else 32, 3, 1, 8)
    while config.shared_bytes(token_bytes) > shared_bytes and config.tile > 16:
        smaller = config.stages > 2
        config = (
            replace(config, stages=config.stages - 1) if smaller else replace(config, tile=config.tile // 2)
        )
    resident = max(1, shared_bytes_sm // (config.shared_bytes(token_bytes) + 1024))
    return replace(config, programs=min(config.programs, resident))


def decode_candidates(layout: str) -> tuple[DecodeConfig, ...]:
    """Shapes worth measuring on another card."""
    plain = (
        DecodeConfig(64, 4, 4, 1),
        DecodeConfig(64, 3, 4, 2),
        DecodeConfig(64, 3, 2, 3),
        DecodeConfig(128, 3, 4, 1),
    )
    quantised = (
        DecodeConfig(128, 4, 4, 1),
        DecodeConfig(128, 3, 4, 2),
        DecodeConfig(64, 3, 2, 4),
        DecodeConfig(64, 2, 2, 8, 128),
        DecodeConfig(64, 3, 1, 8),
        DecodeConfig(32, 3, 1, 8),
    )
    return plain if layout == "auto" else quantised
