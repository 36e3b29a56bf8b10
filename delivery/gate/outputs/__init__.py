"""Judging generated text: loops, garbling, language, template markers, and a suite's expectations."""
