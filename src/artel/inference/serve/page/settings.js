// The settings. Sampling and theme are stored in the browser, the system prompt with the conversation.

import { byId, element } from "./dom.js";
import { t } from "./words.js";

const SAMPLING = "artel.sampling";
const THEME = "artel.theme";
const FIELDS = {
  temperature: { min: 0, max: 2, step: 0.01 },
  top_p: { min: 0.01, max: 1, step: 0.01 },
  top_k: { min: 0, max: 1000000, step: 1 },
  max_tokens: { min: 1, max: 1000000, step: 1 },
  seed: { min: 0, max: 4294967295, step: 1 },
};

export class Settings {
  #values = JSON.parse(localStorage.getItem(SAMPLING) ?? "{}");

  /** `system`: {get, set} of the system prompt. `full` is called if the browser's storage is full. */
  constructor({ system, full }) {
    this.system = system;
    this.full = full;
    byId("sampling").append(...Object.entries(FIELDS).map(([name, limits]) => this.#createField(name, limits)));
    byId("open-settings").onclick = () => this.open();
    byId("close-settings").onclick = () => byId("settings").close();
    byId("defaults").onclick = () => this.#reset();
    byId("system").oninput = () => system.set(byId("system").value);
    byId("theme").onchange = () => this.#setTheme(byId("theme").value);
    this.#setTheme(localStorage.getItem(THEME) ?? "auto");
  }

  /** The settings that the user has changed, by their names in the API. Others have the server's defaults. */
  get sampling() {
    return { ...this.#values };
  }

  open() {
    byId("system").value = this.system.get();
    for (const name of Object.keys(FIELDS)) byId(name).value = this.#values[name] ?? "";
    byId("settings").showModal();
  }

  #createField(name, limits) {
    const input = element("input", { id: name, type: "number", placeholder: t("default"), inputmode: "decimal", ...limits });
    input.oninput = () => {
      delete this.#values[name];
      if (input.validity.valid && input.value !== "") this.#values[name] = input.valueAsNumber;
      this.#save(SAMPLING, JSON.stringify(this.#values));
    };
    const about = t(`about_${name}`, limits);
    return element("label", { title: about }, element("span", {}, t(name)), input, element("small", { class: "soft" }, about));
  }

  #reset() {
    this.#values = {};
    for (const name of Object.keys(FIELDS)) byId(name).value = "";
    this.#save(SAMPLING, "{}");
  }

  #setTheme(theme) {
    byId("theme").value = theme;
    document.documentElement.dataset.theme = theme;
    this.#save(THEME, theme);
  }

  #save(name, value) {
    try {
      localStorage.setItem(name, value);
    } catch {
      this.full();
    }
  }
}
