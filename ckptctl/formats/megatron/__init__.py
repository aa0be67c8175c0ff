"""Megatron-LM and megatron-core: classic folders of one file a rank, and torch_dist (a DCP with facts beside it)."""
