"""The site's search finds what users look for, by the words that they would type."""

import math
import pathlib
import re

import pytest

DOCS = pathlib.Path(__file__).parents[1] / "docs"
LITTLE = set("a an and do does how i in is it my of on or the to what with".split())


def words_of(text):
    words = re.findall(r"[a-z0-9]+", text.lower().replace("_", " "))
    return [word[:5] for word in words if word not in LITTLE]  # a coarse stem


def sections():
    """Title and text of each section, by `page#heading`."""
    pieces = {}
    for page in sorted(DOCS.rglob("*.md")):
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
        heads = re.split(r"^(#+ .+)$", text, flags=re.M)
        for title, body in zip(heads[1::2], heads[2::2], strict=True):
            title = title.lstrip("# ")
            name = f"{page.relative_to(DOCS)}#{title}"
            pieces[name] = words_of(title), words_of(body)
    return pieces


SECTIONS = sections()


def search(query):
    """Names of sections, best first: rare words count more, those of titles most."""
    scores = dict.fromkeys(SECTIONS, 0.0)
    for word in words_of(query):
        having = [n for n, (title, body) in SECTIONS.items() if word in title + body]
        rarity = math.log(1 + len(SECTIONS) / (1 + len(having)))
        for name in having:
            title, body = SECTIONS[name]
            often = body.count(word) / (1 + len(body) / 100)
            scores[name] += rarity * (5 * (word in title) + often / (often + 1))
    return sorted(scores, key=scores.get, reverse=True)


QUERIES = {
    "How do I call the trained model": (
        "call trained model BatchNorm | inference_model | load model for inference"
    ),
    "Does the model return logits": (
        "logits or probabilities | softmax predictions probabilities | "
        "predict probabilities"
    ),
    "How do I weight classes": "class weights imbalanced",
    "How do I see the loss of every step": "loss of every step",
    "Do schedules count": "scheduler epochs or steps",
    "Early stopping: what does patience": "patience early stopping epochs",
    "Can a callback change": "callback changes value each epoch",
    "How do I reset the optimizer": "reset optimizer | new optimizer fine-tune",
    "How do I change the weights": (
        "change weights in a step | weight constraints clipping"
    ),
    "How do I do gradient ascent": "gradient ascent | simultaneous updates minimax",
    "How do I reproduce a published": "reproduce paper bit same keys",
    "How do I set gradient clipping or gr": "freeze layers | gradient clipping",
    "How do I train for more epochs": "train more epochs",
    "How do I save the best model": "best weights | save best model",
    "How do I evaluate on a test set": "evaluate test set",
    "Can I overfit one batch": "overfit one batch",
    "callbacks.md#Learning rate: scheduler": "learning rate scheduler plateau",
    "recipes/lora.md#Parameter groups": "parameter groups learning rate",
    "distributed.md#Restarts: resume after a crash": "resume after crash",
    "reproducibility.md#Reproducible runs": "random seed reproducible",
    "strategies.md#Multiple GPUs": "multiple gpus | ddp | multi-gpu",
    "Out of memory": "out of memory",
    "The loss is NaN": "loss is nan",
    "recipes/llama.md#Fine-tuning Llama": "llama",
    "recipes/huggingface.md": "huggingface",
    "watching.md#Logging": "logging",
    "getting_started.md#Getting started": "quickstart",
    "callbacks.md#EMA": "ema",
    "Early stopping": "early stopping",
    "precision.md#Mixed precision": "mixed precision",
    "How do I set gradient": "gradient accumulation",
    "checkpoints.md#Checkpoints": "checkpoint",
    "checkpoints.md#Checkpoints: save": "resume | save model",
    "distributed.md#SLURM": "slurm",
    "install.md#On a GPU": "gpu",
    "recipes/gan.md#A GAN": "two optimizers gan",
    "recipes/lora.md": "lora",
    "data.md#DataLoaders": "dataloader",
    "install.md#CPU, GPU or TPU": "tpu",
    "metrics.md#": "custom loss | metrics",
    "getting_started.md#Test it": "predict",
    "getting_started.md#Train it": "plot",
    "watching.md#Logging: TensorBoard": "tensorboard | wandb",
    "strategies.md#Memory": "fsdp",
    "How do I call": "dropout",
    "How do I set": "freeze",
    "checkpoints.md#Load a model": "load model",
}
"""What users type, by the section that they look for: of Troubleshooting, or a page."""

QUESTIONS = [
    (query, section) for section, text in QUERIES.items() for query in text.split(" | ")
]


@pytest.mark.parametrize(("query", "section"), QUESTIONS)
def test_a_section_is_found_by_the_words_of_a_question(query, section):
    section = section if ".md" in section else f"troubleshooting.md#{section}"
    first = search(query)[:3]
    assert any(name.startswith(section) for name in first), first
