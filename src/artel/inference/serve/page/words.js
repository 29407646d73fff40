// The words of the page, in the browser's language: en.js or ru.js.

const LANGUAGES = ["en", "ru"];
const preferred = navigator.languages.map((name) => name.slice(0, 2).toLowerCase());
export const language = preferred.find((name) => LANGUAGES.includes(name)) ?? "en";
const { default: words } = await import(`/page/${language}.js`);

/** The words of that name, with values put in for {name}. */
export function t(name, values = {}) {
  return words[name].replace(/\{(\w+)\}/g, (_, key) => values[key]);
}

export function number(value, digits = 0) {
  return value.toLocaleString(language, { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** Fill in what the HTML names: data-word, data-label, data-title, data-placeholder. */
export function translatePage() {
  document.documentElement.lang = language;
  for (const each of document.querySelectorAll("[data-word]")) each.textContent = t(each.dataset.word);
  for (const each of document.querySelectorAll("[data-label]")) each.setAttribute("aria-label", t(each.dataset.label));
  for (const each of document.querySelectorAll("[data-title]")) each.title = t(each.dataset.title);
  for (const each of document.querySelectorAll("[data-placeholder]")) each.placeholder = t(each.dataset.placeholder);
}
