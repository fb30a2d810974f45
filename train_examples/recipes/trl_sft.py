"""TRL's ``SFTTrainer``: ``python -m train_examples.recipes.trl_sft``, with TRL 1.16 or newer.

Blocks and norms run fused. TRL computes the loss, its entropy and its accuracy with its own loss head.
"""

from __future__ import annotations

from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import fusedlayers as fl
from train_examples.recipes.text_model import TextWindows, small_llama


def main(steps: int = 200, folder: str = "runs/trl_sft") -> list[float]:
    """Train, save, and return the loss of every tenth step (nats per byte)."""
    model = small_llama()
    print(fl.replace(model))  # the one line: before the trainer moves, casts or wraps the model
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
    # A token is a byte; the trainer wants to know which ones pad and end a text.
    names = Tokenizer(WordLevel({chr(byte): byte for byte in range(256)}, unk_token="\0"))
    words = PreTrainedTokenizerFast(tokenizer_object=names, pad_token="\0", eos_token="\1")
    trainer = SFTTrainer(model=model, args=arguments, train_dataset=dataset, processing_class=words)
    trainer.train()
    trainer.save_model(folder)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
