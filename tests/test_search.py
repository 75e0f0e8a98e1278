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


@pytest.mark.parametrize(
    "query, section",
    [
        (
            "call trained model BatchNorm",
            "troubleshooting.md#How do I call the trained model",
        ),
        ("inference_model", "troubleshooting.md#How do I call the trained model"),
        (
            "load model for inference",
            "troubleshooting.md#How do I call the trained model",
        ),
        ("logits or probabilities", "troubleshooting.md#Does the model return logits"),
        (
            "softmax predictions probabilities",
            "troubleshooting.md#Does the model return logits",
        ),
        ("predict probabilities", "troubleshooting.md#Does the model return logits"),
        ("class weights imbalanced", "troubleshooting.md#How do I weight classes"),
        (
            "loss of every step",
            "troubleshooting.md#How do I see the loss of every step",
        ),
        ("scheduler epochs or steps", "troubleshooting.md#Do schedules count"),
        (
            "patience early stopping epochs",
            "troubleshooting.md#Early stopping: what does patience",
        ),
        (
            "callback changes value each epoch",
            "troubleshooting.md#Can a callback change",
        ),
        ("reset optimizer", "troubleshooting.md#How do I reset the optimizer"),
        ("new optimizer fine-tune", "troubleshooting.md#How do I reset the optimizer"),
        ("change weights in a step", "troubleshooting.md#How do I change the weights"),
        (
            "weight constraints clipping",
            "troubleshooting.md#How do I change the weights",
        ),
        ("gradient ascent", "troubleshooting.md#How do I do gradient ascent"),
        (
            "simultaneous updates minimax",
            "troubleshooting.md#How do I do gradient ascent",
        ),
        (
            "reproduce paper bit same keys",
            "troubleshooting.md#How do I reproduce a published",
        ),
        ("freeze layers", "troubleshooting.md#How do I set gradient clipping or gr"),
        (
            "gradient clipping",
            "troubleshooting.md#How do I set gradient clipping or gr",
        ),
        ("train more epochs", "troubleshooting.md#How do I train for more epochs"),
        ("best weights", "troubleshooting.md#How do I save the best model"),
        ("save best model", "troubleshooting.md#How do I save the best model"),
        ("evaluate test set", "troubleshooting.md#How do I evaluate on a test set"),
        ("overfit one batch", "troubleshooting.md#Can I overfit one batch"),
        ("learning rate scheduler plateau", "callbacks.md#Learning rate: scheduler"),
        ("parameter groups learning rate", "recipes/lora.md#Parameter groups"),
        ("resume after crash", "distributed.md#Restarts: resume after a crash"),
        ("random seed reproducible", "reproducibility.md#Reproducible runs"),
        ("multiple gpus", "strategies.md#Multiple GPUs"),
        ("out of memory", "troubleshooting.md#Out of memory"),
        ("loss is nan", "troubleshooting.md#The loss is NaN"),
        ("llama", "llama.md#Fine-tuning Llama"),
        ("huggingface", "recipes/huggingface.md"),
        ("logging", "watching.md#Logging"),
        ("quickstart", "getting_started.md#Getting started"),
        ("ema", "callbacks.md#EMA"),
        ("ddp", "strategies.md#Multiple GPUs"),
        ("early stopping", "troubleshooting.md#Early stopping"),
        ("mixed precision", "precision.md#Mixed precision"),
        ("gradient accumulation", "troubleshooting.md#How do I set gradient"),
        ("checkpoint", "checkpoints.md#Checkpoints"),
        ("resume", "checkpoints.md#Checkpoints: save and resume"),
        ("multi-gpu", "strategies.md#Multiple GPUs"),
        ("slurm", "distributed.md#SLURM"),
        ("gpu", "install.md#On a GPU"),
        ("two optimizers gan", "recipes/gan.md#A GAN"),
    ],
)
def test_a_section_is_found_by_the_words_of_a_question(query, section):
    first = search(query)[:3]
    assert any(name.startswith(section) for name in first), first
