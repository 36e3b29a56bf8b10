"""Corpora: text for calibration and evaluation, from built-in sources, files or named public sets.

Nothing here imports torch.
"""

from delivery.corpus.builtin import builtin_names
from delivery.corpus.document import Document, Split, is_held_out
from delivery.corpus.named import named_sets
from delivery.corpus.reading import digest, heldout, load
from delivery.corpus.render import Rendered, Sample, recommendation, render
from delivery.corpus.script import script_shares
from delivery.corpus.spec import Source, bare, parse
from delivery.corpus.windows import check_heldout, heldout_windows

__all__ = [
    "Document",
    "Rendered",
    "Sample",
    "Source",
    "Split",
    "bare",
    "builtin_names",
    "check_heldout",
    "digest",
    "heldout",
    "heldout_windows",
    "is_held_out",
    "load",
    "named_sets",
    "parse",
    "recommendation",
    "render",
    "script_shares",
]
