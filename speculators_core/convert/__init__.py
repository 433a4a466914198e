"""Drafts from other people's layouts into ours, and ours into theirs. `layouts.py` is the table of what is known.

A checkpoint is read by its layout's table, checked in full against config.json and verifier, and only then written.
"""

from __future__ import annotations

from speculators_core.convert.convert import convert, convert_to, detect, layout_names, read_foreign
from speculators_core.convert.foreign import TARGETS
from speculators_core.convert.options import Conversion, ConvertOptions

__all__ = [
    "TARGETS",
    "Conversion",
    "ConvertOptions",
    "convert",
    "convert_to",
    "detect",
    "layout_names",
    "read_foreign",
]
