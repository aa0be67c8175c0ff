"""Folders of torch files, one or several a rank: slices (DTensor, ShardedTensor, flat parameters) as one checkpoint."""
