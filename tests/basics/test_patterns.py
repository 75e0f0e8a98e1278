"""Patterns of paths, which all arguments that take some read in one way."""

import pytest

from jaxdp.basics.tree import matches

PATTERNS = """
    layers[3]              layers[3] layers.3 layers[*] layers.* l*[3] *[?] ** **.* *.3
    layers[3]              not * ? layers layers.3.* layers[3].** layer.3
    layers[13]             layers[1?] layers[*3] not layers[3] layers[?] layer[*]
    layers[3].norm.w       layers[*].norm.w layers.*.*.w layers.**.w layers[3].** **.w
    layers[3].norm.w       layers.**.norm.w *.*.*.* not layers[*].w layers.*.w *.w *
    w                      w * **.w ** not *.w w.** ?.w
    blocks.stacked.norm.w  blocks.norm.w blocks[*].norm.w blocks.*.*.w blocks.norm.*
    blocks.stacked.norm.w  blocks.** blocks.*.w not blocks.* blocks.w blocks
    blocks.stacked         blocks blocks.* blocks[*] blocks.stacked
    a.stacked.b.stacked.w  a.b.w a.stacked.b.w a.b.stacked.w a[*].b[*].w
    stacked.norm.w         norm.w *.w **.w stacked.norm.w
    unstacked.w            *.w not un.w w
    nets['a'].w            nets.a.w nets['a'].w nets["a"].w nets.?.w nets[*].w
    [0].w                  0.w [0].w *.w [*].w [?].w not w
    head.q_proj            *.q_proj *.*_proj **_proj not *_proj q_proj
"""


@pytest.mark.parametrize("line", PATTERNS.strip().splitlines())
def test_patterns_of_paths_have_one_grammar(line):
    name, *patterns = line.split()
    good, _, bad = " ".join(patterns).partition("not ")
    assert [p for p in good.split() if not matches(name, p)] == []
    assert [p for p in bad.split() if matches(name, p)] == []
