"""PyTorch's distributed checkpoints (torch.distributed.checkpoint).

A `.metadata` index and `.distcp` files of items.
"""
