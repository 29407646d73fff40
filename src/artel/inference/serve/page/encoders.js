// Encoders: words for masks, answers to questions about a text.

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
    const answer = await requested("/v1/fill-mask", body, [notice, result, byId("mask-go")], () => this.#fill());
    if (!answer) return;
    const [{ text, masks }] = answer.data;
    const tables = masks.map((candidates, place) => this.#candidates(input, candidates, place, masks.length));
    result.replaceChildren(element("p", { class: "filled" }, text), ...tables);
  }

  #candidates(input, candidates, place, count) {
    const rows = candidates.map(({ token, score }) => {
      const put = () => (this.area.value = replaced(input, this.#mask(), place, token.trim()));
      return element(
        "tr",
        {},
        element("td", {}, element("button", { class: "quiet", title: t("put_in"), onclick: put }, token.trim() || "␣")),
        element("td", { class: "end" }, `${number(score * 100, 1)} %`),
        element("td", { class: "bar" }, element("progress", { max: "1", value: String(score), "aria-hidden": "true" })),
      );
    });
    const caption = element("caption", {}, t("mask_number", { number: place + 1, count }));
    return element("table", { class: "candidates" }, caption, element("tbody", {}, ...rows));
  }
}

/** The text with `token` in the mask number `place`. */
function replaced(text, mask, place, token) {
  const parts = text.split(mask);
  return `${parts.slice(0, place + 1).join(mask)}${token}${parts.slice(place + 1).join(mask)}`;
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
    const found = await requested("/v1/answers", body, [notice, result, byId("question-go")], () => this.#answer());
    if (!found) return;
    const said = { yes: t("yes"), no: t("no") }[found.kind] ?? (found.answer || t("no_answer"));
    const score = found.score === null ? "" : t("score", { score: number(found.score, 3) });
    const line = element("p", { class: "answer" }, element("strong", {}, said), " ", element("span", { class: "soft" }, score));
    result.replaceChildren(line);
    if (found.start !== null) result.append(marked(context, found.start, found.end));
  }
}

/** The text with the answer marked. Places count characters, as Python does, not JavaScript's halves of pairs. */
function marked(text, start, end) {
  const letters = Array.from(text);
  const part = (...range) => letters.slice(...range).join("");
  return element("p", { class: "marked" }, part(0, start), element("mark", {}, part(start, end)), part(end));
}

/** The answer, or null after a problem, which is shown; the button cannot be pressed meanwhile. */
async function requested(path, body, [notice, result, pressed], again) {
  showProblem(notice, null);
  pressed.disabled = true;
  result.setAttribute("aria-busy", "true");
  try {
    return await call(path, body);
  } catch (error) {
    result.replaceChildren();
    showProblem(notice, describe(error), again);
    return null;
  } finally {
    pressed.disabled = false;
    result.removeAttribute("aria-busy");
  }
}

function onEnter(area, act) {
  area.onkeydown = (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    act();
  };
}
