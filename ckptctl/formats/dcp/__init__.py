"""PyTorch's distributed checkpoints (torch.distributed.checkpoint): a `.metadata` index and `.distcp` files of items."""
