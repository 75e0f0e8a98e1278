"""Makes a README whose links hold on a package index, where no folder is beside it.

    python docs/readme_of_package.py README.md [https://github.com/OWNER/NAME]

Links and pictures get the address of the repository. Without one, links become their
words, and pictures are left out.
"""

import pathlib
import re
import sys


def make_absolute(text, repository=None):
    """Returns the text of a README without relative links."""

    def lead(link):
        is_picture, words, path = link.groups()
        if re.match(r"[a-z]+:", path):
            return link[0]
        if not repository:
            return "" if is_picture else words
        kind = "raw" if is_picture else "blob"
        return f"{is_picture}[{words}]({repository.rstrip('/')}/{kind}/main/{path})"

    return re.sub(r"(!?)\[([^]]*)\]\(([^)\s]+)\)", lead, text)


if __name__ == "__main__":
    readme = pathlib.Path(sys.argv[1])
    readme.write_text(make_absolute(readme.read_text(), *sys.argv[2:]))
