"""Jobs of a Slurm cluster as a login node sees them: what to submit, from which code, and how it goes. Nothing here runs within a job:
that is slurm/ at the project's top, in bash."""
