"""The order of the pages for MkDocs, and the weight of each in the site's search."""

import pathlib

ORDER = {
    "Start": [
        "index",
        "getting_started",
        "install",
        "coming_from",
        "from_lightning",
        "from_keras",
        "from_equinox",
        "troubleshooting",
    ],
    "Guides": [
        "data",
        "metrics",
        "callbacks",
        "checkpoints",
        "watching",
        "precision",
        "ensembles",
    ],
    "Devices": [
        "strategies",
        "own_strategy",
        "plan",
        "long_context",
        "distributed",
    ],
    "Recipes": [
        "recipes/index",
        "recipes/examples",
        "recipes/llama",
    ],
    "Reference": [
        "reference/api",
        "reference/training",
        "reference/models",
        "reference/strategies",
        "reference/callbacks",
        "reference/record",
        "reference/plans",
        "reference/processes",
        "reference/command_line",
        "reference/reliability",
    ],
    "Explanations": [
        "reproducibility",
        "speed",
        "inside",
    ],
}


def on_config(config):
    folder = pathlib.Path(config.docs_dir)
    there = {
        path.relative_to(folder).with_suffix("").as_posix()
        for path in folder.rglob("*.md")
    }
    recipes = sorted(page for page in there if page.startswith("recipes/"))
    first = ORDER["Recipes"]
    order = ORDER | {"Recipes": first + [page for page in recipes if page not in first]}
    nav = [
        {title: [f"{page}.md" for page in pages if page in there]}
        for title, pages in order.items()
    ]
    rest = sorted(there - {page for pages in order.values() for page in pages})
    nav.append({"More": [f"{page}.md" for page in rest]})
    config.nav = [section for section in nav if any(section.values())]
    return config


def on_page_markdown(markdown, page, config, files):
    """Ranks guides first in search, then recipes: titles of the reference are single
    words, and those of recipes name what they are about, not what they answer."""
    boosts = {"reference": 0.3, "recipes": 0.6}
    folder = page.file.src_uri.split("/")[0]
    if folder in boosts and page.file.name not in ("llama", "huggingface", "lora"):
        page.meta["search"] = {"boost": boosts[folder]}
