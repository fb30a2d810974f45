"""TRL's ``SFTTrainer``: ``python -m train_examples.recipes.trl_sft``, with TRL 1.16 or newer.

Blocks, norms and the loss head run fused.
"""

from __future__ import annotations

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

import fusedlayers as fl
from train_examples.recipes.text_model import TextWindows, byte_tokenizer, small_llama
from train_examples.recipes.trl_loss_head import use_loss_head


def main(steps: int = 200, folder: str = "runs/trl_sft") -> list[float]:
    """Train, save, and return the loss of every tenth step (nats per byte)."""
    model = small_llama()
    print(fl.replace(model))  # the one line for blocks, before the trainer moves, casts or wraps the model
    arguments = SFTConfig(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        logging_steps=min(10, steps),
        bf16=False,
        save_strategy="no",  # saved once at the end
        report_to="none",
        seed=0,
    )
    text = TextWindows()
    dataset = Dataset.from_dict({"input_ids": [text[index]["input_ids"].tolist() for index in range(16 * steps)]})
    trainer = SFTTrainer(model=model, args=arguments, train_dataset=dataset, processing_class=byte_tokenizer())
    use_loss_head(trainer)  # and the one for the loss
    trainer.train()
    trainer.save_model(folder)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
