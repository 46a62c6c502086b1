"""One file per architecture: what is special about it and nothing else."""
