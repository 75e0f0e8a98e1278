"""Runs recipes, each in a process of its own, and keeps the pictures that they save.

    python docs/draw_recipes.py [gan vae ...]

The pictures go to docs/images/recipes/. All recipes are run if none is named.
"""

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

DOCS = pathlib.Path(__file__).parent
PICTURES = DOCS / "images" / "recipes"


def code_of(page):
    """The Python of a page, as one script."""
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    return "\n\n".join(blocks)


def run(page, folder, **environment):
    """Runs the code of a page in a folder, where it saves its pictures."""
    script = pathlib.Path(folder) / f"{page.stem}.py"
    script.write_text(code_of(page))
    return subprocess.run(
        [sys.executable, script.name], cwd=folder, capture_output=True, text=True,
        **environment,
    )  # fmt: skip


if __name__ == "__main__":
    pages = sorted((DOCS / "recipes").glob("*.md"))
    for page in pages:
        if page.stem not in (sys.argv[1:] or {each.stem for each in pages}):
            continue
        with tempfile.TemporaryDirectory() as folder:
            done = run(page, folder)
            if done.returncode:
                sys.exit(done.stdout + done.stderr)
            for picture in pathlib.Path(folder).glob("*.png"):
                print(shutil.copy(picture, PICTURES))
