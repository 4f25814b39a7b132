"""A Trainer over a tiny random model, with a checkpoint."""

import os
import sys

import torch
import transformers

transformers.set_seed(3)
config = transformers.GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2)
model = transformers.GPT2LMHeadModel(config)
ids = torch.randint(0, 40, (48, 16), generator=torch.Generator().manual_seed(1))
data = [{"input_ids": each, "labels": each} for each in ids]
arguments = transformers.TrainingArguments(
    output_dir=os.path.join(os.getcwd(), "trained"),
    max_steps=6,
    per_device_train_batch_size=4,
    logging_steps=1,
    save_steps=6,
    use_cpu=True,
    report_to=[],
    disable_tqdm=True,
    seed=3,
)
trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
trainer.train()
losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
print(arguments.local_rank >= 0, arguments.world_size, losses, type(trainer.model_wrapped).__name__)
print(sorted(os.listdir("trained/checkpoint-6")) if arguments.should_save else "", file=sys.stderr)
