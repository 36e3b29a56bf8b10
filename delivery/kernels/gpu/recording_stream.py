"""The one stream that CUDA graphs are recorded on.

cuBLAS keeps a workspace, 32 MiB on Hopper, for every stream that it was ever called on, as long as the
process lives; and torch hands out 32 streams in turn. With a stream for each recording that comes to a GiB.
"""

from __future__ import annotations

from functools import cache

import torch


@cache
def recording_stream() -> torch.cuda.Stream:
    """A stream of the current device, the same one in every call."""
    return torch.cuda.Stream()
