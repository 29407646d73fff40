// The chat: messages on the screen, answers as they come, what may be done with each.

import { describe, stopped, stream } from "./api.js";
import * as conversations from "./conversation.js";
import { button, byId, copyButton, element, grow, iconButton } from "./dom.js";
import { showMarkdown } from "./markdown.js";
import { number, t } from "./words.js";

const SAVE_EVERY = 1000; // milliseconds, while an answer comes

/**
 * `context` gives `model()` and `sampling()` when a request is made. `changed(conversation)` is called when something
 * in one is to be saved. Several conversations may be answered at once; one is on the screen.
 */
export class Chat {
  #context;
  #running = new Map(); // id → {conversation, node, controller}
  #problems = new Map(); // id → what went wrong with the last answer, in words
  #drawn = new Map(); // place of a node → {key, article, body}: what is on the screen, and what it was made of
  #drawing = 0; // the animation frame asked for, 0 if none is

  constructor(context) {
    this.#context = context;
    this.messages = byId("messages");
    this.input = byId("input");
    byId("send").onclick = () => this.send();
    byId("stop").onclick = () => this.stop();
    this.input.oninput = () => grow(this.input);
    this.input.onkeydown = (event) => {
      if (!sends(event)) return;
      event.preventDefault();
      this.send();
    };
    addEventListener("pagehide", () => {
      for (const { conversation } of this.#running.values()) this.#context.changed(conversation);
    });
  }

  /** The conversation of that id as it is now: one that is being answered is not read again. */
  find(id) {
    return this.#running.get(id)?.conversation ?? conversations.load(id);
  }

  isRunning(id) {
    return this.#running.has(id);
  }

  show(conversation) {
    this.conversation = conversation;
    this.#draw();
    this.messages.scrollTop = this.messages.scrollHeight;
  }

  send() {
    const text = this.input.value;
    if (text.trim() === "" || this.isRunning(this.conversation.id)) return;
    this.input.value = "";
    grow(this.input);
    if (!matchMedia("(pointer: coarse)").matches) this.input.focus(); // not on a phone: it would show its keys
    const { nodes, leaf } = this.conversation;
    const unanswered = leaf >= 0 && nodes[leaf].role === "user"; // templates want the roles to take turns
    this.#ask(unanswered ? nodes[leaf].parent : leaf, text);
  }

  /** Stop the answer that is on the screen; what has come of it stays. Whether there was one. */
  stop() {
    const running = this.#running.get(this.conversation.id);
    running?.controller.abort();
    return running !== undefined;
  }

  forget(id) {
    this.#running.get(id)?.controller.abort();
    this.#running.delete(id);
  }

  #ask(parent, text) {
    const place = conversations.add(this.conversation, parent, "user", text);
    this.#answer(this.conversation, place);
  }

  async #answer(conversation, question) {
    if (this.isRunning(conversation.id)) return;
    const messages = conversations.messagesOf(conversation, question);
    const place = conversations.add(conversation, question, "assistant", "");
    const node = conversation.nodes[place];
    const controller = new AbortController();
    node.partial = true; // until it is whole: so it is known for one that was cut, should the page be closed
    this.#problems.delete(conversation.id);
    this.#running.set(conversation.id, { conversation, node, controller });
    conversation.changed = Date.now();
    this.#context.changed(conversation);
    if (conversation === this.conversation) this.show(conversation);
    try {
      await this.#receive(conversation, node, messages, controller.signal);
      delete node.partial;
    } catch (error) {
      if (!stopped(error)) this.#problems.set(conversation.id, describe(error));
    }
    if (!this.#running.delete(conversation.id)) return; // it was deleted meanwhile
    if (node.content === "" && node.partial) conversations.takeBack(conversation);
    this.#context.changed(conversation);
    if (conversation === this.conversation) this.#draw();
  }

