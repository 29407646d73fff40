// Markdown to elements, by createElement and text alone: HTML in a text stays text.
//
// Headings, rules, quotes, lists, tables, fenced code; emphasis, code, links to http and https. A line break is one.
// What is not closed yet, in the middle of a stream, is shown as far as it goes. The work grows with the length of the
// text alone, whatever is in it; what is nested deeper than people write is shown as text.

import { copyButton, element } from "./dom.js";
import { t } from "./words.js";

const DEEPEST = 10; // quotes and lists in one another
const MOST_OPEN = 40; // emphasis and brackets in one another
const FENCE = /^ {0,3}(`{3,}(?=[^`]*$)|~{3,})(.*)$/;
const HEADING = /^ {0,3}(#{1,6})(?=\s|$)/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^[ \t]*([-*+]|\d{1,9}[.)])(?:([ \t]+)|$)/;

const shown = new WeakMap(); // container → the texts of its blocks

/** Show the text in the container. Blocks that are there already stay: a selection in them holds while more comes. */
export function showMarkdown(container, text) {
  const blocks = parse(text.split(/\r\n?|\n/), 0);
  const before = shown.get(container) ?? [];
  let same = 0;
  while (same < before.length && same < blocks.length && before[same] === blocks[same].source) same++;
  while (container.childNodes.length > same) container.lastChild.remove();
  container.append(...blocks.slice(same).map((block) => block.make()));
  shown.set(container, blocks.map((block) => block.source));
}

// Blocks ----------------------------------------------------------------------------------------------------------------

/** Blocks of the lines: {source, make, inner}: `make` gives the element, `inner` the text of a paragraph. */
function parse(lines, depth) {
  const blocks = [];
  const readers = depth < DEEPEST ? [fence, heading, rule, quote, list, table] : [fence, heading, rule, table];
  let at = 0;
  while (at < lines.length) {
    if (blank(lines[at])) {
      at++;
      continue;
    }
    let block = null;
    for (const read of readers) if ((block = read(lines, at, depth))) break;
    block ??= paragraph(lines, at, depth);
    blocks.push({ ...block, source: lines.slice(at, block.end).join("\n") });
    at = block.end;
  }
  return blocks;
}

const blank = (line) => line.trim() === "";

function fence(lines, at) {
  const found = FENCE.exec(lines[at]);
  if (!found) return null;
  const [, marks, info] = found;
  let end = at + 1;
  while (end < lines.length && !closes(lines[end].trim(), marks)) end++;
  const inside = lines.slice(at + 1, end).map((line) => strip(line, indent(lines[at])));
  const make = () => codeBlock(inside.join("\n"), info.trim().split(/\s/)[0]);
  return { end: Math.min(end + 1, lines.length), make };
}

const closes = (line, marks) => line.length >= marks.length && line === marks[0].repeat(line.length);

function codeBlock(code, language) {
  const head = element("figcaption", {}, element("span", {}, language), copyButton(() => code));
  const body = element("pre", { tabindex: "0", "aria-label": t("code") }, element("code", {}, code));
  return element("figure", { class: "code" }, head, body);
}

function heading(lines, at) {
  const found = HEADING.exec(lines[at]);
  if (!found) return null;
  const text = lines[at].slice(found[0].length).trim().replace(/\s#+$/, "");
  const level = Math.min(found[1].length + 2, 6); // below the headings of the page itself
  return { end: at + 1, make: () => element(`h${level}`, {}, inline(text)) };
}

function rule(lines, at) {
  return RULE.test(lines[at]) ? { end: at + 1, make: () => element("hr") } : null;
}

function quote(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end++;
  if (end === at) return null;
  const inside = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return { end, make: () => element("blockquote", {}, ...parse(inside, depth + 1).map((block) => block.make())) };
}

function list(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  if (!first) return null;
  const base = indent(lines[at]);
  const items = [];
  let loose = false;
  let end = at;
  while (end < lines.length && sameList(lines[end], base, first[1])) {
    const [from, to] = [end, itemEnd(lines, end, base)];
    end = afterBlanks(lines, to);
    items.push(itemLines(lines.slice(from, to)));
    if (end < lines.length && sameList(lines[end], base, first[1])) loose ||= end > to;
    else end = to;
  }
  const start = Number.parseInt(first[1], 10);
  const make = () => {
    const entries = items.map((inside) => element("li", {}, ...itemContent(parse(inside, depth + 1), loose)));
    return Number.isNaN(start) ? element("ul", {}, ...entries) : element("ol", { start: String(start) }, ...entries);
  };
  return { end, make };
}

function sameList(line, base, marker) {
  const found = ITEM.exec(line);
  return found !== null && !RULE.test(line) && indent(line) < base + 2 && found[1].at(-1) === marker.at(-1);
}

/** Where the item that begins at `at` ends: its other lines are indented, or go on with its paragraph. */
function itemEnd(lines, at, base) {
  let end = at + 1;
  while (end < lines.length) {
    if (blank(lines[end])) {
      const next = afterBlanks(lines, end);
      if (next === lines.length || indent(lines[next]) < base + 2) return end;
      end = next;
    } else if (indent(lines[end]) >= base + 2 || !beginsBlock(lines, end)) end++;
    else return end;
  }
  return end;
}

function afterBlanks(lines, at) {
  while (at < lines.length && blank(lines[at])) at++;
  return at;
}

function itemLines([first, ...others]) {
  const [whole, , spaces = " "] = ITEM.exec(first);
  const marker = whole.length - (spaces.length > 4 ? spaces.length - 1 : 0);
  const text = first.slice(marker).replace(/^\[([ xX])\] /, (_, mark) => (mark === " " ? "☐ " : "☑ "));
  return [text, ...others.map((line) => strip(line, marker))];
}

/** The one paragraph of an item stands without its margins, where no blank line divides the items. */
function itemContent(blocks, loose) {
  const tight = !loose && blocks.filter((block) => block.inner !== undefined).length === 1;
  return blocks.map((block) => (tight && block.inner !== undefined ? inline(block.inner) : block.make()));
}

function table(lines, at) {
  if (at + 1 >= lines.length || !lines[at].includes("|") || !lines[at + 1].includes("-")) return null;
  const head = cells(lines[at]);
  const marks = cells(lines[at + 1]);
  if (marks.length !== head.length || !marks.every((cell) => /^:?-+:?$/.test(cell))) return null;
  let end = at + 2;
  while (end < lines.length && !blank(lines[end]) && lines[end].includes("|")) end++;
  const align = marks.map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "end") : undefined));
  const row = (tag, texts) =>
    element("tr", {}, ...head.map((_, i) => element(tag, { class: align[i] }, inline(texts[i] ?? ""))));
  const make = () => {
    const body = lines.slice(at + 2, end).map((line) => row("td", cells(line)));
    const whole = element("table", {}, element("thead", {}, row("th", head)), element("tbody", {}, ...body));
    return element("div", { class: "scroll", tabindex: "0" }, whole);
  };
  return { end, make };
}

