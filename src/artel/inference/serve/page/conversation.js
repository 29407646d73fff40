// Conversations: a tree of messages, kept in the browser, written as the JSON lines that `format: chat` reads.
//
// A conversation is {id, title, changed, system, nodes, leaf}. A node is {parent, role, content, …}; `parent` is its
// place in `nodes`, -1 for the first. An edited question and an answer given anew stand beside the ones before them.
// What is on the screen is the way from the root to `leaf`.

import { t } from "./words.js";

const PREFIX = "artel.conversation.";
const ROLES = ["user", "assistant"];
const TITLE = 60; // characters

export function create(system = "") {
  const id = Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
  return { id, title: "", changed: Date.now(), system, nodes: [], leaf: -1 };
}

/** Places of the nodes from the root to `to`, in order. */
export function pathOf(conversation, to = conversation.leaf) {
  const path = [];
  for (let at = to; at >= 0; at = conversation.nodes[at].parent) path.unshift(at);
  return path;
}

/** Put a message after the one at `parent`; its place. It is shown from now on. */
export function add(conversation, parent, role, content) {
  conversation.nodes.push({ parent, role, content });
  conversation.leaf = conversation.nodes.length - 1;
  if (!conversation.title && role === "user") conversation.title = content.trim().replace(/\s+/g, " ").slice(0, TITLE);
  return conversation.leaf;
}

/** Take back the message that was put in last, and show the version before it, or else what it answered. */
export function takeBack(conversation) {
  choose(conversation, conversation.nodes.pop().parent);
}

/** Places of the nodes that stand where this one does. */
export function versions(conversation, at) {
  const { parent } = conversation.nodes[at];
  return conversation.nodes.flatMap((node, place) => (node.parent === parent ? [place] : []));
}

/** Show this version, and what followed it last. */
export function choose(conversation, at) {
  for (let next = at; next >= 0; ) {
    conversation.leaf = next;
    next = conversation.nodes.findLastIndex((node) => node.parent === conversation.leaf);
  }
}

/** The messages up to the node `to`, as the API and `format: chat` have them. */
export function messagesOf(conversation, to = conversation.leaf) {
  const messages = pathOf(conversation, to).map((at) => {
    const { role, content } = conversation.nodes[at];
    return { role, content };
  });
  return conversation.system.trim() ? [{ role: "system", content: conversation.system }, ...messages] : messages;
}

// In the browser --------------------------------------------------------------------------------------------------------

export const isConversation = (key) => key === null || key.startsWith(PREFIX);

/** Whether it was written: a browser holds about 5 MB a site. */
export function save(conversation) {
  try {
    localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
    return true;
  } catch {
    return false;
  }
}

export function load(id) {
  return read(localStorage.getItem(PREFIX + id));
}

export function remove(id) {
  localStorage.removeItem(PREFIX + id);
}

/** All conversations, the one that was changed last first. */
export function all() {
  const keys = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
  const conversations = keys.map((key) => read(localStorage.getItem(key))).filter((each) => each !== null);
  return conversations.sort((one, other) => other.changed - one.changed);
}

function read(text) {
  try {
    const conversation = JSON.parse(text);
    return Array.isArray(conversation?.nodes) ? conversation : null;
  } catch {
    return null;
  }
}

// As files --------------------------------------------------------------------------------------------------------------

/** JSON lines, one conversation a line; those without a message are left out. */
export function toLines(conversations) {
  const written = conversations.filter((each) => each.leaf >= 0);
  return written.map((each) => `${JSON.stringify({ messages: messagesOf(each) })}\n`).join("");
}

/** {conversations, problems} of a file's text; a problem names its line. */
export function fromLines(text) {
  const conversations = [];
  const problems = [];
  text.split("\n").forEach((line, number) => {
    if (line.trim() === "") return;
    try {
      conversations.push(fromMessages(JSON.parse(line).messages));
    } catch {
      problems.push(t("bad_line", { line: number + 1 }));
    }
  });
  return { conversations, problems };
}

function fromMessages(messages) {
  const [first, ...others] = messages;
  const conversation = create(first.role === "system" ? String(first.content) : "");
  for (const { role, content } of first.role === "system" ? others : messages) {
    if (!ROLES.includes(role) || typeof content !== "string") throw new TypeError();
    add(conversation, conversation.leaf, role, content);
  }
  if (conversation.leaf < 0) throw new TypeError();
  return conversation;
}
