"""A chart as a `.tgz` whose bytes depend on the chart alone.

`helm package` writes files' modification times into the archive, so that the same chart gives another
digest each time. Here the layout is Helm's (`<name>/<path>`, Chart.yaml, values.yaml and the schema
first, files only), and everything that varies is fixed.
"""

from __future__ import annotations

import io
import struct
import tarfile
import zlib
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_FIRST = ("Chart.yaml", "values.yaml", "values.schema.json")
_MODE = 0o644
# No clock: 1 is the smallest time that tar readers do not take for a missing one.
_MTIME = 1
_OS_UNKNOWN = 255
_STORED_BYTES = 0xFFFF


def write_chart_archive(chart_dir: Path, out: Path) -> None:
    """Write the chart below `chart_dir` to `out`. Equal files give equal bytes."""
    name = chart_dir.name
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for relative, path in _ordered(chart_dir):
            content = path.read_bytes()
            header = tarfile.TarInfo(f"{name}/{relative}")
            header.size, header.mode, header.mtime = len(content), _MODE, _MTIME
            tar.addfile(header, io.BytesIO(content))
    out.write_bytes(_gzip(buffer.getvalue()))


def _ordered(chart_dir: Path) -> Iterator[tuple[str, Path]]:
    found = {
        PurePosixPath(path.relative_to(chart_dir)).as_posix(): path
        for path in chart_dir.rglob("*")
        if path.is_file()
    }
    rest = sorted(found.keys() - set(_FIRST), key=lambda name: (not name.startswith("templates/"), name))
    for name in [*(n for n in _FIRST if n in found), *rest]:
        yield name, found[name]


def _gzip(data: bytes) -> bytes:
    """RFC 1952 with no name and no time.

    The blocks are stored, not deflated: what a compressor emits differs between zlib builds, and a
    chart is small.
    """
    header = struct.pack("<BBBBIBB", 0x1F, 0x8B, 8, 0, 0, 0, _OS_UNKNOWN)
    blocks = []
    for start in range(0, len(data), _STORED_BYTES):
        block = data[start : start + _STORED_BYTES]
        last = start + _STORED_BYTES >= len(data)
        blocks.append(struct.pack("<BHH", last, len(block), len(block) ^ 0xFFFF) + block)
    return header + b"".join(blocks) + struct.pack("<II", zlib.crc32(data), len(data) & 0xFFFFFFFF)