/** The cells of a row of a table; \| and the bars of code are text. */
function cells(line) {
  const found = [""];
  let inCode = false;
  const row = line.trim().replace(/^\|/, "");
  for (let i = 0; i < row.length; i++) {
    if (row[i] === "\\" && row[i + 1] === "|") found[found.length - 1] += row[++i];
    else if (row[i] === "|" && !inCode) found.push("");
    else {
      if (row[i] === "`") inCode = !inCode && row.includes("`", i + 1);
      found[found.length - 1] += row[i];
    }
  }
  if (found.length > 1 && blank(found.at(-1))) found.pop();
  return found.map((cell) => cell.trim());
}

function paragraph(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && !blank(lines[end]) && (depth >= DEEPEST || !beginsBlock(lines, end))) end++;
  const text = lines.slice(at, end).map((line) => line.trim()).join("\n");
  return { end, inner: text, make: () => element("p", {}, inline(text)) };
}

function beginsBlock(lines, at) {
  const line = lines[at];
  return [FENCE, HEADING, RULE, QUOTE, ITEM].some((begin) => begin.test(line)) || table(lines, at) !== null;
}

/** Columns of white space that a line begins with; a tab counts four. */
function indent(line) {
  let columns = 0;
  for (const char of line) {
    if (char === " ") columns++;
    else if (char === "\t") columns += 4;
    else break;
  }
  return columns;
}

function strip(line, columns) {
  let at = 0;
  while (columns > 0 && (line[at] === " " || line[at] === "\t")) columns -= line[at++] === " " ? 1 : 4;
  return line.slice(at);
}

