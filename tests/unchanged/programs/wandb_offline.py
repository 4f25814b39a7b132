"""A run of W&B without a network: its process of its own has written when the job has ended."""

import os

os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": os.getcwd()}
import wandb

if os.environ["RANK"] == "0":
    run = wandb.init(project="unchanged", id="one")
    for step in range(5):
        run.log({"loss": 1 / (step + 1)})
    run.finish()
    (folder,) = [each for each in os.listdir("wandb") if each.startswith("offline-run")]
    print(os.path.exists(f"wandb/{folder}/run-one.wandb"), run.summary["loss"])
