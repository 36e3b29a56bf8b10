"""Registers of tensor-core products in flight, followed along every path of a kernel's machine code.

A product started by one instruction reads operand A from registers, and writes its sums to registers, until a
wait that covers it. Nothing in between may write the one or touch the other. The assembler is meant to see to
that and does not always.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_PREDICATE = re.compile(r"^@!?U?P\d+ ")
_PRODUCT = re.compile(r"\w*GMMA\.64x(\d+)x\d+\S*\s+R(\d+), (?:R(\d+)|gdesc)")
_WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d)")
_BRANCH = re.compile(r"BRA `\((\.L_x_\d+)\)")
_NOTHING_WRITTEN = (
    "ST",
    "BAR",
    "BRA",
    "SYNCS",
    "WARP",
    "UT",
    "RED",
    "EXIT",
    "R2UR",
    "ISETP",
    "FSETP",
    "VOTE",
)

Group = tuple[frozenset[int], frozenset[int]]
"""Registers that hold sums, and operand A, of the products that one commit ends."""
_EMPTY: Group = (frozenset(), frozenset())


@dataclass(frozen=True)
class _State:
    """A place in the code, with the groups committed and not known to have ended, and the one being made."""

    at: int
    in_flight: tuple[Group, ...] = ()
    current: Group = _EMPTY


def hazards(lines: list[str]) -> list[str]:
    """Instructions that touch the sums, or write operand A, of a product that may still run."""
    labels = {line[:-1]: i for i, line in enumerate(lines) if re.fullmatch(r"\.L_x_\d+:", line)}
    first = next((i for i, line in enumerate(lines) if "GMMA" in line), len(lines))
    todo, seen = [_State(first)], set()
    found: dict[str, None] = {}
    while todo:
        state = todo.pop()
        while state.at < len(lines) and state not in seen:
            seen.add(state)
            line = lines[state.at]
            plain, conditional = _PREDICATE.sub("", line), _PREDICATE.match(line) is not None
            if branch := _BRANCH.search(plain):
                there = _State(labels[branch[1]], state.in_flight, state.current)
                if not conditional:
                    state = there
                    continue
                todo.append(there)
            elif plain.startswith("EXIT") and not conditional:
                break
            state = _after(state, plain, line, found)
    return list(found)


def _after(state: _State, plain: str, line: str, found: dict[str, None]) -> _State:
    """The state behind a line; what the line does wrong goes to `found`."""
    in_flight, (sums, operands) = state.in_flight, state.current
    if product := _PRODUCT.match(plain):
        columns, total, operand = product.groups()
        sums |= frozenset(range(int(total), int(total) + int(columns) // 2))
        if operand:
            operands |= frozenset(range(int(operand), int(operand) + 4))
        if "gsb0" in plain:
            return _State(state.at + 1, (*in_flight, (sums, operands)))
        return _State(state.at + 1, in_flight, (sums, operands))
    if wait := _WAIT.match(plain):
        kept = int(wait[1])
        return _State(state.at + 1, in_flight[-kept:] if kept else (), state.current)
    if not plain.startswith(("WARP", ".", "BRA")):
        written, read = touched(plain)
        busy = sums.union(*(group[0] for group in in_flight))
        read_there = operands.union(*(group[1] for group in in_flight))
        if (written | read) & busy or written & read_there:
            found[line] = None
    return _State(state.at + 1, in_flight, state.current)


def touched(plain: str) -> tuple[set[int], set[int]]:
    """(registers written, registers read) by an instruction without its predicate."""
    operation, _, rest = plain.partition(" ")
    wide = ".128" in operation or operation.endswith(".4")
    width = 4 if wide else 2 if ".64" in operation or "WIDE" in operation else 1
    written: set[int] = set()
    read: set[int] = set()
    for place, operand in enumerate(rest.rstrip(" ;").split(",")):
        operand = operand.strip()
        target = re.match(r"R(\d+)", operand)
        if target and not written and place < 2 and not operation.startswith(_NOTHING_WRITTEN):
            written = set(range(int(target[1]), int(target[1]) + width))
            continue
        for register, pair in re.findall(r"\bR(\d+)(\.64)?", operand):
            stored = operation.startswith("ST") and not operand.startswith(("[", "desc"))
            read |= set(range(int(register), int(register) + (2 if pair else width if stored else 1)))
    return written, read
