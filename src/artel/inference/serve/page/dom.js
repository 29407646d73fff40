// Helpers that create elements. Text stays text: the page never parses HTML.

import { t } from "./words.js";

/** Create an element. Attributes that begin with `on` are listeners. Children are elements or texts. */
export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

export const byId = (id) => document.getElementById(id);

const ICONS = {
  menu: "M4 7h16M4 12h16M4 17h16",
  rename: "M5 19h3L19 8l-3-3L5 16zM14 7l3 3",
  save: "M12 4v11M7 11l5 5 5-5M5 20h14",
  remove: "M6 6l12 12M18 6L6 18",
};

/** Create an icon of 24 × 24 in the colour of the text. Screen readers skip it. */
export function icon(name) {
  const namespace = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(namespace, "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(namespace, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

export function button(word, onclick, attributes = {}) {
  return element("button", { class: "quiet", onclick, ...attributes }, t(word));
}

export function iconButton(name, label, onclick) {
  return element("button", { class: "quiet icon", "aria-label": label, title: label, onclick }, icon(name));
}

/** Create a button that copies the text returned by `read`, and briefly shows if that worked. */
export function copyButton(read) {
  const node = button("copy", async () => {
    node.textContent = t((await copy(read())) ? "copied" : "not_copied");
    setTimeout(() => (node.textContent = t("copy")), 1500);
  });
  return node;
}

/** Copy a text. Return true if it worked. The clipboard API exists only on https and on localhost. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = element("textarea", { class: "hidden", "aria-hidden": "true" });
    area.value = text;
    (document.querySelector("dialog[open]") ?? document.body).append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    return copied;
  }
}

/** Make a text area as high as its text, within the limits of the style. */
export function grow(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + 2}px`;
}

/** Show a problem in a notice, with a button that calls `retry`, if any. Hide the notice if `text` is null. */
export function showProblem(notice, text, retry) {
  notice.hidden = text === null;
  notice.replaceChildren(...(text === null ? [] : [text]));
  if (text !== null && retry) notice.append(" ", button("try_again", retry));
}

/** Ask for a line of text, or, without a `value`, for confirmation. Return the text or true; null if cancelled. */
export function ask({ title, about = "", value, type = "text", yes = "ok" }) {
  const dialog = byId("ask");
  const input = byId("ask-value");
  byId("ask-title").textContent = byId("ask-label").textContent = title;
  byId("ask-about").textContent = about;
  byId("ask-field").hidden = value === undefined;
  byId("ask-yes").textContent = t(yes);
  input.type = type;
  input.value = value ?? "";
  return new Promise((resolve) => {
    let answer = null;
    const accept = () => {
      answer = value === undefined ? true : input.value;
      dialog.close();
    };
    byId("ask-yes").onclick = accept;
    byId("ask-no").onclick = () => dialog.close();
    input.onkeydown = (event) => {
      if (event.key !== "Enter" || event.isComposing) return;
      event.preventDefault(); // otherwise Enter would press the button that opened the dialog, which has the focus again
      accept();
    };
    dialog.onclose = () => {
      input.value = "";
      resolve(answer);
    };
    dialog.showModal();
    (value === undefined ? byId("ask-yes") : input).focus();
  });
}
