"""For MkDocs: the order of the pages, a page for each class of the reference, and the
weight of each page in the site's search."""

import pathlib
import re

from mkdocs.structure.files import File

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
    reference = []
    for page in ORDER["Reference"]:
        classes = [_page_of(name) for name in _classes(folder / f"{page}.md")]
        title = (folder / f"{page}.md").read_text().split("\n")[0].strip("# ")
        reference.append({title: [f"{page}.md", *classes]} if classes else f"{page}.md")
    nav[list(order).index("Reference")] = {"Reference": reference}
    rest = sorted(there - {page for pages in order.values() for page in pages})
    nav.append({"More": [f"{page}.md" for page in rest]})
    config.nav = [section for section in nav if any(section.values())]
    return config


def on_files(files, config):
    """Adds a page for each class: its entry, with the options that its group gives."""
    for source in sorted(pathlib.Path(config.docs_dir).glob("reference/*.md")):
        text = source.read_text()
        for name in _classes(source):
            blocks = [block for block in _ENTRY.finditer(text) if _holds(block, name)]
            options = max(blocks, key=lambda block: len(block["name"]))["options"]
            options = re.sub(r"^ +show_root_\w+: false\n", "", options, flags=re.M)
            options = options if options.count("\n") > 1 else ""
            content = f"# {name.split('.')[-1]}\n\n::: {name}\n{options}"
            files.append(File.generated(config, _page_of(name), content=content))
    return files


def on_page_markdown(markdown, page, config, files):
    """Leaves functions alone on the pages of groups, and links classes to their pages.

    Ranks guides first in search, then recipes: titles of the reference are single
    words, and those of recipes name what they are about, not what they answer.
    """
    boosts = {"reference": 0.3, "recipes": 0.6}
    folder, _, name = page.file.src_uri.rpartition("/")
    if folder in boosts and name not in ("llama.md", "huggingface.md", "lora.md"):
        page.meta["search"] = {"boost": boosts[folder]}

    source = pathlib.Path(config.docs_dir) / page.file.src_uri
    classes = _classes(source)
    rows = re.findall(_ROW, markdown, re.M)

    def keep_functions(block):
        if block["name"] in classes:
            return ""
        if not any(_holds(block, name) for name in classes):
            return block[0]
        functions = [n.split(".")[-1] for n in rows if _holds(block, n)]
        functions = [n for n in functions if n[0].islower()]
        options = block["options"] or "    options:\n"
        members = f"      members: [{', '.join(functions)}]\n"
        return f"::: {block['name']}\n{options}{members}" if functions else ""

    def lead_to_class(link):
        there = source.parent / link["path"] if link["path"] else source
        for name in sorted(_classes(there), key=len, reverse=True):
            if f"{link['name']}.".startswith(f"{name}."):
                up = "" if folder == "reference" else "reference/"
                up = "../" + up if folder == "recipes" else up
                return f"]({up}{pathlib.Path(_page_of(name)).name}#{link['name']})"
        return link[0]

    if classes:
        markdown = _ENTRY.sub(keep_functions, markdown)
    return _LINK.sub(lead_to_class, markdown)


_ROW = r"^\| \[`[\w.]+`\]\(#([\w.]+)\)"
_ENTRY = re.compile(r"^::: (?P<name>\S+)\n(?P<options>(?:    .*\n)*)", re.M)
_LINK = re.compile(r"\]\((?P<path>(?:[\w./]*\w\.md)?)#(?P<name>jaxdp[\w.]*)\)")


def _classes(source):
    """The full names of the classes in the table of a page of the reference."""
    if source.parent.name != "reference" or not source.is_file():
        return []
    names = re.findall(_ROW, source.read_text(), re.M)
    return [name for name in names if name.split(".")[-1][0].isupper()]


def _page_of(name):
    return f"reference/{name.split('.')[-1]}.md"


def _holds(block, name):
    return f"{name}.".startswith(f"{block['name']}.")
