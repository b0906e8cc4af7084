// Asking the server: one operation at a time, or several again and again as their answers change.

import { useEffect, useState } from "preact/hooks";

const KEY = "duelog-token";
const OPERATIONS = "duelog/v1/operations";

let token = sessionStorage.getItem(KEY);

/** Keep the token that an address came with, and take it out of the address and the history. */
export function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given && !location.hash.startsWith("#/")) {
    setToken(given);
    history.replaceState(null, "", location.pathname + "#/");
  }
}

export function setToken(given) {
  token = given;
  sessionStorage.setItem(KEY, given);
}

export class Refused extends Error {
  constructor(status, reason) {
    super(reason);
    this.status = status;
  }
}

async function send(method, path, body, signal) {
  const headers = {};
  if (token) headers.Authorization = `Bearer ${token}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let answer;
  try {
    answer = await fetch(path, { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "the server does not answer");
  }
  if (!answer.ok) {
    const reason = await answer.json().then((found) => found.reason, () => answer.statusText);
    throw new Refused(answer.status, reason);
  }
  return answer;
}

async function json(method, path, body) {
  const answer = await send(method, path, body);
  return answer.status === 204 ? null : answer.json();
}

/** Do an operation of the table. */
export const ask = (operation, given = {}) => json("POST", `${OPERATIONS}/${operation}`, given);

/** What the role may ask, by operation: in a namespace, or of the whole store. */
export const known = (namespace) => json("GET", namespace ? `${OPERATIONS}?namespace=${encodeURIComponent(namespace)}` : OPERATIONS);

async function* events(body, signal) {
  const answer = await send("POST", "duelog/v1/watch", body, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    if (!value.includes("\n")) continue; // amid an event, which may be long
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield JSON.parse(part.slice(6));
  }
}

let report = () => {};
/** Have a function hear whether the server answers: "live", "lost", or the status of a refusal. */
export const onConnection = (listener) => (report = listener);

const pause = (ms, signal) =>
  new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()));
  });

const CHANGED = "duelog-changed";
/** Have what is watched be asked at once: something was done. */
export const changed = () => dispatchEvent(new Event(CHANGED));

/** Answers to [[operation, arguments], ...] as they change: [{result} or {reason}, ...]; undefined: not yet there. */
export function useWatch(asks) {
  const key = JSON.stringify(asks);
  const [found, setFound] = useState({ key, answers: [] });
  useEffect(() => {
    const ending = new AbortController();
    const answers = [];
    let stream;
    const again = () => stream?.abort();
    addEventListener(CHANGED, again);
    ending.signal.addEventListener("abort", () => (again(), removeEventListener(CHANGED, again)));
    (async () => {
      while (!ending.signal.aborted) {
        stream = new AbortController();
        try {
          for await (const { at, ...answer } of events(JSON.parse(key), stream.signal)) {
            answers[at] = answer;
            report("live");
            setFound({ key, answers: [...answers] });
          }
        } catch (error) {
          if (ending.signal.aborted) return;
          if (stream.signal.aborted) continue;
          if (error instanceof Refused && error.status && error.status !== 429 && error.status !== 503) {
            if (error.status === 401) report(401);
            setFound({ key, answers: JSON.parse(key).map(() => ({ reason: error.message })) });
            return;
          }
        }
        if (ending.signal.aborted) return;
        report("lost");
        await pause(2000, ending.signal);
      }
    })();
    return () => ending.abort();
  }, [key]);
  return found.key === key ? found.answers : [];
}
