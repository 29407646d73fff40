// Conversations: trees of messages, stored in the browser, and exported as the JSON lines that `format: chat` reads.
//
// A conversation is {id, title, changed, system, nodes, leaf}. A node is {parent, role, content, …}. `parent` is an index
// in `nodes`, -1 for the first message. Edited questions and regenerated answers are siblings of the earlier versions.
// The screen shows the path from the root to `leaf`.

import { t } from "./words.js";

const PREFIX = "artel.conversation.";
const ROLES = ["user", "assistant"];
const TITLE = 60; // characters

export function create(system = "") {
  const id = Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
  return { id, title: "", changed: Date.now(), system, nodes: [], leaf: -1 };
}

/** Return the indices of the nodes from the root to `end`. */
export function findPath(conversation, end = conversation.leaf) {
  const path = [];
  for (let index = end; index >= 0; index = conversation.nodes[index].parent) path.unshift(index);
  return path;
}

/** Add a message after the one at `parent`, and show it. Return its index. */
export function add(conversation, parent, role, content) {
  conversation.nodes.push({ parent, role, content });
  conversation.leaf = conversation.nodes.length - 1;
  if (!conversation.title && role === "user") conversation.title = content.trim().replace(/\s+/g, " ").slice(0, TITLE);
  return conversation.leaf;
}

/** Remove the newest message. Show its earlier version, or the message that it answered. */
export function removeLast(conversation) {
  choose(conversation, conversation.nodes.pop().parent);
}

/** Return the indices of all versions of a message: the nodes with the same parent. */
export function listVersions(conversation, index) {
  const { parent } = conversation.nodes[index];
  return conversation.nodes.flatMap((node, other) => (node.parent === parent ? [other] : []));
}

/** Show this version, and the newest messages after it. */
export function choose(conversation, index) {
  for (let next = index; next >= 0; ) {
    conversation.leaf = next;
    next = conversation.nodes.findLastIndex((node) => node.parent === conversation.leaf);
  }
}

/** Return the messages up to the node `end`, in the format of the API and of `format: chat`. */
export function listMessages(conversation, end = conversation.leaf) {
  const messages = findPath(conversation, end).map((index) => {
    const { role, content } = conversation.nodes[index];
    return { role, content };
  });
  return conversation.system.trim() ? [{ role: "system", content: conversation.system }, ...messages] : messages;
}

// In the browser --------------------------------------------------------------------------------------------------------

export const isConversation = (key) => key === null || key.startsWith(PREFIX);

/** Save a conversation. Return false if the storage is full: browsers allow about 5 MB per site. */
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

/** Return all conversations, the most recently changed first. */
export function all() {
  const keys = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
  const conversations = keys.map((key) => read(localStorage.getItem(key))).filter((conversation) => conversation !== null);
  return conversations.sort((first, second) => second.changed - first.changed);
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

/** Return JSON lines, one per conversation. Omit conversations without a message. */
export function toLines(conversations) {
  const nonEmpty = conversations.filter((conversation) => conversation.leaf >= 0);
  return nonEmpty.map((conversation) => `${JSON.stringify({ messages: listMessages(conversation) })}\n`).join("");
}

/** Read {conversations, problems} from the text of a file. Each problem names its line. */
export function fromLines(text) {
  const conversations = [];
  const problems = [];
  text.split("\n").forEach((line, index) => {
    if (line.trim() === "") return;
    try {
      conversations.push(fromMessages(JSON.parse(line).messages));
    } catch {
      problems.push(t("bad_line", { line: index + 1 }));
    }
  });
  return { conversations, problems };
}

function fromMessages(messages) {
  const [first, ...withoutSystem] = messages;
  const conversation = create(first.role === "system" ? String(first.content) : "");
  for (const { role, content } of first.role === "system" ? withoutSystem : messages) {
    if (!ROLES.includes(role) || typeof content !== "string") throw new TypeError();
    add(conversation, conversation.leaf, role, content);
  }
  if (conversation.leaf < 0) throw new TypeError();
  return conversation;
}
