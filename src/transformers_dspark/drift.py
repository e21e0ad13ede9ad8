"""How what steps take drifts away from what was once measured, as the rounds of a call show it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np


SHARE = 1 / 8  # of a surprise that is taken over; of the first ones of a total more
OF_ALL = 3 / 4  # of that, what is held to be true of all steps


class Seen(NamedTuple):
    """By total of a row count, in rising order: logarithm of what differs from the rest, and how often it was seen."""

    tokens: np.ndarray
    own: np.ndarray
    times: np.ndarray


@dataclass(frozen=True)
class Drift:
    """
    Logarithm of what steps take by now over what was measured: of all steps, and of single totals beside that.

    Args:
        whole (`float`): Of all steps.
        seen (`Mapping[int, Seen]`): By measured row count.
    """

    whole: float = 0.0
    seen: Mapping[int, Seen] = field(default_factory=dict)

    def at(self, rows: int, tokens: Any) -> Any:
        """Of steps of a measured row count over one or many totals; linear between those that are known."""
        return self.whole + (np.interp(tokens, *self.seen[rows][:2]) if rows in self.seen else 0.0)

    def after(self, rows: int, tokens: float, surprise: float, measured: np.ndarray) -> Drift:
        """
        This one after a step that was a surprise; `measured` are the totals that the table holds. Most of it is held
        to be true of all steps, but hardly of those that were seen to be otherwise.
        """
        zeros = np.zeros(len(measured))
        seen = self.seen.get(rows, Seen(measured, zeros, zeros))
        xs, own, times = np.array(seen.tokens), np.array(seen.own), np.array(seen.times)
        place = int(xs.searchsorted(tokens))
        if place == len(xs) or xs[place] != tokens:
            own = np.insert(own, place, np.interp(tokens, xs, own))
            xs, times = np.insert(xs, place, tokens), np.insert(times, place, 0.0)
        share = max(SHARE, 1 / (4 + times[place])) * surprise
        shift = np.where(xs == tokens, share * (1 - OF_ALL), -share * OF_ALL * OF_ALL * times / (times + 2))
        return Drift(self.whole + share * OF_ALL, {**self.seen, rows: Seen(xs, own + shift, times + (xs == tokens))})


__all__ = ["SHARE", "Drift"]
