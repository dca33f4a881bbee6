"""Ray Train's example for Transformers: the trainer saves at each epoch, fails once and resumes."""

import os

import torch
import transformers
from synthetic import sentences

from distributor import train
from distributor.train.huggingface.transformers import RayTrainReportCallback, prepare_trainer
from distributor.train.torch import TorchTrainer


class FailAt(transformers.TrainerCallback):
    def __init__(self, epoch):
        self.epoch = epoch

    def on_epoch_begin(self, args, state, control, **kwargs):
        if state.epoch == self.epoch:
            raise RuntimeError("fails once")


def make_model():
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=16,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
        )
    )


def train_func(config):
    transformers.set_seed(0)
    arguments = transformers.TrainingArguments(
        output_dir="trained",
        num_train_epochs=config["epochs"],
        per_device_train_batch_size=8,
        learning_rate=0.01,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_strategy="epoch",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(
        model=make_model(),
        args=arguments,
        train_dataset=sentences(),
        eval_dataset=sentences(16),
    )
    checkpoint = train.get_checkpoint()
    trainer.add_callback(RayTrainReportCallback())
    trainer.add_callback(FailAt(None if checkpoint else 1))
    trainer = prepare_trainer(trainer)
    if checkpoint:
        with checkpoint.as_directory() as folder:
            path = os.path.join(folder, RayTrainReportCallback.CHECKPOINT_NAME)
            trainer.train(resume_from_checkpoint=path)
    else:
        trainer.train()


if __name__ == "__main__":
    trainer = TorchTrainer(
        train_func,
        train_loop_config={"epochs": 3},
        scaling_config=train.ScalingConfig(num_workers=2),
        run_config=train.RunConfig(
            storage_path=os.path.abspath("results"),
            name="transformers_trainer",
            failure_config=train.FailureConfig(max_failures=1),
        ),
    )
    result = trainer.fit()

    with result.checkpoint.as_directory() as folder:
        path = os.path.join(folder, RayTrainReportCallback.CHECKPOINT_NAME)
        model = transformers.BertForSequenceClassification.from_pretrained(path)
    rows = sentences(16)
    found = model(torch.stack([row["input_ids"] for row in rows])).logits.argmax(dim=1)
    right = [row["labels"] == int(label) for row, label in zip(rows, found, strict=True)]
    print(f"accuracy {sum(right) / len(right):.2f}")
