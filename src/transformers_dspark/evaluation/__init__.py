"""Measuring a target and its drafter: which models, which prompts, how fast, and how the figures are shown."""
