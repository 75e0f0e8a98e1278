"""The order of the pages, for MkDocs: those that are there, and any others after."""

import pathlib

ORDER = {
    "Start": ["index", "install", "ladder", "examples", "questions"],
    "Coming from": [
        "from_pytorch",
        "from_lightning",
        "from_equinox",
        "from_keras",
        "other_libraries",
        "side_by_side",
    ],
    "Training": [
        "data",
        "metrics",
        "shapes",
        "ensembles",
        "callbacks",
        "checkpoints",
        "restarts",
        "reliability",
        "precision",
        "reproducibility",
    ],
    "Recipes": [],
    "Devices": [
        "strategies",
        "own_strategy",
        "long_context",
        "gpu",
        "plan",
        "speed",
        "speed_inside",
    ],
    "Several processes": ["distributed", "processes", "failures"],
    "Looking": ["watching", "command_line", "troubleshooting"],
    "Reference": [
        "reference/api",
        "reference/training",
        "reference/models",
        "reference/strategies",
        "reference/callbacks",
        "reference/plans",
        "reference/processes",
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
