"""Options of the commands that run a target with its drafter."""

from __future__ import annotations

import argparse

from . import UsageError


def add_pair_options(parser: argparse.ArgumentParser) -> None:
    """Adds `--target`, `--drafter` and `--device`."""
    parser.add_argument(
        "--target", metavar="PATH", help="folder or hub id (default: SmolLM2-135M-Instruct, fetched once)"
    )
    parser.add_argument("--drafter", metavar="PATH", help="folder or hub id (default: the one in this checkout)")
    parser.add_argument("--device", metavar="NAME", help="cuda, cuda:1, cpu (default: cuda if there is one)")


def check_temperature(temperature: float) -> None:
    """
    Raises:
        UsageError: the temperature is negative or no number.
    """
    if not 0 <= temperature < float("inf"):
        raise UsageError(f"--temperature {temperature:g} is not possible: give 0 for greedy, or more to sample.")
