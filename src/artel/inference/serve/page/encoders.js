// Views for encoders: fill masks, answer questions about a text.

import { call, describe } from "./api.js";
import { byId, element, showProblem } from "./dom.js";
import { number, t } from "./words.js";

export class FillMask {
  #context;

  constructor(context) {
    this.#context = context;
    this.area = byId("mask-text");
    byId("mask-go").onclick = () => this.#fill();
    byId("mask-insert").onclick = () => this.#insert();
    onEnter(this.area, () => this.#fill());
  }

  show() {
    const mask = this.#mask();
    byId("mask-insert").textContent = t("insert_mask", { mask });
    this.area.placeholder = t("mask_hint", { mask });
  }

  #mask() {
    return this.#context.model().mask_token;
  }

  #insert() {
    this.area.setRangeText(this.#mask(), this.area.selectionStart, this.area.selectionEnd, "end");
    this.area.focus();
  }

  async #fill() {
    const [notice, result] = [byId("mask-problem"), byId("mask-result")];
    const input = this.area.value;
    if (!input.includes(this.#mask())) {
      showProblem(notice, t("no_mask", { mask: this.#mask() }));
      return;
    }
    const body = { model: this.#context.model().id, input, top_k: byId("mask-count").valueAsNumber || 5 };
    const answer = await sendRequest("/v1/fill-mask", body, [notice, result, byId("mask-go")], () => this.#fill());
    if (!answer) return;
    const [{ text, masks }] = answer.data;
    const tables = masks.map((candidates, index) => this.#createTable(input, candidates, index, masks.length));
    result.replaceChildren(element("p", { class: "filled" }, text), ...tables);
  }

  #createTable(input, candidates, index, count) {
    const rows = candidates.map(({ token, score }) => {
      const insert = () => (this.area.value = replaceMask(input, this.#mask(), index, token.trim()));
      return element(
        "tr",
        {},
        element("td", {}, element("button", { class: "quiet", title: t("put_in"), onclick: insert }, token.trim() || "␣")),
        element("td", { class: "end" }, `${number(score * 100, 1)} %`),
        element("td", { class: "bar" }, element("progress", { max: "1", value: String(score), "aria-hidden": "true" })),
      );
    });
    const caption = element("caption", {}, t("mask_number", { number: index + 1, count }));
    return element("table", { class: "candidates" }, caption, element("tbody", {}, ...rows));
  }
}

/** Return the text with `token` in place of the mask at `index`. */
function replaceMask(text, mask, index, token) {
  const parts = text.split(mask);
  return `${parts.slice(0, index + 1).join(mask)}${token}${parts.slice(index + 1).join(mask)}`;
}

export class Questions {
  #context;

  constructor(context) {
    this.#context = context;
    byId("question-go").onclick = () => this.#answer();
    onEnter(byId("question"), () => this.#answer());
  }

  async #answer() {
    const [notice, result] = [byId("question-problem"), byId("question-result")];
    const [question, context] = [byId("question").value, byId("context").value];
    if (question.trim() === "" || context.trim() === "") {
      showProblem(notice, t("no_question"));
      return;
    }
    const body = { model: this.#context.model().id, question, context };
    const answer = await sendRequest("/v1/answers", body, [notice, result, byId("question-go")], () => this.#answer());
    if (!answer) return;
    const text = { yes: t("yes"), no: t("no") }[answer.kind] ?? (answer.answer || t("no_answer"));
    const score = answer.score === null ? "" : t("score", { score: number(answer.score, 3) });
    const line = element("p", { class: "answer" }, element("strong", {}, text), " ", element("span", { class: "soft" }, score));
    result.replaceChildren(line);
    if (answer.start !== null) result.append(markAnswer(context, answer.start, answer.end));
  }
}

/** Mark the answer in a text. Offsets count code points, as in Python, not JavaScript's UTF-16 units. */
function markAnswer(text, start, end) {
  const characters = Array.from(text);
  const slice = (...range) => characters.slice(...range).join("");
  return element("p", { class: "marked" }, slice(0, start), element("mark", {}, slice(start, end)), slice(end));
}

/** Send a request and return the answer, or show the problem and return null. Disable the button meanwhile. */
async function sendRequest(path, body, [notice, result, submit], retry) {
  showProblem(notice, null);
  submit.disabled = true;
  result.setAttribute("aria-busy", "true");
  try {
    return await call(path, body);
  } catch (error) {
    result.replaceChildren();
    showProblem(notice, describe(error), retry);
    return null;
  } finally {
    submit.disabled = false;
    result.removeAttribute("aria-busy");
  }
}

function onEnter(area, action) {
  area.onkeydown = (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    action();
  };
}
