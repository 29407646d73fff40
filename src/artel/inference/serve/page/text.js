// A text that the model continues, in one field.

import { describe, stopped, stream } from "./api.js";
import { byId, copyButton, showProblem } from "./dom.js";
import { number, t } from "./words.js";

const TEXT = "artel.text"; // in localStorage

export class Continuation {
  #context;
  #controller = null;
  #before = null; // the text that was continued last

  constructor(context) {
    this.#context = context;
    this.area = byId("text");
    this.area.value = localStorage.getItem(TEXT) ?? "";
    this.area.oninput = () => {
      this.#before = null;
      this.#settled();
    };
    this.area.onkeydown = (event) => {
      if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
      event.preventDefault();
      this.#go();
    };
    byId("text-go").onclick = () => this.#go();
    byId("text-stop").onclick = () => this.stop();
    byId("text-undo").onclick = () => this.#undo();
    byId("text-again").onclick = () => {
      this.#undo();
      this.#go();
    };
    byId("text-copy").replaceWith(copyButton(() => this.area.value));
  }

  /** Whether there was something to stop. */
  stop() {
    this.#controller?.abort();
    return this.#controller !== null;
  }

  async #go() {
    if (this.#controller) return;
    this.#before = this.area.value;
    this.#controller = new AbortController();
    showProblem(byId("text-problem"), null);
    this.#settled();
    try {
      await this.#receive();
    } catch (error) {
      if (!stopped(error)) showProblem(byId("text-problem"), describe(error), () => this.#go());
    }
    this.#controller = null;
    this.#settled();
  }

  async #receive() {
    const body = { model: this.#context.model().id, prompt: this.#before, ...this.#context.sampling() };
    const begun = performance.now();
    byId("text-info").textContent = "";
    for await (const chunk of stream("/v1/completions", body, this.#controller.signal)) {
      this.#append(chunk.choices[0]?.text ?? "");
      if (!chunk.usage) continue;
      const tokens = chunk.usage.completion_tokens;
      const rate = number((tokens * 1000) / (performance.now() - begun), 1);
      byId("text-info").textContent = t("usage", { tokens: number(tokens), rate });
    }
  }

  #append(text) {
    const atEnd = this.area.scrollHeight - this.area.scrollTop - this.area.clientHeight < 40;
    this.area.value += text;
    if (atEnd) this.area.scrollTop = this.area.scrollHeight;
  }

  #undo() {
    this.area.value = this.#before;
    this.#before = null;
    this.#settled();
  }

  #settled() {
    const running = this.#controller !== null;
    this.area.readOnly = running;
    byId("text-go").hidden = running;
    byId("text-stop").hidden = !running;
    byId("text-undo").disabled = byId("text-again").disabled = running || this.#before === null;
    try {
      localStorage.setItem(TEXT, this.area.value);
    } catch {
      this.#context.full();
    }
  }
}
