"""Format numbers for people."""

from __future__ import annotations


def percent(probability: float) -> str:
    """Return a probability as a percentage with as few digits as it needs.

    >>> percent(0.914), percent(0.9971), percent(0.0123), percent(0.00004), percent(1e-9), percent(0.0)
    ('91%', '99.7%', '1.2%', '0.004%', '<0.001%', '0%')
    """
    value = 100 * probability
    if 99 < value < 100:
        return f"{value:.1f}%" if value < 99.95 else ">99.9%"
    if value == 0 or value >= 10:
        return f"{value:.0f}%"
    return f"{value:.1f}%" if value >= 1 else f"{value:.1g}%" if value >= 0.001 else "<0.001%"
