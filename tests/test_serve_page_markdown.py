"""What the chat page makes of Markdown: elements one by one, whole and in the midst of a stream."""

import pytest

from support.browser import errors
from support.chat_page import fresh
from support.serving import server_of

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def address(endless):
    """Of any model: it is not asked."""
    with server_of(endless) as server:
        yield server.url


@pytest.fixture
def page(browser, address):
    yield fresh(browser, address, view="text")
    assert errors(browser) == []


MARKDOWN = {
    "a **b *c* d** e": "<p>a <strong>b <em>c</em> d</strong> e</p>",
    "***both***": "<p><em><strong>both</strong></em></p>",
    "snake_case_name 2 * 3 * 4": "<p>snake_case_name 2 * 3 * 4</p>",
    "~~gone~~ `a <b>` \\*no\\*": "<p><del>gone</del> <code>a &lt;b&gt;</code> *no*</p>",
    "one\ntwo\n\nthree": "<p>one<br>two</p><p>three</p>",
    "# Title #\ntext": "<h3>Title</h3><p>text</p>",
    "> a\n> > b": "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>",
    "1. a\n   - b\n   - [x] c\n2. d": '<ol start="1"><li>a<ul><li>b</li><li>☑ c</li></ul></li><li>d</li></ol>',
    "3) a\n\n4) b": '<ol start="3"><li><p>a</p></li><li><p>b</p></li></ol>',
    "- a\n\ntext": "<ul><li>a</li></ul><p>text</p>",
    "a\n\n---\nb": "<p>a</p><hr><p>b</p>",
    "[x](javascript:alert(1)) [y](data:text/html,z) [z](/v1)":
        "<p>[x](javascript:alert(1)) [y](data:text/html,z) [z](/v1)</p>",
    "\\(a_1 * b_2 * c\\)": "<p>\\(a_1 * b_2 * c\\)</p>",
    "<b>x</b> & &lt;": "<p>&lt;b&gt;x&lt;/b&gt; &amp; &amp;lt;</p>",
    "**open": "<p>**open</p>",
    "«**жирный**» текст": "<p>«<strong>жирный</strong>» текст</p>",
    "|a|b|\n|:-:|--:|\n|`x\\|y`|\\||": '<div class="scroll" tabindex="0"><table><thead><tr><th class="center">a</th>'
        '<th class="end">b</th></tr></thead><tbody><tr><td class="center"><code>x|y</code></td><td class="end">|</td>'
        "</tr></tbody></table></div>",
}  # fmt: skip
LINKS = {
    "[a](https://e.org/x_(y) 't')": [["a", "https://e.org/x_(y)"]],
    "see https://e.org/a?b=1. And <http://e.org/>": [["https://e.org/a?b=1"] * 2, ["http://e.org/"] * 2],
    "[https://e.org](https://evil.org) ![pic](https://e.org/p.png)": [
        ["https://e.org", "https://evil.org/"], ["pic", "https://e.org/p.png"]
    ],
    "[a [b](https://e.org/1) c](https://e.org/2": [["b", "https://e.org/1"], ["https://e.org/2"] * 2],
    "[x](HTTPS://E.org) [y](ftp://e.org) [z](https://)": [["x", "https://e.org/"]],
}  # fmt: skip
RENDER = """
const { showMarkdown } = await import('/page/markdown.js');
return arguments[0].map((text) => {
  const box = document.createElement('div');
  showMarkdown(box, text);
  return RESULT;
});
"""


def rendered(page, texts, result):
    """What the page's Markdown makes of each text."""
    return page.execute_script(RENDER.replace("RESULT", result), list(texts))


def test_markdown(page):
    assert dict(zip(MARKDOWN, rendered(page, MARKDOWN, "box.innerHTML"), strict=True)) == MARKDOWN
    links = "[...box.querySelectorAll('a')].map((link) => [link.textContent, link.href])"
    assert dict(zip(LINKS, rendered(page, LINKS, links), strict=True)) == LINKS


def test_an_answer_in_the_midst_of_a_stream_looks_as_far_as_it_goes(page):
    """Shown piece by piece it ends as it does shown at once; an open fence is code already."""
    fenced = ["```python\nif a < b:\n\n    pass\n```", "- a\n  ```\n  b\n  ```\n- c"]
    whole = "\n\n".join([*MARKDOWN, *LINKS, *fenced, "end"])
    same = page.execute_script(
        """
        const { showMarkdown } = await import('/page/markdown.js');
        const [piecewise, atOnce] = [document.createElement('div'), document.createElement('div')];
        const [text] = arguments;
        for (let end = 0; end <= text.length; end += 3) showMarkdown(piecewise, text.slice(0, end));
        showMarkdown(piecewise, text);
        showMarkdown(atOnce, text);
        return [piecewise.innerHTML === atOnce.innerHTML, atOnce.textContent.length];
        """,
        whole,
    )
    assert same[0]
    assert same[1] > 300
    (open_fence,) = rendered(page, ["a\n```js\nx **y**"], "box.querySelector('pre code').textContent")
    assert open_fence == "x **y**"
    kept = page.execute_script("""
        const { showMarkdown } = await import('/page/markdown.js');
        const box = document.createElement('div');
        showMarkdown(box, 'first\\n\\nsec');
        const first = box.firstChild;
        showMarkdown(box, 'first\\n\\nsecond');
        return [box.firstChild === first, box.textContent];
    """)
    assert kept == [True, "firstsecond"]


def test_no_text_makes_the_page_deep_or_loses_a_letter(page):
    """What nests without end, or opens and never closes: work that grew with its square would not end here."""
    many = 30_000
    parts = ["*", "*a ", "a* ", "[", "[a](", "`` ` ", "> ", "- ", "\\", "_a", "a|b\n-|-\n", "<http://", "***a", "```\n",
             "~~a ", "$$", "\\(", "![", "http://a"]  # fmt: skip
    texts = [part * (many // len(part)) for part in parts]
    texts.append("\n".join("  " * depth + "- x" for depth in range(400)))
    depth = "(function deep(node) { return 1 + Math.max(0, ...[...node.children].map(deep)); })(box)"
    assert max(rendered(page, texts, depth)) < 100
    letters = "box.textContent.split('a').length"
    deep = ["> " * 200 + "a", "\n".join("  " * depth + "- a" for depth in range(200))]
    assert rendered(page, ["*a " * many, *deep], letters) == [many + 1, 2, 201]
