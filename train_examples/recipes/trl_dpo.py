"""TRL's ``DPOTrainer``: ``python -m train_examples.recipes.trl_dpo``, with TRL 1.16 or newer.

The model learns to prefer how a text goes on to a piece of another text. Blocks, norms and the loss head run fused.
"""

from __future__ import annotations

import copy

import torch
from datasets import Dataset
from trl import DPOConfig, DPOTrainer

import fusedlayers as fl
from train_examples.recipes.text_model import TextWindows, byte_tokenizer, small_llama
from train_examples.recipes.trl_loss_head import use_loss_head


def main(steps: int = 200, folder: str = "runs/trl_dpo") -> list[float]:
    """Train, save, and return the loss of every tenth step, which starts at log 2."""
    model = small_llama()
    print(fl.replace(model))  # the one line for blocks, before the trainer moves, casts or wraps the model
    arguments = DPOConfig(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        logging_steps=min(10, steps),
        bf16=False,
        save_strategy="no",  # saved once at the end
        report_to="none",
        seed=0,
    )
    texts = [bytes(window.tolist()).decode("latin-1") for window in TextWindows().windows[: 8 * steps].to(torch.uint8)]
    parts = {"prompt": slice(0, 24), "chosen": slice(24, 48)}
    columns = {name: [text[part] for text in texts] for name, part in parts.items()}
    dataset = Dataset.from_dict(columns | {"rejected": columns["chosen"][1:] + columns["chosen"][:1]})
    trainer = DPOTrainer(
        model=model, ref_model=copy.deepcopy(model), args=arguments, train_dataset=dataset,
        processing_class=byte_tokenizer(),
    )  # fmt: skip
    use_loss_head(trainer)  # and the one for the loss
    trainer.train()
    trainer.save_model(folder)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
