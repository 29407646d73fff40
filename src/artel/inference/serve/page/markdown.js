// Turns Markdown into elements: markdown-it parses it, and createElement makes elements of its tokens. HTML stays text.

import { copyButton, element } from "./dom.js";
import MarkdownIt from "./markdown-it.js";
import { t } from "./words.js";

const MAX_DEPTH = 40; // nested elements
const FORMULA = { "\\(": "\\)", "\\[": "\\]", $$: "$$" };
const TAGS = { s: "del" };

const markdown = new MarkdownIt({ linkify: true });
markdown.set({ maxNesting: MAX_DEPTH });
// In a stream, these would change text that is already shown (dashes below a paragraph, a reference at the end).
markdown.disable(["lheading", "reference", "code", "entity"]);
markdown.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
for (const scheme of ["ftp:", "mailto:", "//"]) markdown.linkify.add(scheme, null);
markdown.validateLink = (address) => /^https?:\/\//i.test(address) && URL.canParse(address);
markdown.normalizeLink = (address) => (URL.canParse(address) ? new URL(address).href : address);
markdown.block.ruler.before("table", "deepest", showAsText);
markdown.inline.ruler.before("escape", "formula", keepFormula);

const shownBlocks = new WeakMap(); // container → the source texts of its blocks

/** Show the text in the container. Unchanged blocks stay, and with them a selection, while more text arrives. */
export function showMarkdown(container, text) {
  const lines = text.split(/\r\n?|\n/);
  const blocks = splitBlocks(markdown.parse(text, {}), lines);
  const oldBlocks = shownBlocks.get(container) ?? [];
  let unchanged = 0;
  while (unchanged < oldBlocks.length && unchanged < blocks.length && oldBlocks[unchanged] === blocks[unchanged].source) unchanged++;
  while (container.childNodes.length > unchanged) container.lastChild.remove();
  for (const { tokens } of blocks.slice(unchanged)) append(container, tokens);
  shownBlocks.set(container, blocks.map((block) => block.source));
}

/** Split tokens into the outermost blocks, each of which becomes one element: {tokens, source}. */
function splitBlocks(tokens, lines) {
  const blocks = [];
  for (const token of tokens) {
    if (token.level === 0 && token.nesting >= 0) {
      blocks.push({ tokens: [], source: lines.slice(...token.map).join("\n") });
    }
    blocks.at(-1).tokens.push(token);
  }
  return blocks;
}

/** Show text that is nested too deeply as a paragraph. markdown-it would drop it. */
function showAsText(state, start, end, silent) {
  if (state.level < MAX_DEPTH - 2) return false;
  if (!silent) {
    state.push("paragraph_open", "p", 1);
    const inline = state.push("inline", "", 0);
    inline.content = state.getLines(start, end, state.blkIndent, false).trim();
    inline.children = [];
    state.push("paragraph_close", "p", -1);
    state.line = end;
  }
  return true;
}

/** Show formulas, \( \), \[ \] and $$ $$, as they are written. */
function keepFormula(state, silent) {
  const closingMark = FORMULA[state.src.slice(state.pos, state.pos + 2)];
  if (closingMark === undefined) return false;
  state.absent ??= new Set(); // closing marks that do not occur in the remaining text
  const index = state.absent.has(closingMark) ? -1 : state.src.indexOf(closingMark, state.pos + 2);
  if (index < 0) state.absent.add(closingMark);
  const end = index < 0 ? state.pos + 2 : index + 2;
  if (!silent) state.pending += state.src.slice(state.pos, end);
  state.pos = end;
  return true;
}

// Tokens to elements ----------------------------------------------------------------------------------------------------

/** Append the elements of the tokens. `open`: elements that are not closed yet, the innermost last. */
function append(container, tokens) {
  const open = [container];
  tokens.forEach((token, index) => {
    const parent = open.at(-1);
    if (token.hidden) return; // a paragraph in a list without blank lines between its items
    if (token.type === "inline") {
      if (tokens[index - 2]?.type === "list_item_open") showTask(token.children[0]);
      append(parent, token.children);
    } else if (token.nesting < 0) open.pop();
    else {
      const node = createNode(token, open);
      parent.append(token.type === "table_open" ? element("div", { class: "scroll", tabindex: "0" }, node) : node);
      if (token.nesting > 0) open.push(node);
    }
  });
}

function createNode(token, open) {
  switch (token.type) {
    case "text":
      return token.content;
    case "softbreak":
    case "hardbreak":
      return element("br");
    case "code_inline":
      return element("code", {}, token.content);
    case "fence":
      return codeBlock(token.content.replace(/\n$/, ""), token.info.trim().split(/\s/)[0]);
    case "heading_open": // below the headings of the page
      return element(`h${Math.min(Number(token.tag[1]) + 2, 6)}`);
    case "ordered_list_open":
      return element("ol", { start: String(token.attrGet("start") ?? 1) });
    case "th_open":
    case "td_open":
      return element(token.tag, { class: ALIGNED[token.attrGet("style")] });
    case "image":
      return open.some((outer) => outer.localName === "a") ? token.content : link(token.attrGet("src"), token.content);
    case "link_open":
      return link(token.attrGet("href"));
    default:
      return token.tag ? element(TAGS[token.tag] ?? token.tag) : token.content;
  }
}

const ALIGNED = { "text-align:center": "center", "text-align:right": "end" };

function showTask(first) {
  if (first?.type !== "text") return;
  first.content = first.content.replace(/^\[([ xX])\] /, (_, mark) => (mark === " " ? "☐ " : "☑ "));
}

function codeBlock(code, language) {
  const head = element("figcaption", {}, element("span", {}, language), copyButton(() => code));
  const body = element("pre", { tabindex: "0", "aria-label": t("code") }, element("code", {}, code));
  return element("figure", { class: "code" }, head, body);
}

function link(href, ...content) {
  if (!href) return element("span", {}, ...content);
  return element("a", { href, rel: "noopener noreferrer", target: "_blank" }, ...content);
}
