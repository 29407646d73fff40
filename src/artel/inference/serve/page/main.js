// The page: chooses the model, the view and the conversation.

import { call, describe } from "./api.js";
import { Chat, createEntry } from "./chat.js";
import * as conversations from "./conversation.js";
import { ask, byId, element, icon, showProblem } from "./dom.js";
import { FillMask, Questions } from "./encoders.js";
import { Settings } from "./settings.js";
import { Continuation } from "./text.js";
import { t, translatePage } from "./words.js";

const CURRENT = "artel.current"; // in sessionStorage: each tab has its own
const VIEW = "artel.view"; // in localStorage: the view that the user chose last
const state = { models: [], model: null, view: null, listed: "" };

addEventListener("error", ({ message }) => fail(message));
addEventListener("unhandledrejection", ({ reason }) => fail(reason.message));
translatePage();
byId("menu").append(icon("menu"));
const settings = new Settings({
  system: { get: () => chat.conversation.system, set: setSystem },
  full: () => showProblem(byId("status"), t("storage_full")),
});
const context = {
  model: () => state.model,
  sampling: () => settings.sampling,
  changed: save,
  full: settings.full,
};
const chat = new Chat(context);
const views = {
  chat,
  text: new Continuation(context),
  mask: new FillMask(context),
  question: new Questions(context),
};

start();

function start() {
  byId("new").onclick = () => open(conversations.create(chat.conversation.system));
  byId("export").onclick = () => download(conversations.all(), "conversations");
  byId("import").onclick = () => byId("file").click();
  byId("file").onchange = importFiles;
  byId("delete-all").onclick = deleteAll;
  byId("menu").onclick = () => showSidebar(byId("menu").getAttribute("aria-expanded") !== "true");
  byId("shade").onclick = () => showSidebar(false);
  byId("model").onchange = () => choose(state.models[byId("model").selectedIndex]);
  addEventListener("keydown", stopByEscape);
  addEventListener("storage", (event) => conversations.isConversation(event.key) && changedElsewhere(event.key));
  const last = sessionStorage.getItem(CURRENT);
  open((last && conversations.load(last)) || conversations.all()[0] || conversations.create());
  loadModels();
}

/** Show an error of the page, such as a browser without storage. */
function fail(message) {
  showProblem(byId("status"), t("error_page", { message }));
}

// Models and views ------------------------------------------------------------------------------------------------------

async function loadModels() {
  try {
    state.models = (await call("/v1/models")).data;
    showProblem(byId("status"), null);
  } catch (error) {
    showProblem(byId("status"), describe(error), loadModels);
    return;
  }
  byId("model").replaceChildren(...state.models.map((model) => element("option", { value: model.id }, model.id)));
  byId("model").disabled = state.models.length < 2;
  choose(state.models[0]);
}

const VIEW_OF = {
  "/v1/chat/completions": "chat",
  "/v1/completions": "text",
  "/v1/fill-mask": "mask",
  "/v1/answers": "question",
};

/** Return the views that suit a model, the best one first. */
function listViews(model) {
  return model.endpoints.map((path) => VIEW_OF[path]).filter(Boolean);
}

function choose(model) {
  state.model = model;
  const names = listViews(model);
  byId("views").replaceChildren(...(names.length > 1 ? names.map(createViewButton) : []));
  const last = localStorage.getItem(VIEW);
  if (names.length === 0) showProblem(byId("status"), t("no_view", { model: model.id }));
  else show(names.includes(last) ? last : names[0]);
}

function createViewButton(view) {
  const onclick = () => {
    localStorage.setItem(VIEW, view);
    show(view);
  };
  return element("button", { class: "quiet", "data-view": view, onclick }, t(`view_${view}`));
}

function show(view) {
  state.view = view;
  for (const name of Object.keys(views)) byId(`view-${name}`).hidden = name !== view;
  for (const button of byId("views").children) button.setAttribute("aria-pressed", button.dataset.view === view);
  document.body.dataset.view = view;
  views[view].show?.(chat.conversation);
}

