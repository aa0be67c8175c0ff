"""What is written goes on in a real Trainer, step for step with the losses of the run that was not interrupted.

The run is made here: three steps, a save by the Trainer itself, three more. Needs torch, transformers and accelerate.
"""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.support.checkpoints import torch_python
from tests.support.commands import good

SCRIPT = """
import json, sys, torch, transformers
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
family, out, resume, dtype = sys.argv[1:5]
sizes = dict(vocab_size=37, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             intermediate_size=24, max_position_embeddings=32, num_local_experts=3, num_experts_per_tok=2,
             n_embd=16, n_layer=2, n_head=4, n_positions=32, tie_word_embeddings=family in ("qwen2", "gpt2"),
             bos_token_id=1, eos_token_id=2)
torch.manual_seed(5)
config = AutoConfig.for_model(family, **sizes)
model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
if resume != "-":
    with torch.no_grad():  # a load that does nothing shows
        [p.zero_() for p in model.parameters()]
losses = []
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 24
    def __getitem__(self, i):
        ids = torch.randint(0, 37, (8,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids}
class Told(Trainer):
    def _get_train_sampler(self, *a, **k): return torch.utils.data.SequentialSampler(self.train_dataset)
    def compute_loss(self, model, inputs, **k):
        loss = model(**inputs).loss
        losses.append(loss.item())
        return loss
args = TrainingArguments(output_dir=out, use_cpu=True, per_device_train_batch_size=4, max_steps=6, save_steps=3,
    save_strategy="steps" if resume == "-" else "no", logging_steps=1, lr_scheduler_type="linear", learning_rate=1e-2,
    weight_decay=0.1, report_to=[], disable_tqdm=True, seed=5, optim="adamw_torch")
Told(model=model, args=args, train_dataset=Rows()).train(resume_from_checkpoint=None if resume == "-" else resume)
print("LOSSES " + json.dumps(losses))
"""


def train(family, out, resume="-", dtype="float32"):
    """The losses of a run of six steps, or of what is left of it from a folder."""
    python = torch_python()
    if python is None:
        pytest.skip("needs a Python with torch: install it, or name one in CKPTCTL_TORCH_PYTHON")
    if subprocess.run([python, "-c", "import transformers, accelerate"], capture_output=True, check=False).returncode:
        pytest.skip("needs transformers and accelerate beside torch")
    words = [python, "-c", SCRIPT, family, str(out), str(resume), dtype]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(next(x for x in done.stdout.splitlines() if x.startswith("LOSSES ")).removeprefix("LOSSES "))


@pytest.mark.real
@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", "float32"), ("gpt2", "float32"), ("mixtral", "float32"), ("qwen2", "bfloat16")]
)
def test_a_trainer_goes_on_with_the_same_losses_by_way_of_a_dcp_and_a_torch_file(family, dtype, tmp_path):
    whole = train(family, tmp_path / "run", dtype=dtype)
    saved = tmp_path / "run" / "checkpoint-3"
    good("convert", saved, tmp_path / "dcp", "--to", "dcp", "--dp", "3")
    good("convert", tmp_path / "dcp", tmp_path / "t.pt", "--to", "torch", "--model-config", saved)
    good("convert", tmp_path / "t.pt", tmp_path / "back", "--to", "trainer", "--model-config", saved)
    got = train(family, tmp_path / "again", tmp_path / "back", dtype)
    assert len(whole) == 6
    assert got == pytest.approx(whole[3:], abs=1e-6 if dtype == "float32" else 5e-3)