  async #receive(conversation, node, messages, signal) {
    const body = { model: this.#context.model().id, messages, ...this.#context.sampling() };
    const begun = performance.now();
    let saved = begun;
    for await (const chunk of stream("/v1/chat/completions", body, signal)) {
      const [choice] = chunk.choices;
      node.content += choice?.delta?.content ?? "";
      if (choice?.finish_reason) node.finish = choice.finish_reason;
      if (chunk.usage) node.usage = { ...chunk.usage, seconds: (performance.now() - begun) / 1000 };
      if (performance.now() - saved > SAVE_EVERY) {
        this.#context.changed(conversation);
        saved = performance.now();
      }
      if (conversation === this.conversation) this.#drawSoon(node);
    }
  }

  // On the screen -------------------------------------------------------------------------------------------------------

  #drawSoon(node) {
    this.#drawing ||= requestAnimationFrame(() => {
      this.#drawing = 0;
      const drawn = this.#drawn.get(this.conversation.nodes.indexOf(node));
      if (drawn) this.#keepingEnd(() => showAnswer(drawn.body, node));
    });
  }

  #draw() {
    cancelAnimationFrame(this.#drawing);
    this.#drawing = 0;
    const { id } = this.conversation;
    const running = this.isRunning(id);
    const path = conversations.pathOf(this.conversation);
    this.messages.setAttribute("aria-busy", running); // a screen reader reads an answer when it is whole
    this.#keepingEnd(() => {
      const drawn = path.map((place) => this.#message(place));
      const end = running ? [] : this.#end(path.at(-1));
      replace(this.messages, [...(drawn.length ? drawn : [this.#greeting()]), ...end]);
    });
    byId("send").hidden = running;
    byId("stop").hidden = !running;
    byId("info").textContent = this.#usage(path);
  }

  /** Change the messages; who was at their end stays there. */
  #keepingEnd(change) {
    const box = this.messages;
    const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    change();
    if (atEnd) box.scrollTop = box.scrollHeight;
  }

  #greeting() {
    return element("p", { class: "greeting soft" }, t("greeting"));
  }

  /** The element of a message: the one that is there, where nothing in it has changed. */
  #message(place) {
    const node = this.conversation.nodes[place];
    const running = this.#running.get(this.conversation.id)?.node === node;
    const key = JSON.stringify([this.conversation.id, node, running, conversations.versions(this.conversation, place)]);
    if (this.#drawn.get(place)?.key !== key) this.#drawn.set(place, { key, ...this.#newMessage(place, running) });
    return this.#drawn.get(place).article;
  }

  #newMessage(place, running) {
    const node = this.conversation.nodes[place];
    const mine = node.role === "user";
    const body = element("div", { class: "body" });
    if (mine) body.append(node.content);
    else showAnswer(body, node);
    const label = t(mine ? "you" : "model");
    const article = element("article", { class: `message ${node.role}`, "aria-label": label }, body);
    if (!running) article.append(...this.#notes(node), this.#actions(place, article));
    return { article, body };
  }

  #notes(node) {
    const note = node.finish === "length" ? "cut_by_length" : node.partial ? "stopped" : null;
    return note === null ? [] : [element("p", { class: "note soft" }, t(note))];
  }

  #actions(place, article) {
    const node = this.conversation.nodes[place];
    const change =
      node.role === "user"
        ? button("edit", () => this.#edit(place, article))
        : button("regenerate", () => this.#answer(this.conversation, node.parent));
    const actions = element("div", { class: "actions" }, ...this.#switch(place), copyButton(() => node.content));
    if (node.role === "user" || node.parent >= 0) actions.append(change);
    return actions;
  }

  /** ‹ 2 / 3 ›: the versions of a message, where there are several. */
  #switch(place) {
    const places = conversations.versions(this.conversation, place);
    if (places.length < 2) return [];
    const at = places.indexOf(place);
    const step = (to, text, label) => {
      const act = () => {
        conversations.choose(this.conversation, places[to]);
        this.#context.changed(this.conversation);
        this.#draw();
      };
      return element("button", { class: "quiet icon", "aria-label": t(label), onclick: act, disabled: !(to in places) }, text);
    };
    const count = element("span", { class: "soft" }, `${at + 1} / ${places.length}`);
    return [step(at - 1, "‹", "version_before"), count, step(at + 1, "›", "version_after")];
  }

  #edit(place, article) {
    const node = this.conversation.nodes[place];
    const area = element("textarea", { "aria-label": t("edit_message"), rows: "1" });
    const accept = () => {
      if (area.value.trim() !== "") this.#ask(node.parent, area.value);
    };
    const cancel = () => this.#draw();
    area.value = node.content;
    area.oninput = () => grow(area);
    area.onkeydown = (event) => {
      if (event.key === "Escape") cancel();
      else if (!sends(event)) return;
      else accept();
      event.preventDefault();
      event.stopPropagation();
    };
    const save = element("button", { onclick: accept }, t("send"));
    this.#drawn.delete(place);
    article.replaceChildren(area, element("div", { class: "actions" }, save, button("cancel", cancel)));
    article.classList.add("editing");
    grow(area);
    area.focus();
  }

  /** Under the last message: what went wrong, and a button for an answer that is not there. */
  #end(last) {
    const problem = this.#problems.get(this.conversation.id);
    const unanswered = last !== undefined && this.conversation.nodes[last].role === "user";
    if (!problem && !unanswered) return [];
    const question = unanswered ? last : this.conversation.nodes[last]?.parent;
    const again = button("try_again", () => this.#answer(this.conversation, question));
    return [element("div", { class: "notice", role: "alert" }, problem ?? t("unanswered"), " ", again)];
  }

  #usage(path) {
    const usage = this.conversation.nodes[path.at(-1)]?.usage;
    if (!usage) return "";
    const { prompt_tokens: prompt, completion_tokens: tokens, seconds } = usage;
    const rate = number(tokens / seconds, 1);
    const words = t("usage", { tokens: number(tokens), rate });
    const length = this.#context.model()?.context_length;
    return length ? `${words} · ${t("context_used", { used: number(prompt + tokens), length: number(length) })}` : words;
  }
}

