"""What a run will be and take, known from its recipe alone: no GPU, no process group, no dataset. `plan.py` puts it together."""
