"""Lightning: `.ckpt` files of its Trainer, and the folders that its sharding strategies write."""