/** Enter sends; not with Shift, not while letters are put together, not on a phone, which has no Shift+Enter. */
function sends(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing && !matchMedia("(pointer: coarse)").matches;
}

/** Put these elements into the box in place of others; those that are there already are not touched. */
function replace(box, elements) {
  const wanted = new Set(elements);
  for (const child of [...box.children]) if (!wanted.has(child)) child.remove();
  elements.forEach((each, place) => {
    if (box.children[place] !== each) box.insertBefore(each, box.children[place] ?? null);
  });
}

/** An answer, with the thoughts before it folded. */
function showAnswer(body, { content, partial }) {
  const { thoughts, answer } = split(content);
  let text = body.querySelector(":scope > .markdown");
  if (!text) {
    text = element("div", { class: "markdown" });
    body.append(text);
  }
  let folded = body.querySelector(":scope > details");
  if (thoughts !== null && !folded) {
    folded = element("details", {}, element("summary", {}, t("thoughts")), element("div", { class: "thoughts" }));
    body.prepend(folded);
  }
  if (folded) folded.lastChild.textContent = thoughts;
  showMarkdown(text, answer);
  text.classList.toggle("waiting", Boolean(partial) && content === "");
}

function split(content) {
  const found = /^\s*<think>/.exec(content);
  if (!found) return { thoughts: null, answer: content };
  const [thoughts, ...rest] = content.slice(found[0].length).split("</think>");
  return { thoughts: thoughts.trim(), answer: rest.join("</think>").trimStart() };
}

// The list of conversations ---------------------------------------------------------------------------------------------

/** An entry of the list: open, rename, save as a file, delete. */
export function entry(conversation, isCurrent, { open, rename, save, remove }) {
  const title = conversation.title || t("untitled");
  const opening = element("button", { class: "title", "aria-current": isCurrent && "true", onclick: open }, title);
  return element(
    "li",
    { class: isCurrent ? "current" : undefined },
    opening,
    iconButton("rename", t("rename_one", { title }), rename),
    iconButton("save", t("export_one", { title }), save),
    iconButton("remove", t("delete_one", { title }), remove),
  );
}
