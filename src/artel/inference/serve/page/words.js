// The texts of the page, in the browser's language: en.js or ru.js.

const LANGUAGES = ["en", "ru"];
const preferred = navigator.languages.map((name) => name.slice(0, 2).toLowerCase());
export const language = preferred.find((name) => LANGUAGES.includes(name)) ?? "en";
const { default: words } = await import(`/page/${language}.js`);

/** Return the text with this name, with `values` in place of {name}. */
export function t(name, values = {}) {
  return words[name].replace(/\{(\w+)\}/g, (_, key) => values[key]);
}

export function number(value, digits = 0) {
  return value.toLocaleString(language, { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** Fill in the texts that the HTML names in data-word, data-label, data-title and data-placeholder. */
export function translatePage() {
  document.documentElement.lang = language;
  for (const node of document.querySelectorAll("[data-word]")) node.textContent = t(node.dataset.word);
  for (const node of document.querySelectorAll("[data-label]")) node.setAttribute("aria-label", t(node.dataset.label));
  for (const node of document.querySelectorAll("[data-title]")) node.title = t(node.dataset.title);
  for (const node of document.querySelectorAll("[data-placeholder]")) node.placeholder = t(node.dataset.placeholder);
}
