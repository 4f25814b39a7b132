"""transformers' Trainer: 3 epochs of 8 batches for each of 2 ranks, shuffled, with dropout, and a log of each step."""

import torch
import transformers
from kills import PLAN, begin_batch, begin_step, end, has_points, say
from torch.utils.data import Dataset

import ddp


class Counting(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, number):
        row = (torch.arange(12) * (number + 1)) % 31
        return {"input_ids": row, "labels": row}


class Steps(transformers.TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        begin_step(state.global_step)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            say(what="loss", step=state.global_step - 1, loss=logs["loss"])


class Counted(transformers.Trainer):
    def training_step(self, *args, **kwargs):
        begin_batch()
        return super().training_step(*args, **kwargs)


transformers.set_seed(7)
model = transformers.GPT2LMHeadModel(
    transformers.GPT2Config(
        vocab_size=32, n_positions=12, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
)
settings = transformers.TrainingArguments(
    PLAN.get("folder", "out"),
    num_train_epochs=3,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=PLAN.get("accumulate", 1),
    learning_rate=1e-2,
    report_to=[],
    save_strategy="no",
    logging_steps=1,
    use_cpu=True,
    disable_tqdm=True,
    seed=7,
)
trainer = Counted(has_points(model), settings, train_dataset=Counting(), callbacks=[Steps()])
ddp.integrations.attach(trainer)
trainer.train()
end(model)
