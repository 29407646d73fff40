// The server's OpenAI-compatible API: requests, streams of events, errors in words.

import { ask } from "./dom.js";
import { number, t } from "./words.js";

const KEY = "artel.key"; // in sessionStorage: gone when the tab is closed

export class ApiError extends Error {
  /** `status` is null where no answer came; `code` is OpenAI's. */
  constructor(message, status, code = null, retryAfter = null) {
    super(message);
    Object.assign(this, { status, code, retryAfter });
  }
}

/** The server's answer to `GET path`, or to `POST path` with a body, as an object. */
export async function call(path, body, signal) {
  const response = await request(path, body, signal);
  return response.json();
}

/** Yields the chunks of a streamed answer. A stream that breaks off before [DONE] is an error. */
export async function* stream(path, body, signal) {
  const asked = { ...body, stream: true, stream_options: { include_usage: true } };
  const response = await request(path, asked, signal);
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
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch(cut);
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  } finally {
    reader.cancel().catch(() => {}); // the server sees that nobody reads, and frees the place
  }
}

function cut(error) {
  throw error.name === "AbortError" ? error : new ApiError(error.message, null, "cut");
}

async function request(path, body, signal) {
  for (let tries = 0; ; tries++) {
    const response = await send(path, body, signal);
    if (response.ok) return response;
    const error = await errorOf(response);
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

async function errorOf(response) {
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
  const given = await ask({ title: t("key"), about, value: "", type: "password" });
  if (!given?.trim()) return false;
  sessionStorage.setItem(KEY, given.trim());
  return true;
}

/** Whether the user stopped it himself. */
export const stopped = (error) => error.name === "AbortError";

/** What went wrong, in words, and what to do. */
export function describe(error) {
  if (!(error instanceof ApiError)) return t("error_page", { message: error.message });
  if (error.code === "cut") return t("error_cut");
  if (error.status === null) return t("error_no_server");
  if (error.status === 429 && error.retryAfter) return t("error_429_seconds", { seconds: number(error.retryAfter) });
  const words = { 401: "error_401", 413: "error_413", 429: "error_429", 503: "error_503", 504: "error_504" }[error.status];
  return t(words ?? (error.status < 500 ? "error_refused" : "error_server"), { message: error.message });
}
