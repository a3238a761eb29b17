"""Before a run begins: whether recipe, software, data, disks, nodes and GPUs are such that it can, and which node is to blame if not.

Every check has two halves: facts, gathered where they are (each rank, or the first rank of each node), and a pure function that judges the
facts of all together (`judge_...`). Facts travel over torch.distributed's store, never by a collective, so that a process which does not
answer is named instead of waited for (exchange.py). run.py is the order of it all.
"""
