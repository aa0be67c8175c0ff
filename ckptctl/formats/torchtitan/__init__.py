"""torchtitan's checkpoints: DCP folders `step-N` with names, heads and optimizer keys of its own. DCP reads them."""
