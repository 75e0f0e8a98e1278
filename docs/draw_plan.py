"""Draws the README's picture: a plan of a model of 7 billion parameters.

    python docs/draw_plan.py

It compiles the step of the page on Llama, of that size, for eight faked devices. No
array of the model is made. Needs 2 GB of memory.
"""

import html
import pathlib
import re
import time

import equinox as eqx
import jax
import numpy as np
import optax

from jaxdp import FSDP, Trainer, per_example

DOCS = pathlib.Path(__file__).parent
PICTURE = DOCS / "images" / "plan_7b.svg"
CODE = """\
shapes = eqx.filter_eval_shape(Llama, config, key)     # 6,738,415,616 parameters
trainer = Trainer(shapes, optax.adamw(1e-4), loss_fn=loss, strategy=FSDP(),
                  precision="bf16-mixed", remat=True)
print(trainer.plan(batches, hardware="h100"))          # compiled, without a GPU
"""


@per_example
def loss(model, tokens):
    logits = model(tokens[:-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[1:]).mean()


def print_plan():
    """Returns the first parts of the plan, and the time that it took."""
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_enable_compilation_cache", False)
    page = (DOCS / "recipes" / "llama.md").read_text()
    names = {"__name__": "page"}
    exec(re.search(r"^```python\n(.*?)^```", page, re.M | re.S)[1], names)
    config = names["Config"](4096, 32, 32, 32, 11008, 32000)
    begin = time.perf_counter()
    shapes = eqx.filter_eval_shape(names["Llama"], config, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == 6_738_415_616
    trainer = Trainer(
        shapes,
        optax.adamw(1e-4),
        loss_fn=loss,
        strategy=FSDP(),
        precision="bf16-mixed",
        remat=True,
    )
    plan = trainer.plan([np.zeros((8, 2049), np.int32)], hardware="h100")
    seconds = time.perf_counter() - begin
    blocks = [block.splitlines() for block in str(plan).split("\n\n")]
    head, memory, traffic = blocks[:3]
    (times,) = [block for block in blocks if block[0].startswith("Time on")]
    memory = [line for line in memory if "All gradients" not in line]
    times = [times[0], times[1].split(": ")[0], "  " + times[1].split(": ")[1]]
    times[2] = times[2].split(";")[0]
    return [*head, "", *memory, "", *traffic[:-1], "", *times], seconds


def _spaced(line):
    return html.escape(line).replace(" ", "&#160;")  # SVG joins other spaces


def draw(lines):
    """Returns an SVG picture of a terminal with these lines."""
    height = 18 * len(lines) + 30
    texts = [
        f'<text x="16" y="{18 * i + 28}" fill="{color}">{_spaced(line)}</text>'
        for i, (line, color) in enumerate(lines)
    ]
    body = "\n".join(texts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="780" height="{height}"'
        ' font-family="ui-monospace, Menlo, Consolas, monospace" font-size="13">\n'
        f'<rect width="100%" height="100%" rx="8" fill="#1e1e2e"/>\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    lines, seconds = print_plan()
    shown = [(line, "#f9e2af") for line in CODE.splitlines()]
    shown += [("", "#cdd6f4"), *((line, "#cdd6f4") for line in lines)]
    shown += [(f"# {seconds:.0f} seconds on two CPU cores", "#a6e3a1")]
    PICTURE.write_text(draw(shown))
