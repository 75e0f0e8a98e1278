"""The order of the pages for MkDocs, and the weight of each in the site's search."""

import pathlib

ORDER = {
    "Start": [
        "index",
        "getting_started",
        "install",
        "coming_from",
        "from_pytorch",
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
        "shapes",
        "precision",
        "ensembles",
        "command_line",
    ],
    "Devices": [
        "strategies",
        "own_strategy",
        "plan",
        "long_context",
        "llama",
        "distributed",
        "processes",
    ],
    "Recipes": [],
    "Reference": [
        "reference/api",
        "reference/training",
        "reference/models",
        "reference/strategies",
        "reference/callbacks",
        "reference/record",
        "reference/plans",
        "reference/processes",
    ],
    "Explanations": [
        "reproducibility",
        "reliability",
        "speed",
        "inside",
        "examples",
    ],
}


def on_config(config):
    folder = pathlib.Path(config.docs_dir)
    there = {
        path.relative_to(folder).with_suffix("").as_posix()
        for path in folder.rglob("*.md")
    }
    recipes = sorted(page for page in there if page.startswith("recipes/"))
    order = ORDER | {"Recipes": sorted(recipes, key="recipes/index".__ne__)}
    nav = [
        {title: [f"{page}.md" for page in pages if page in there]}
        for title, pages in order.items()
    ]
    rest = sorted(there - {page for pages in order.values() for page in pages})
    nav.append({"More": [f"{page}.md" for page in rest]})
    config.nav = [section for section in nav if any(section.values())]
    return config


def on_page_markdown(markdown, page, config, files):
    """Ranks the reference below the guides in search: its titles are single words."""
    if page.file.src_uri.startswith("reference/"):
        page.meta["search"] = {"boost": 0.3}
