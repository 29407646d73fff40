// The chat: shows messages, streams answers, and has the actions of each message.

import { describe, isAbort, stream } from "./api.js";
import * as conversations from "./conversation.js";
import { button, byId, copyButton, element, grow, iconButton } from "./dom.js";
import { showMarkdown } from "./markdown.js";
import { number, t } from "./words.js";

const SAVE_EVERY = 1000; // milliseconds between saves of an answer in progress

/**
 * `context` has `model()` and `sampling()` for requests, and `changed(conversation)`, which saves a conversation. Several
 * conversations may be answered concurrently. One is on the screen.
 */
export class Chat {
  #context;
  #running = new Map(); // id → {conversation, node, controller}
  #problems = new Map(); // id → message about the failure of the last answer
  #drawn = new Map(); // index of a node → {key, article, body}: elements on the screen, and the state that they show
  #drawing = 0; // the requested animation frame, 0 if none

  constructor(context) {
    this.#context = context;
    this.messages = byId("messages");
    this.input = byId("input");
    byId("send").onclick = () => this.send();
    byId("stop").onclick = () => this.stop();
    this.input.oninput = () => grow(this.input);
    this.input.onkeydown = (event) => {
      if (!isSendKey(event)) return;
      event.preventDefault();
      this.send();
    };
    addEventListener("pagehide", () => {
      for (const { conversation } of this.#running.values()) this.#context.changed(conversation);
    });
  }

  /** Return the current conversation with an id. One that is being answered is not read from storage again. */
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
    if (!matchMedia("(pointer: coarse)").matches) this.input.focus(); // not on a phone, where it would open the keyboard
    const { nodes, leaf } = this.conversation;
    const unanswered = leaf >= 0 && nodes[leaf].role === "user"; // templates require alternating roles
    this.#ask(unanswered ? nodes[leaf].parent : leaf, text);
  }

  /** Stop the answer on the screen, and keep its text so far. Return true if there was one. */
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
    const index = conversations.add(this.conversation, parent, "user", text);
    this.#answer(this.conversation, index);
  }

  async #answer(conversation, question) {
    if (this.isRunning(conversation.id)) return;
    const messages = conversations.listMessages(conversation, question);
    const index = conversations.add(conversation, question, "assistant", "");
    const node = conversation.nodes[index];
    const controller = new AbortController();
    node.partial = true; // until it is complete, so that an answer cut by closing the page is marked
    this.#problems.delete(conversation.id);
    this.#running.set(conversation.id, { conversation, node, controller });
    conversation.changed = Date.now();
    this.#context.changed(conversation);
    if (conversation === this.conversation) this.show(conversation);
    try {
      await this.#receive(conversation, node, messages, controller.signal);
      delete node.partial;
    } catch (error) {
      if (!isAbort(error)) this.#problems.set(conversation.id, describe(error));
    }
    if (!this.#running.delete(conversation.id)) return; // the conversation was deleted meanwhile
    if (node.content === "" && node.partial) conversations.removeLast(conversation);
    this.#context.changed(conversation);
    if (conversation === this.conversation) this.#draw();
  }

  async #receive(conversation, node, messages, signal) {
    const body = { model: this.#context.model().id, messages, ...this.#context.sampling() };
    const started = performance.now();
    let saved = started;
    for await (const chunk of stream("/v1/chat/completions", body, signal)) {
      const [choice] = chunk.choices;
      node.content += choice?.delta?.content ?? "";
      if (choice?.finish_reason) node.finish = choice.finish_reason;
      if (chunk.usage) node.usage = { ...chunk.usage, seconds: (performance.now() - started) / 1000 };
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
      if (drawn) this.#keepScroll(() => showAnswer(drawn.body, node));
    });
  }

  #draw() {
    cancelAnimationFrame(this.#drawing);
    this.#drawing = 0;
    const { id } = this.conversation;
    const running = this.isRunning(id);
    const path = conversations.findPath(this.conversation);
    this.messages.setAttribute("aria-busy", running); // a screen reader reads an answer once it is complete
    this.#keepScroll(() => {
      const drawn = path.map((index) => this.#findMessage(index));
      const notices = running ? [] : this.#createNotices(path.at(-1));
      replaceChildren(this.messages, [...(drawn.length ? drawn : [this.#createGreeting()]), ...notices]);
    });
    byId("send").hidden = running;
    byId("stop").hidden = !running;
    byId("info").textContent = this.#describeUsage(path);
  }

  /** Change the messages. If the end was in view, it stays in view. */
  #keepScroll(change) {
    const box = this.messages;
    const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    change();
    if (atEnd) box.scrollTop = box.scrollHeight;
  }

  #createGreeting() {
    return element("p", { class: "greeting soft" }, t("greeting"));
  }

  /** Return the element of a message. Reuse the element on the screen if the message has not changed. */
  #findMessage(index) {
    const node = this.conversation.nodes[index];
    const running = this.#running.get(this.conversation.id)?.node === node;
    const key = JSON.stringify([this.conversation.id, node, running, conversations.listVersions(this.conversation, index)]);
    if (this.#drawn.get(index)?.key !== key) this.#drawn.set(index, { key, ...this.#createMessage(index, running) });
    return this.#drawn.get(index).article;
  }

  #createMessage(index, running) {
    const node = this.conversation.nodes[index];
    const isUser = node.role === "user";
    const body = element("div", { class: "body" });
    if (isUser) body.append(node.content);
    else showAnswer(body, node);
    const label = t(isUser ? "you" : "model");
    const article = element("article", { class: `message ${node.role}`, "aria-label": label }, body);
    if (!running) article.append(...this.#createNotes(node), this.#createActions(index, article));
    return { article, body };
  }

  #createNotes(node) {
    const note = node.finish === "length" ? "cut_by_length" : node.partial ? "stopped" : null;
    return note === null ? [] : [element("p", { class: "note soft" }, t(note))];
  }

  #createActions(index, article) {
    const node = this.conversation.nodes[index];
    const change =
      node.role === "user"
        ? button("edit", () => this.#edit(index, article))
        : button("regenerate", () => this.#answer(this.conversation, node.parent));
    const actions = element("div", { class: "actions" }, ...this.#createSwitch(index), copyButton(() => node.content));
    if (node.role === "user" || node.parent >= 0) actions.append(change);
    return actions;
  }

  /** ‹ 2 / 3 ›: switches between the versions of a message, if there are several. */
  #createSwitch(index) {
    const versions = conversations.listVersions(this.conversation, index);
    if (versions.length < 2) return [];
    const current = versions.indexOf(index);
    const createStep = (target, text, label) => {
      const onclick = () => {
        conversations.choose(this.conversation, versions[target]);
        this.#context.changed(this.conversation);
        this.#draw();
      };
      return element("button", { class: "quiet icon", "aria-label": t(label), onclick, disabled: !(target in versions) }, text);
    };
    const count = element("span", { class: "soft" }, `${current + 1} / ${versions.length}`);
    return [createStep(current - 1, "‹", "version_before"), count, createStep(current + 1, "›", "version_after")];
  }

  #edit(index, article) {
    const node = this.conversation.nodes[index];
    const area = element("textarea", { "aria-label": t("edit_message"), rows: "1" });
    const accept = () => {
      if (area.value.trim() !== "") this.#ask(node.parent, area.value);
    };
    const cancel = () => this.#draw();
    area.value = node.content;
    area.oninput = () => grow(area);
    area.onkeydown = (event) => {
      if (event.key === "Escape") cancel();
      else if (!isSendKey(event)) return;
      else accept();
      event.preventDefault();
      event.stopPropagation();
    };
    const save = element("button", { onclick: accept }, t("send"));
    this.#drawn.delete(index);
    article.replaceChildren(area, element("div", { class: "actions" }, save, button("cancel", cancel)));
    article.classList.add("editing");
    grow(area);
    area.focus();
  }

  /** Below the last message: a problem, or a button to request a missing answer. */
  #createNotices(last) {
    const problem = this.#problems.get(this.conversation.id);
    const unanswered = last !== undefined && this.conversation.nodes[last].role === "user";
    if (!problem && !unanswered) return [];
    const question = unanswered ? last : this.conversation.nodes[last]?.parent;
    const retry = button("try_again", () => this.#answer(this.conversation, question));
    return [element("div", { class: "notice", role: "alert" }, problem ?? t("unanswered"), " ", retry)];
  }

  #describeUsage(path) {
    const usage = this.conversation.nodes[path.at(-1)]?.usage;
    if (!usage) return "";
    const { prompt_tokens: prompt, completion_tokens: tokens, seconds } = usage;
    const rate = number(tokens / seconds, 1);
    const summary = t("usage", { tokens: number(tokens), rate });
    const length = this.#context.model()?.context_length;
    return length ? `${summary} · ${t("context_used", { used: number(prompt + tokens), length: number(length) })}` : summary;
  }
}

