// The page: which model, which view, which conversation.

import { call, describe } from "./api.js";
import { Chat, entry } from "./chat.js";
import * as conversations from "./conversation.js";
import { ask, byId, element, icon, showProblem } from "./dom.js";
import { FillMask, Questions } from "./encoders.js";
import { Settings } from "./settings.js";
import { Continuation } from "./text.js";
import { t, translatePage } from "./words.js";

const CURRENT = "artel.current"; // in sessionStorage: each tab has its own
const VIEW = "artel.view"; // in localStorage: what the user chose last
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
  changed: keep,
  full: settings.full,
};
const chat = new Chat(context);
const views = {
  chat,
  text: new Continuation(context),
  mask: new FillMask(context),
  question: new Questions(context),
};

begin();

function begin() {
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

/** A mistake of the page itself, or a browser that keeps nothing. */
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

/** What may be done with a model on this page, what it is best at first. */
function waysOf(model) {
  return model.endpoints.map((path) => VIEW_OF[path]).filter(Boolean);
}

function choose(model) {
  state.model = model;
  const ways = waysOf(model);
  byId("views").replaceChildren(...(ways.length > 1 ? ways.map(viewButton) : []));
  const last = localStorage.getItem(VIEW);
  if (ways.length === 0) showProblem(byId("status"), t("no_view", { model: model.id }));
  else show(ways.includes(last) ? last : ways[0]);
}

function viewButton(view) {
  const choose = () => {
    localStorage.setItem(VIEW, view);
    show(view);
  };
  return element("button", { class: "quiet", "data-view": view, onclick: choose }, t(`view_${view}`));
}

function show(view) {
  state.view = view;
  for (const name of Object.keys(views)) byId(`view-${name}`).hidden = name !== view;
  for (const each of byId("views").children) each.setAttribute("aria-pressed", each.dataset.view === view);
  document.body.dataset.view = view;
  views[view].show?.(chat.conversation);
}

/** Escape stops what is being written, where it does not close something else. */
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

function keep(conversation) {
  if (conversation.leaf < 0 && conversations.load(conversation.id) === null) return; // nothing was said in it yet
  if (!conversations.save(conversation)) settings.full();
  showList();
}

function setSystem(text) {
  chat.conversation.system = text;
  keep(chat.conversation);
}

/** Drawn when something in it has changed: what is under the pointer or has the focus must not be replaced. */
function showList() {
  const all = conversations.all();
  const listed = JSON.stringify([chat.conversation.id, all.map(({ id, title }) => [id, title])]);
  if (listed === state.listed) return;
  state.listed = listed;
  const entries = all.map((each) =>
    entry(each, each.id === chat.conversation.id, {
      open: () => open(chat.find(each.id) ?? each),
      rename: () => rename(each.id),
      save: () => download([chat.find(each.id) ?? each], each.title || "conversation"),
      remove: () => remove(each),
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
  keep(conversation);
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

/** Another tab has written: show what it wrote, unless this one is writing there itself. */
function changedElsewhere(key) {
  const { id } = chat.conversation;
  const written = key?.endsWith(id) ? conversations.load(id) : null;
  if (written !== null && !chat.isRunning(id) && !document.querySelector(".editing")) chat.show(written);
  showList();
}

function showSidebar(shown) {
  document.body.classList.toggle("sidebar", shown);
  byId("menu").setAttribute("aria-expanded", shown);
  byId("shade").hidden = !shown;
}

// Files -----------------------------------------------------------------------------------------------------------------

function download(written, name) {
  const file = new Blob([conversations.toLines(written)], { type: "application/jsonl" });
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
    const read = conversations.fromLines(await file.text());
    const saved = read.conversations.filter(conversations.save).length;
    if (saved < read.conversations.length) problems.push(t("storage_full"));
    count += saved;
    problems.push(...read.problems.map((problem) => `${file.name}: ${problem}`));
  }
  showList();
  showProblem(byId("status"), [t("imported", { count }), ...problems.slice(0, 5)].join(" "));
}
