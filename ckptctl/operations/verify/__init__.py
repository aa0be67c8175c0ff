"""verify: one training step from a checkpoint in whatever format, compared with another's or with its own records.

The parts, in the order in which they are used (torch and Transformers are imported when they are called):

- `sides.opened(path, reading)`: a `Side`: the checkpoint from its headers, and `Side.under(names)`, the same under a
  model's own parameter names, whatever the format called them
- `device.Device`: where and in which type it is computed; `device.deterministic(...)`: the settings under which two
  runs of one step have equal bits
- `batches.batches(...)`: the token batches of the steps
- `model.built(...)`: the model of a config; `load.Loader`: streams a checkpoint's tensors into it
- `step.run(...)`: loads a side and trains its steps: a `record.Record`
- `compare.compare(a, b)`: two records; `checking.checks(...)`: one record against what the checkpoint says of itself
- `verifying.verify(...)`: all of it, and the document that `--json` prints
"""

from __future__ import annotations
