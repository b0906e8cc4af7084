// Numbers, times and payloads as a person reads them.

const plain = new Intl.NumberFormat("en");
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const tiniest = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 2 });
export const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
const moment = new Intl.DateTimeFormat("en-GB", {
  year: "numeric", month: "short", day: "2-digit", hour: "2-digit", minute: "2-digit", second: "2-digit",
});

export const number = (value) => (value == null ? "–" : plain.format(value));
export const short = (value, from = 10_000) => (value == null ? "–" : value < from ? plain.format(value) : compact.format(value));
/** At most four characters, for where there is no room. */
export const tiny = (value) => (value < 1000 ? plain.format(value) : tiniest.format(value));
export const count = (value, noun) => `${number(value)} ${noun}${value === 1 ? "" : "s"}`;

export function bytes(value) {
  if (value == null) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (value >= 1024 && at < units.length - 1) (value /= 1024), at++;
  return `${at && value < 10 ? value.toFixed(1) : Math.round(value)} ${units[at]}`;
}

export function duration(ms) {
  if (ms == null) return "–";
  if (ms < 1000) return `${Math.round(ms)} ms`;
  const parts = [[86_400_000, "d"], [3_600_000, "h"], [60_000, "min"], [1000, "s"]];
  const at = parts.findIndex(([unit]) => ms >= unit);
  const [[unit, name], next] = [parts[at], parts[at + 1]];
  const rest = next ? Math.floor((ms % unit) / next[0]) : 0;
  return `${Math.floor(ms / unit)} ${name}${rest ? ` ${rest} ${next[1]}` : ""}`;
}

export const time = (ms) => (ms == null ? "–" : moment.format(ms));
export const day = (ms) => new Date(ms).toISOString().slice(0, 10);
export const ago = (ms, now = Date.now()) =>
  ms == null ? "–" : ms <= now ? `${duration(now - ms)} ago` : `in ${duration(ms - now)}`;

/** The name of a topic without what all of them have. */
export const topicName = (full) => full.replace(/^persistent:\/\/(public\/default\/)?/, "");

export function namespaceOf(topic) {
  const parts = topic.replace(/^persistent:\/\//, "").split("/");
  return parts.length > 2 ? parts.slice(0, 2).join("/") : "public/default";
}

export const fromBase64 = (text) => Uint8Array.from(atob(text), (each) => each.charCodeAt(0));
export function toBase64(text) {
  return btoa(Array.from(new TextEncoder().encode(text), (each) => String.fromCharCode(each)).join(""));
}

/** The payload as UTF-8; null: it is none. */
export function asText(data) {
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(data);
  } catch {
    return null;
  }
}

export function asJson(data) {
  const text = asText(data);
  try {
    return text === null ? null : JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return null;
  }
}

export function asHex(data) {
  const lines = [];
  for (let at = 0; at < data.length; at += 16) {
    const part = [...data.slice(at, at + 16)];
    const hex = part.map((each) => each.toString(16).padStart(2, "0")).join(" ");
    const text = part.map((each) => (each > 31 && each < 127 ? String.fromCharCode(each) : "·")).join("");
    lines.push(`${at.toString(16).padStart(8, "0")}  ${hex.padEnd(47)}  ${text}`);
  }
  return lines.join("\n");
}

/** A message as its sender sent it: of a client of the broker the first of its entry, and how many more that has. */
export function sent(row) {
  const first = row.client?.messages[0];
  if (!row.client) return { ...row, more: 0 };
  return { ...row, key: row.client.key, payload: "", bytes: null, ...first, more: row.client.count - 1, problem: row.client.problem };
}

/** What was sent, in one line. */
export function preview(row) {
  const { payload, bytes: size, more, problem } = sent(row);
  return problem ? `(${problem})` : line(payload, size) + (more ? ` (and ${count(more, "message")})` : "");
}

function line(base64, size) {
  const data = fromBase64(base64);
  if (!size) return "(empty)";
  const text = asText(data) ?? asText(data.slice(0, data.length - 3)); // cut within a character
  if (text === null) return `(${bytes(size)}, not text)`;
  return text.replace(/\s+/g, " ").slice(0, 120) + (size > data.length || text.length > 120 ? "…" : "");
}