/** True for Enter, except with Shift, during input of composed characters, and on phones, which have no Shift+Enter. */
function isSendKey(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing && !matchMedia("(pointer: coarse)").matches;
}

/** Replace the children of the box by these elements. Children that stay are not touched. */
function replaceChildren(box, elements) {
  const newChildren = new Set(elements);
  for (const child of [...box.children]) if (!newChildren.has(child)) child.remove();
  elements.forEach((child, index) => {
    if (box.children[index] !== child) box.insertBefore(child, box.children[index] ?? null);
  });
}

/** Show an answer, with its thoughts in a closed section above it. */
function showAnswer(body, { content, partial }) {
  const { thoughts, answer } = splitThoughts(content);
  let text = body.querySelector(":scope > .markdown");
  if (!text) {
    text = element("div", { class: "markdown" });
    body.append(text);
  }
  let section = body.querySelector(":scope > details");
  if (thoughts !== null && !section) {
    section = element("details", {}, element("summary", {}, t("thoughts")), element("div", { class: "thoughts" }));
    body.prepend(section);
  }
  if (section) section.lastChild.textContent = thoughts;
  showMarkdown(text, answer);
  text.classList.toggle("waiting", Boolean(partial) && content === "");
}

function splitThoughts(content) {
  const start = /^\s*<think>/.exec(content);
  if (!start) return { thoughts: null, answer: content };
  const [thoughts, ...rest] = content.slice(start[0].length).split("</think>");
  return { thoughts: thoughts.trim(), answer: rest.join("</think>").trimStart() };
}

// The list of conversations ---------------------------------------------------------------------------------------------

/** Create an entry of the list, with buttons to open, rename, export and delete the conversation. */
export function createEntry(conversation, isCurrent, { open, rename, save, remove }) {
  const title = conversation.title || t("untitled");
  const openButton = element("button", { class: "title", "aria-current": isCurrent && "true", onclick: open }, title);
  return element(
    "li",
    { class: isCurrent ? "current" : undefined },
    openButton,
    iconButton("rename", t("rename_one", { title }), rename),
    iconButton("save", t("export_one", { title }), save),
    iconButton("remove", t("delete_one", { title }), remove),
  );
}
