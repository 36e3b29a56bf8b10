"""Statistics of the inputs of a linear layer, gathered from a stream of activations.

Everything is accumulated in float32 on the device of the activations. Tokens that hold NaN or
infinity are left out and counted, so that one bad token cannot spoil the scales of a layer.
"""

from __future__ import annotations

import torch

_RANGE_VALUES = 1 << 19
_GRAM_BLOCK = 1024


class InputStatistics:
    """What passed through one input of `features` channels.

    tokens: rows counted. not_finite: rows left out. absmax, total_abs, total_square: float32 [K].
    gram: float32 [K, K], the sum of x xᵀ over tokens, where `with_gram`; never divided by tokens.
    """

    def __init__(self, features: int, device: torch.device | str = "cpu", *, with_gram: bool = False) -> None:
        self.features = features
        self.tokens = 0
        self.not_finite = 0
        self.absmax = torch.zeros(features, device=device)
        self.total_abs = torch.zeros(features, device=device)
        self.total_square = torch.zeros(features, device=device)
        self.gram = torch.zeros(features, features, device=device) if with_gram else None
        self._rows: list[torch.Tensor] = []
        self._row_stride = 1

    def update(self, x: torch.Tensor) -> None:
        """Count in activations [T, K] of any float dtype; T may be 0 or 1."""
        x = x.detach().reshape(-1, self.features)
        if x.shape[0] == 0:
            return
        absolute = x.abs()
        absmax = absolute.amax(0).float()
        if not bool(torch.isfinite(absmax).all()):
            x = self._finite_rows(x)
            if x.shape[0] == 0:
                return
            absolute = x.abs()
            absmax = absolute.amax(0).float()
        self.tokens += x.shape[0]
        torch.maximum(self.absmax, absmax, out=self.absmax)
        self.total_abs += absolute.sum(0, dtype=torch.float32)
        if self.gram is None:
            self.total_square += x.float().square().sum(0)
        else:
            accumulate_gram(self.gram, x)
            self.total_square = self.gram.diagonal().clone()
        self._keep_for_range(x)

    def mean_abs(self) -> torch.Tensor:
        """float32 [K]: mean absolute value per channel; 0 where nothing was seen."""
        return self.total_abs / max(self.tokens, 1)

    def l2(self) -> torch.Tensor:
        """float32 [K]: root mean square per channel, AWQ's importance."""
        return (self.total_square / max(self.tokens, 1)).sqrt()

    def range_999(self) -> tuple[float, float]:
        """Bounds that hold 99.9 % of all values (0.05 % outside on each side), from evenly spaced tokens."""
        if not self._rows:
            return 0.0, 0.0
        values = torch.cat(self._rows).reshape(-1)
        outside = round(0.0005 * (values.numel() - 1)) + 1
        low = values.topk(outside, largest=False).values
        return float(low.max()), float(values.topk(outside).values.min())

    def divide(self, scale: torch.Tensor) -> None:
        """Make these the statistics of the same inputs divided by scale [K]; the range is left out."""
        self.absmax = self.absmax / scale
        self.total_abs = self.total_abs / scale
        self.total_square = self.total_square / scale.square()
        if self.gram is not None:
            self.gram.div_(scale).div_(scale[:, None])

    def tensors(self) -> dict[str, torch.Tensor]:
        """What is saved: absmax, mean_abs, l2 [K] and range_999 [2], float32 on the CPU."""
        return {
            "absmax": self.absmax.cpu(),
            "mean_abs": self.mean_abs().cpu(),
            "l2": self.l2().cpu(),
            "range_999": torch.tensor(self.range_999()),
        }

    def _finite_rows(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch.isfinite(x).all(1)
        self.not_finite += int((~kept).sum())
        return x[kept]

    def _keep_for_range(self, x: torch.Tensor) -> None:
        # Whole rows, so that every channel counts; when too many are held, every other one goes.
        self._rows.append(x[:: self._row_stride].float())
        while sum(rows.shape[0] for rows in self._rows) * self.features > 2 * _RANGE_VALUES:
            joined = torch.cat(self._rows)
            if joined.shape[0] < 2:
                break
            self._rows = [joined[::2].clone()]
            self._row_stride *= 2


def accumulate_gram(gram: torch.Tensor, x: torch.Tensor) -> None:
    """gram [K, K] += xᵀ x for x [T, K], in float32.

    Only blocks on and above the diagonal are multiplied; the rest is mirrored. On a GPU the product
    runs in TF32, which is exact for bfloat16 and float16 inputs (their mantissas fit in TF32's).
    """
    x = x.float()
    size = gram.shape[0]
    if size <= _GRAM_BLOCK // 2:
        gram.addmm_(x.T, x)
        return
    parts = max(2, -(-size // _GRAM_BLOCK))
    width = -(-size // parts)
    with tf32(x.device):
        for start in range(0, size, width):
            end = min(start + width, size)
            rows = x[:, start:end].T
            gram[start:end, start:end].addmm_(rows, x[:, start:end])
            if end < size:
                gram[start:end, end:].addmm_(rows, x[:, end:])
                gram[end:, start:end] = gram[start:end, end:].T


class tf32:  # noqa: N801 - reads as a statement: `with tf32(device):`
    """Allow TF32 in float32 products on a GPU while the block runs; nothing changes on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._active = device.type == "cuda"
        self._before = "none"

    def __enter__(self) -> None:
        if self._active:
            self._before = torch.backends.cuda.matmul.fp32_precision
            torch.backends.cuda.matmul.fp32_precision = "tf32"

    def __exit__(self, *exc: object) -> None:
        if self._active:
            torch.backends.cuda.matmul.fp32_precision = self._before
