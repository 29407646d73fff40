// Client of the server's OpenAI-compatible API: requests, event streams, error messages.

import { ask } from "./dom.js";
import { number, t } from "./words.js";

const KEY = "artel.key"; // in sessionStorage: gone when the tab is closed

export class ApiError extends Error {
  /** `status` is null if there was no response. `code` is OpenAI's. */
  constructor(message, status, code = null, retryAfter = null) {
    super(message);
    Object.assign(this, { status, code, retryAfter });
  }
}

/** Send `GET path`, or `POST path` with a body. Return the response as an object. */
export async function call(path, body, signal) {
  const response = await request(path, body, signal);
  return response.json();
}

/** Yield the chunks of a streamed answer. Throw ApiError if the stream ends before [DONE]. */
export async function* stream(path, body, signal) {
  const streamBody = { ...body, stream: true, stream_options: { include_usage: true } };
  const response = await request(path, streamBody, signal);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message, response.status, chunk.error.code);
    yield chunk;
  }
  throw new ApiError("", null, "cut");
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let incompleteLine = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch(throwCut);
      if (done) return;
      const lines = (incompleteLine + value).split("\n");
      incompleteLine = lines.pop();
      for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  } finally {
    reader.cancel().catch(() => {}); // closes the connection, so that the server frees the slot
  }
}

function throwCut(error) {
  throw error.name === "AbortError" ? error : new ApiError(error.message, null, "cut");
}

async function request(path, body, signal) {
  for (let tries = 0; ; tries++) {
    const response = await send(path, body, signal);
    if (response.ok) return response;
    const error = await readError(response);
    if (error.status !== 401 || !(await askForKey(tries > 0 || key() !== null))) throw error;
  }
}

async function send(path, body, signal) {
  const headers = key() === null ? {} : { Authorization: `Bearer ${key()}` };
  const post = { method: "POST", headers: { ...headers, "Content-Type": "application/json" }, body: JSON.stringify(body) };
  try {
    return await fetch(path, { ...(body === undefined ? { headers } : post), signal, credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(error.message, null);
  }
}

async function readError(response) {
  const retryAfter = Number(response.headers.get("Retry-After")) || null;
  try {
    const { error } = await response.json();
    return new ApiError(error.message, response.status, error.code, retryAfter);
  } catch {
    return new ApiError(response.statusText, response.status, null, retryAfter);
  }
}

const key = () => sessionStorage.getItem(KEY);

async function askForKey(refused) {
  const about = t(refused ? "key_refused" : "key_about");
  const typed = await ask({ title: t("key"), about, value: "", type: "password" });
  if (!typed?.trim()) return false;
  sessionStorage.setItem(KEY, typed.trim());
  return true;
}

/** True if the user stopped the request. */
export const isAbort = (error) => error.name === "AbortError";

/** Return a message about an error for the user: what happened, and what to do. */
export function describe(error) {
  if (!(error instanceof ApiError)) return t("error_page", { message: error.message });
  if (error.code === "cut") return t("error_cut");
  if (error.status === null) return t("error_no_server");
  if (error.status === 429 && error.retryAfter) return t("error_429_seconds", { seconds: number(error.retryAfter) });
  const message = { 401: "error_401", 413: "error_413", 429: "error_429", 503: "error_503", 504: "error_504" }[error.status];
  return t(message ?? (error.status < 500 ? "error_refused" : "error_server"), { message: error.message });
}