// Within a line ---------------------------------------------------------------------------------------------------------

const SPECIAL = /\\|`+|\*+|_+|~+|!?\[|\]|<|https?:\/\/|\$\$|\n/g;
const TARGET = /\(\s{0,9}(?:<([^<>\n]{0,2000})>|([^\s()<>]{0,2000}(?:\([^\s()<>]{0,500}\)[^\s()<>]{0,500})?))(?:\s{1,9}(?:"[^"\n]{0,500}"|'[^'\n]{0,500}'))?\s{0,9}\)/y;
const BETWEEN_ANGLES = /<(https?:\/\/[^\s<>]{1,2000})>/y;
const BARE = /https?:\/\/[^\s<>"`[\]]{1,2000}/y;
const PUNCTUATION = /[\p{P}\p{S}]/u;
const TAGS = { 1: "em", 2: "strong" };

/**
 * A text with emphasis, code and links, as a fragment.
 *
 * One pass makes a flat list: texts, elements, and marks that may open or close something. `open` holds the marks that
 * nothing has closed yet. What is closed takes the marks above it with it: they are text. So elements never cross.
 */
function inline(text) {
  const items = [];
  const open = [];
  const code = new CodeSpans(text);
  const absent = new Set(); // ends of formulas that do not come any more
  let at = 0;
  SPECIAL.lastIndex = 0;
  for (let found; (found = nextSpecial(text, at)); ) {
    if (found.index > at) items.push(text.slice(at, found.index));
    const mark = found[0];
    at = found.index + mark.length;
    if (mark === "\n") items.push(element("br"));
    else if (mark === "\\" || mark === "$$") at = escaped(text, found.index, mark, items, absent);
    else if (mark[0] === "`") at = code.read(found.index, mark, items);
    else if (mark === "<" || mark[0] === "h") at = address(text, found.index, mark, items);
    else if (mark.endsWith("[")) pushOpen(open, items, { bracket: true, literal: mark, opens: [], closes: 0 });
    else if (mark === "]") at = closeBracket(text, at, open, items);
    else emphasis(text, found.index, mark, open, items);
  }
  items.push(text.slice(at));
  return assemble(items);
}

function nextSpecial(text, at) {
  SPECIAL.lastIndex = at;
  return SPECIAL.exec(text);
}

/** A backslash makes a mark text. Formulas, \( \), \[ \] and $$ $$, are shown as they are written. */
function escaped(text, at, mark, items, absent) {
  const begin = mark === "$$" ? mark : text.slice(at, at + 2);
  const end = { "\\(": "\\)", "\\[": "\\]", $$: "$$" }[begin];
  if (end !== undefined) {
    const stop = absent.has(end) ? -1 : text.indexOf(end, at + 2);
    if (stop < 0) absent.add(end);
    const next = stop < 0 ? at + 2 : stop + 2;
    items.push(text.slice(at, next));
    return next;
  }
  const next = text[at + 1];
  const isMark = next !== undefined && next < "\x80" && PUNCTUATION.test(next);
  items.push(isMark ? next : "\\");
  return isMark ? at + 2 : at + 1;
}

/** Code between runs of backticks of one length; a run that has no second one is text. */
class CodeSpans {
  constructor(text) {
    this.text = text;
    this.runs = null; // length of a run → its places, the last first
  }

  read(at, marks, items) {
    const end = this.#next(at, marks.length);
    if (end === undefined) {
      items.push(marks);
      return at + marks.length;
    }
    const inside = this.text.slice(at + marks.length, end).replaceAll("\n", " ");
    const padded = inside.startsWith(" ") && inside.endsWith(" ") && !blank(inside);
    items.push(element("code", {}, padded ? inside.slice(1, -1) : inside));
    return end + marks.length;
  }

