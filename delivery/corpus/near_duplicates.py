"""Find texts that are nearly the same, by MinHash over word shingles (Broder 1997), banded for speed."""

from __future__ import annotations

import hashlib
import re

import numpy as np

_HASHES = 64
_BANDS = 16
_SHINGLE = 4
_PRIME = (1 << 61) - 1
_WORD = re.compile(r"\w+", re.UNICODE)


class NearDuplicates:
    """Remembers texts, and detects new ones that nearly repeat a known one.

    similarity: share of common word shingles (Jaccard) from which two texts count as the same.
    """

    def __init__(self, similarity: float = 0.8) -> None:
        self._similarity = similarity
        random = np.random.default_rng(0)
        self._factors = [int(v) for v in random.integers(1, _PRIME, _HASHES)]
        self._offsets = [int(v) for v in random.integers(0, _PRIME, _HASHES)]
        self._bands: list[dict[bytes, list[int]]] = [{} for _ in range(_BANDS)]
        self._sketches: list[np.ndarray] = []

    def seen(self, text: str) -> bool:
        """Whether a text like this was added before; if not, it is added now."""
        sketch = self._sketch(text)
        rows = _HASHES // _BANDS
        keys = [sketch[i * rows : (i + 1) * rows].tobytes() for i in range(_BANDS)]
        candidates = {j for band, key in zip(self._bands, keys, strict=True) for j in band.get(key, ())}
        if any(float((self._sketches[j] == sketch).mean()) >= self._similarity for j in candidates):
            return True
        for band, key in zip(self._bands, keys, strict=True):
            band.setdefault(key, []).append(len(self._sketches))
        self._sketches.append(sketch)
        return False

    def _sketch(self, text: str) -> np.ndarray:
        words = _WORD.findall(text.lower())
        letters = "".join(words)
        # Han, Kana and Thai are written without blanks: their characters take the place of words.
        if len(words) < _SHINGLE or sum(c >= "\u0e00" for c in letters) > len(letters) / 2:
            words = list(letters)
        last = max(1, len(words) - _SHINGLE + 1)
        shingles = {" ".join(words[i : i + _SHINGLE]) for i in range(last)}
        digests = (hashlib.blake2b(s.encode(), digest_size=7).digest() for s in shingles)
        values = [int.from_bytes(d, "little") for d in digests]
        least = [
            min((factor * v + offset) % _PRIME for v in values)
            for factor, offset in zip(self._factors, self._offsets, strict=True)
        ]
        return np.array(least, dtype=np.uint64)
