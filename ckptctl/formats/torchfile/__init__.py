"""Files of torch.save without torch: zips, the stream before 1.6, TorchScript, bare pickles. Reads no tensor data."""
