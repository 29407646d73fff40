// View for continuing a text in one field.

import { describe, isAbort, stream } from "./api.js";
import { byId, copyButton, showProblem } from "./dom.js";
import { number, t } from "./words.js";

const TEXT = "artel.text"; // in localStorage

export class Continuation {
  #context;
  #controller = null;
  #originalText = null; // the text before the last continuation

  constructor(context) {
    this.#context = context;
    this.area = byId("text");
    this.area.value = localStorage.getItem(TEXT) ?? "";
    this.area.oninput = () => {
      this.#originalText = null;
      this.#update();
    };
    this.area.onkeydown = (event) => {
      if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
      event.preventDefault();
      this.#continueText();
    };
    byId("text-go").onclick = () => this.#continueText();
    byId("text-stop").onclick = () => this.stop();
    byId("text-undo").onclick = () => this.#undo();
    byId("text-again").onclick = () => {
      this.#undo();
      this.#continueText();
    };
    byId("text-copy").replaceWith(copyButton(() => this.area.value));
  }

  /** Stop the continuation. Return true if one was running. */
  stop() {
    this.#controller?.abort();
    return this.#controller !== null;
  }

  async #continueText() {
    if (this.#controller) return;
    this.#originalText = this.area.value;
    this.#controller = new AbortController();
    showProblem(byId("text-problem"), null);
    this.#update();
    try {
      await this.#receive();
    } catch (error) {
      if (!isAbort(error)) showProblem(byId("text-problem"), describe(error), () => this.#continueText());
    }
    this.#controller = null;
    this.#update();
  }

  async #receive() {
    const body = { model: this.#context.model().id, prompt: this.#originalText, ...this.#context.sampling() };
    const started = performance.now();
    byId("text-info").textContent = "";
    for await (const chunk of stream("/v1/completions", body, this.#controller.signal)) {
      this.#append(chunk.choices[0]?.text ?? "");
      if (!chunk.usage) continue;
      const tokens = chunk.usage.completion_tokens;
      const rate = number((tokens * 1000) / (performance.now() - started), 1);
      byId("text-info").textContent = t("usage", { tokens: number(tokens), rate });
    }
  }

  #append(text) {
    const atEnd = this.area.scrollHeight - this.area.scrollTop - this.area.clientHeight < 40;
    this.area.value += text;
    if (atEnd) this.area.scrollTop = this.area.scrollHeight;
  }

  #undo() {
    this.area.value = this.#originalText;
    this.#originalText = null;
    this.#update();
  }

  #update() {
    const running = this.#controller !== null;
    this.area.readOnly = running;
    byId("text-go").hidden = running;
    byId("text-stop").hidden = !running;
    byId("text-undo").disabled = byId("text-again").disabled = running || this.#originalText === null;
    try {
      localStorage.setItem(TEXT, this.area.value);
    } catch {
      this.#context.full();
    }
  }
}
