"""The Trainer of transformers with a small GPT-2 and generated data. With `attach`, a failure costs no finished step.

ddp-launch --nproc-per-node 2 --max-restarts 3 examples/train_transformers.py
"""

from __future__ import annotations

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import ddp


class Counting(Dataset):
    """Rows that count upwards, from a start of their own."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        row = (torch.arange(16) + number) % 32
        return {"input_ids": row, "labels": row}


def main() -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        )
    )
    settings = TrainingArguments(
        "trained",
        max_steps=20,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        report_to=[],
        save_strategy="no",
        use_cpu=not torch.accelerator.is_available(),
        disable_tqdm=True,
    )
    trainer = Trainer(model, settings, train_dataset=Counting())
    ddp.integrations.attach(trainer)
    result = trainer.train()
    if trainer.is_world_process_zero():
        print(f"world size {settings.world_size}, loss {result.training_loss:.3f}")


if __name__ == "__main__":
    main()
