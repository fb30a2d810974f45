"""TRL's ``GRPOTrainer``: ``python -m train_examples.recipes.trl_grpo``, with TRL 1.16 or newer.

The reward of a completion is its share of lower-case letters. Blocks, norms and the loss head run fused.
"""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

import fusedlayers as fl
from train_examples.recipes.text_model import TextWindows, byte_tokenizer, small_llama
from train_examples.recipes.trl_loss_head import use_loss_head


def lower_case(completions: list[str], **others: Any) -> list[float]:
    """The share of lower-case letters of each completion."""
    return [sum(letter.islower() for letter in text) / max(1, len(text)) for text in completions]


def main(steps: int = 50, folder: str = "runs/trl_grpo") -> list[float]:
    """Train, save, and return the mean reward of every tenth step."""
    model = small_llama()
    print(fl.replace(model))  # the one line for blocks, before the trainer moves, casts or wraps the model
    arguments = GRPOConfig(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=32,
        num_generations=8,
        max_completion_length=16,
        learning_rate=3e-3,
        logging_steps=min(10, steps),
        bf16=False,
        save_strategy="no",  # saved once at the end
        report_to="none",
        seed=0,
    )
    texts = [bytes(window.tolist()).decode("latin-1") for window in TextWindows().windows[: 4 * steps].to(torch.uint8)]
    dataset = Dataset.from_dict({"prompt": [text[:16] for text in texts]})
    trainer = GRPOTrainer(
        model=model, reward_funcs=lower_case, args=arguments, train_dataset=dataset, processing_class=byte_tokenizer()
    )
    use_loss_head(trainer)  # and the one for the loss
    trainer.train()
    trainer.save_model(folder)
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


if __name__ == "__main__":
    main()
