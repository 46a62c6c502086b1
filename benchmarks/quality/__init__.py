"""Quality: how many answers survive pruning, by method and retention."""