  #next(at, length) {
    if (this.runs === null) {
      this.runs = new Map();
      for (const { 0: run, index } of [...this.text.matchAll(/`+/g)].reverse()) {
        if (!this.runs.has(run.length)) this.runs.set(run.length, []);
        this.runs.get(run.length).push(index);
      }
    }
    const places = this.runs.get(length) ?? []; // a run cut by a backslash has none
    while (places.length && places.at(-1) <= at) places.pop();
    return places.at(-1);
  }
}

/** <https://…> and https://… as they stand, without the punctuation that ends a sentence. */
function address(text, at, mark, items) {
  const rule = mark === "<" ? BETWEEN_ANGLES : BARE;
  rule.lastIndex = at;
  const found = mark !== "<" && /\w/.test(text[at - 1] ?? "") ? null : rule.exec(text);
  const label = found && (mark === "<" ? found[1] : withoutEnd(found[0]));
  const href = label && webAddress(label);
  items.push(href ? { href, label } : mark);
  if (!href) return at + mark.length;
  return at + (mark === "<" ? found[0] : label).length;
}

function withoutEnd(address) {
  while (/[.,;:!?'*_~)]$/.test(address) && !(address.endsWith(")") && address.includes("("))) {
    address = address.slice(0, -1);
  }
  return address;
}

function pushOpen(open, items, item) {
  items.push(item);
  if (open.length < MOST_OPEN) open.push(item);
}

function closeBracket(text, at, open, items) {
  const place = open.findLastIndex((item) => item.bracket);
  TARGET.lastIndex = at;
  const found = place < 0 ? null : TARGET.exec(text);
  const href = found && webAddress(found[1] ?? found[2]);
  if (place >= 0) {
    const [bracket] = open.splice(place);
    if (href) {
      bracket.href = href;
      for (let i = open.length - 1; i >= 0; i--) if (open[i].bracket) open.splice(i, 1); // no link in a link
      items.push({ closes: 1, literal: "", opens: [] });
      return at + found[0].length;
    }
  }
  items.push("]");
  return at;
}

/** The address as a browser writes it, or null of anything but http and https. */
function webAddress(text) {
  if (!/^https?:\/\//i.test(text) || !URL.canParse(text)) return null;
  return new URL(text).href;
}

function emphasis(text, at, marks, open, items) {
  if (marks.length > 3 || (marks[0] === "~" && marks.length !== 2)) {
    items.push(marks);
    return;
  }
  const item = { char: marks[0], literal: marks, opens: [], closes: 0 };
  const [before, after] = [text[at - 1] ?? " ", text[at + marks.length] ?? " "];
  const [opens, closes] = flanks(item.char, before, after);
  if (closes) close(item, open);
  if (opens && item.literal) pushOpen(open, items, item);
  else items.push(item);
}

/** Whether a run of marks may open and may close emphasis, by what stands around it (CommonMark's rules). */
function flanks(char, before, after) {
  const [spaceBefore, spaceAfter] = [/\s/.test(before), /\s/.test(after)];
  const [markBefore, markAfter] = [PUNCTUATION.test(before), PUNCTUATION.test(after)];
  const left = !spaceAfter && (!markAfter || spaceBefore || markBefore);
  const right = !spaceBefore && (!markBefore || spaceAfter || markAfter);
  return char === "_" ? [left && (!right || markBefore), right && (!left || markAfter)] : [left, right];
}

function close(item, open) {
  while (item.literal) {
    const place = open.findLastIndex((other) => other.char === item.char);
    if (place < 0) return;
    const opener = open[place];
    const width = Math.min(2, opener.literal.length, item.literal.length);
    open.splice(place + 1);
    opener.literal = opener.literal.slice(width);
    item.literal = item.literal.slice(width);
    opener.opens.unshift(item.char === "~" ? "del" : TAGS[width]);
    item.closes++;
    if (!opener.literal) open.pop();
  }
}

/** The list as nested elements. */
function assemble(items) {
  const containers = [document.createDocumentFragment()];
  for (const item of items) {
    if (typeof item === "string" || item instanceof Node) containers.at(-1).append(item);
    else if (item.label !== undefined) {
      const inLink = containers.some((container) => container.localName === "a");
      containers.at(-1).append(inLink ? item.label : link(item.href, item.label));
    } else {
      for (let i = 0; i < item.closes; i++) containers.pop();
      if (item.href) enter(containers, link(item.href));
      else containers.at(-1).append(item.literal);
      for (const tag of item.opens) enter(containers, element(tag));
    }
  }
  return containers[0];
}

function enter(containers, container) {
  containers.at(-1).append(container);
  containers.push(container);
}

function link(href, ...content) {
  return element("a", { href, rel: "noopener noreferrer", target: "_blank" }, ...content);
}
