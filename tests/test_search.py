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
        ("call trained model BatchNorm", "How do I call the trained model"),
        ("inference_model", "How do I call the trained model"),
        ("logits or probabilities", "Does the model return logits"),
        ("softmax predictions probabilities", "Does the model return logits"),
        ("class weights imbalanced", "How do I weight classes"),
        ("loss of every step", "How do I see the loss of every step"),
        ("scheduler epochs or steps", "Do schedules count"),
        ("patience early stopping epochs", "What does patience count"),
        ("reset optimizer", "How do I reset the optimizer"),
        ("new optimizer fine-tune", "How do I reset the optimizer"),
        ("change weights in a step", "How do I change the weights"),
        ("weight constraints clipping", "How do I change the weights"),
        ("gradient ascent", "How do I do gradient ascent"),
        ("simultaneous updates minimax", "How do I do gradient ascent"),
        ("reproduce paper bit same keys", "How do I reproduce a published run"),
        ("freeze layers", "How do I clip gradients, accumulate them, or freeze"),
        ("train more epochs", "How do I train for more epochs"),
        ("best weights", "How do I keep the best weights"),
        ("overfit one batch", "Can I overfit one batch"),
    ],
)
def test_a_question_is_found_by_its_words(query, section):
    first = search(query)[:3]
    assert any(name.startswith(f"questions.md#{section}") for name in first), first
