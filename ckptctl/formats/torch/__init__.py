"""Files of torch.save: plain state dicts and `{model, optimizer, ...}`, in torch's zip and in the older stream."""
