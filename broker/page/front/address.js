// The address of a view: #/words/separated?query. Names are escaped, so that a topic may have any character.

import { useEffect, useState } from "preact/hooks";

/** A word as it was before it was escaped; one that nobody has escaped stays as it is. */
function unescaped(word) {
  try {
    return decodeURIComponent(word);
  } catch {
    return word;
  }
}

export function parse(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?");
  return {
    words: path.split("/").filter(Boolean).map(unescaped),
    query: Object.fromEntries(new URLSearchParams(query)),
  };
}

export function link(words, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== "" && value != null && value !== false);
  const text = new URLSearchParams(given).toString();
  return `#/${words.map(encodeURIComponent).join("/")}${text ? `?${text}` : ""}`;
}

/** Change a part of the query of this view; `replace`: without a step of its own in the history. */
export function change(part, replace = false) {
  const { words, query } = parse(location.hash);
  const to = link(words, { ...query, ...part });
  if (replace) {
    history.replaceState(null, "", to);
    dispatchEvent(new HashChangeEvent("hashchange"));
  } else location.hash = to;
}

export function useAddress() {
  const [found, setFound] = useState(() => parse(location.hash));
  useEffect(() => {
    const follow = () => setFound(parse(location.hash));
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);
  return found;
}
