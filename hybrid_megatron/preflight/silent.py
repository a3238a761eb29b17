"""Whom to blame for ranks that do not answer."""

from hybrid_megatron.preflight.agreement import named
from hybrid_megatron.preflight.finding import Finding, Level
from hybrid_megatron.preflight.job import Member

_MOST_NAMED = 8


def judge_silent(silent: list[int], members: list[Member], allocation: list[str], asked_for: str, seconds: float) -> Finding:
    """`members`: those that are known, silent or not; `allocation`: names of all nodes of the Slurm job, if there is one.

    The node of a rank that has never answered is its neighbours', by number, and if none of these has answered either, any node of the
    allocation that nobody has answered from.
    """
    known = {member.rank: member for member in members}
    nodes = {known[rank].node for rank in silent if rank in known}
    per_node = max((member.local_rank for member in members), default=0) + 1
    neighbours = {member.rank // per_node: member.node for member in members}
    strangers = [rank for rank in silent if rank not in known]
    nodes |= {neighbours[rank // per_node] for rank in strangers if rank // per_node in neighbours}
    if any(rank // per_node not in neighbours for rank in strangers):
        nodes |= set(allocation) - {member.node for member in members}
    more = f" and {len(silent) - _MOST_NAMED} more" if len(silent) > _MOST_NAMED else ""
    ranks = f"rank{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent[:_MOST_NAMED]))}{more}"
    return Finding(
        "ranks",
        Level.BAD_NODE if nodes else Level.FAILED,
        f"{ranks}{f' of {named(sorted(nodes))}' if nodes else ''} did not answer within {seconds:.0f} s (asked for: {asked_for})",
        "they hang, or have not started",
        "a dead GPU, a disk that is not mounted or a broken network are the usual reasons",
        tuple(sorted(nodes)),
    )
