"""Hugging Face's ``Trainer``: ``python -m train_examples.recipes.hugging_face_trainer``.

The checkpoint is an ordinary one: the same keys and shapes, without any trace of this library.
"""

from __future__ import annotations

from transformers import Trainer, TrainingArguments

import fusedlayers as fl
from train_examples.recipes.text_model import TextWindows, small_llama


def main(steps: int = 200, folder: str = "runs/hugging_face_trainer") -> list[float]:
    """Train, save, and return the loss of every tenth step (nats per byte)."""
    model = small_llama()
    print(fl.replace(model))  # the one line: before the Trainer moves, casts or wraps the model
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        logging_steps=min(10, steps),
        save_strategy="no",  # saved once at the end
        report_to="none",
        seed=0,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=TextWindows())
    trainer.train()
    trainer.save_model(folder)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
