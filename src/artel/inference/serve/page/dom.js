// Elements made in one call. Text goes in as text: no part of the page reads HTML.

import { t } from "./words.js";

/** An element: attributes by name, `onclick` and the like for listeners; children are elements or texts. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

export const byId = (id) => document.getElementById(id);

const ICONS = {
  menu: "M4 7h16M4 12h16M4 17h16",
  rename: "M5 19h3L19 8l-3-3L5 16zM14 7l3 3",
  save: "M12 4v11M7 11l5 5 5-5M5 20h14",
  remove: "M6 6l12 12M18 6L6 18",
};

/** A drawing of 24 × 24, in the colour of the text, that screen readers pass over. */
export function icon(name) {
  const space = "http://www.w3.org/2000/svg";
  const drawing = document.createElementNS(space, "svg");
  drawing.setAttribute("viewBox", "0 0 24 24");
  drawing.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(space, "path");
  path.setAttribute("d", ICONS[name]);
  drawing.append(path);
  return drawing;
}

export function button(word, act, attributes = {}) {
  return element("button", { class: "quiet", onclick: act, ...attributes }, t(word));
}

export function iconButton(name, label, act) {
  return element("button", { class: "quiet icon", "aria-label": label, title: label, onclick: act }, icon(name));
}

/** A button that copies what `read` gives, and says so for a while. */
export function copyButton(read) {
  const made = button("copy", async () => {
    made.textContent = t((await copy(read())) ? "copied" : "not_copied");
    setTimeout(() => (made.textContent = t("copy")), 1500);
  });
  return made;
}

/** Whether the text got into the clipboard. Its interface is there on https and on this machine alone. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = element("textarea", { class: "hidden", "aria-hidden": "true" });
    area.value = text;
    (document.querySelector("dialog[open]") ?? document.body).append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

/** A text area as high as its text, within what the style allows. */
export function grow(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + 2}px`;
}

/** Says what went wrong in a notice, with a button to try again where `again` is given; hides it for null. */
export function showProblem(notice, text, again) {
  notice.hidden = text === null;
  notice.replaceChildren(...(text === null ? [] : [text]));
  if (text !== null && again) notice.append(" ", button("try_again", again));
}

/** Asks for a line of text, or only yes or no where `value` is absent. The text, true, or null when it is called off. */
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
      event.preventDefault(); // or it would press the button that asked, which has the focus again
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
