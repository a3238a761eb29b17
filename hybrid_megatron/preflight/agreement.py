"""Nodes that differ from the others."""

from collections import Counter
from collections.abc import Hashable


def odd_ones[Value: Hashable](values: dict[str, Value]) -> tuple[Value, dict[str, Value]]:
    """What most nodes have, and what the others have instead, by node. Without a majority the first node's counts as usual."""
    counts = Counter(values.values())
    first = next(iter(values.values()))
    usual = max(counts, key=lambda value: (counts[value], value == first))
    return usual, {node: value for node, value in values.items() if value != usual}


def has_majority(values: dict[str, Hashable]) -> bool:
    """Whether more than half of the nodes have the same."""
    return Counter(values.values()).most_common(1)[0][1] * 2 > len(values)


def named(nodes) -> str:
    """`node1, node2`; of many the first few."""
    nodes = list(nodes)
    return ", ".join(nodes[:4]) + (f" and {len(nodes) - 4} more" if len(nodes) > 4 else "")
