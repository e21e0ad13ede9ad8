"""Attention of windows of new tokens over caches that hold a different number of tokens in every row."""

from .reference import ragged_attention_reference


__all__ = ["ragged_attention_reference"]