/** Escape stops the answer in progress, unless it closes a dialog. */
function stopByEscape(event) {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (views[state.view]?.stop?.()) event.preventDefault();
  else showSidebar(false);
}

// Conversations ---------------------------------------------------------------------------------------------------------

function open(conversation) {
  sessionStorage.setItem(CURRENT, conversation.id);
  if (state.model) showProblem(byId("status"), null);
  chat.show(conversation);
  showList();
  showSidebar(false);
  if (!matchMedia("(pointer: coarse)").matches) byId("input").focus();
}

function save(conversation) {
  if (conversation.leaf < 0 && conversations.load(conversation.id) === null) return; // it has no messages yet
  if (!conversations.save(conversation)) settings.full();
  showList();
}

function setSystem(text) {
  chat.conversation.system = text;
  save(chat.conversation);
}

/** Redraw the list only if it has changed, so that an entry under the pointer or with the focus is not replaced. */
function showList() {
  const all = conversations.all();
  const listed = JSON.stringify([chat.conversation.id, all.map(({ id, title }) => [id, title])]);
  if (listed === state.listed) return;
  state.listed = listed;
  const entries = all.map((conversation) =>
    createEntry(conversation, conversation.id === chat.conversation.id, {
      open: () => open(chat.find(conversation.id) ?? conversation),
      rename: () => rename(conversation.id),
      save: () => download([chat.find(conversation.id) ?? conversation], conversation.title || "conversation"),
      remove: () => remove(conversation),
    }),
  );
  byId("conversations").replaceChildren(...entries);
  byId("export").disabled = byId("delete-all").disabled = entries.length === 0;
}

async function rename(id) {
  const conversation = id === chat.conversation.id ? chat.conversation : chat.find(id);
  const title = await ask({ title: t("rename"), value: conversation.title });
  if (!title?.trim()) return;
  conversation.title = title.trim();
  save(conversation);
}

async function remove({ id, title }) {
  const about = t("delete_about");
  if (!(await ask({ title: t("delete_one", { title: title || t("untitled") }), about, yes: "delete" }))) return;
  forget(id);
  if (id === chat.conversation.id) open(conversations.all()[0] ?? conversations.create());
  else showList();
}

async function deleteAll() {
  if (!(await ask({ title: t("delete_all"), about: t("delete_about"), yes: "delete" }))) return;
  for (const { id } of conversations.all()) forget(id);
  open(conversations.create());
}

function forget(id) {
  chat.forget(id);
  conversations.remove(id);
}

/** After a change in another tab, show it, unless this tab is writing to the same conversation. */
function changedElsewhere(key) {
  const { id } = chat.conversation;
  const stored = key?.endsWith(id) ? conversations.load(id) : null;
  if (stored !== null && !chat.isRunning(id) && !document.querySelector(".editing")) chat.show(stored);
  showList();
}

function showSidebar(isOpen) {
  document.body.classList.toggle("sidebar", isOpen);
  byId("menu").setAttribute("aria-expanded", isOpen);
  byId("shade").hidden = !isOpen;
}

// Files -----------------------------------------------------------------------------------------------------------------

function download(selected, name) {
  const file = new Blob([conversations.toLines(selected)], { type: "application/jsonl" });
  const address = URL.createObjectURL(file);
  element("a", { href: address, download: `${name.replace(/[^\p{L}\p{N} _-]/gu, "").trim() || "conversation"}.jsonl` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

async function importFiles() {
  const files = [...byId("file").files];
  byId("file").value = "";
  let count = 0;
  const problems = [];
  for (const file of files) {
    const imported = conversations.fromLines(await file.text());
    const saved = imported.conversations.filter(conversations.save).length;
    if (saved < imported.conversations.length) problems.push(t("storage_full"));
    count += saved;
    problems.push(...imported.problems.map((problem) => `${file.name}: ${problem}`));
  }
  showList();
  showProblem(byId("status"), [t("imported", { count }), ...problems.slice(0, 5)].join(" "));
}
