"""Files of torch.save without torch: zips, the stream before torch 1.6, TorchScript archives, bare pickles. Reads no tensor data."""
