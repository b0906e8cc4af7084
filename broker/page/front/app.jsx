// The page: where one can go, who looks, whether the server answers, and the view that the address names.

import "uplot/dist/uPlot.min.css";
import "./app.css";
import { render } from "preact";
import { useEffect, useReducer, useState } from "preact/hooks";
import { link, useAddress } from "./address.js";
import { namespaceOf, zone } from "./format.js";
import { May, Said } from "./parts.jsx";
import { known, onConnection, setToken, takeToken } from "./server.js";
import { Overview } from "./overview.jsx";
import { Topics } from "./topics.jsx";
import { Topic } from "./topic.jsx";
import { Message, Messages } from "./messages.jsx";
import { Letters } from "./letters.jsx";
import { Partitions } from "./partitions.jsx";
import { Connections } from "./connections.jsx";
import { Workers } from "./workers.jsx";

/** Views: their address, title, and the operation without which one has nothing to show. */
const PLACES = [
  ["", "Overview", "overview"], ["topics", "Topics", "topic_rows"], ["letters", "Dead letters", "dead_letter_page"],
  ["partitions", "Partitions", "calendar"], ["connections", "Connections", "connections"], ["workers", "Workers", "receiving"],
];

function view([first = "", ...rest], query) {
  if (first === "topics" && rest[1] === "messages")
    return rest[2] ? <Message topic={rest[0]} id={rest[2]} query={query} /> : <Messages topic={rest[0]} query={query} />;
  if (first === "topics") return rest[0] ? <Topic name={rest[0]} query={query} /> : <Topics query={query} />;
  const views = { "": Overview, letters: Letters, partitions: Partitions, connections: Connections, workers: Workers };
  if (!Object.hasOwn(views, first)) return <><h1>Nothing here</h1><p class="problem">There is no such view.</p></>;
  const View = views[first];
  return <View query={query} rest={rest} />;
}

function Login({ refused, onToken }) {
  const enter = (event) => {
    event.preventDefault();
    onToken(new FormData(event.target).get("token").trim());
  };
  return (
    <main class="login">
      <form class="card" onSubmit={enter}>
        <h1>duelog</h1>
        <label><span>Token</span><input name="token" type="password" autocomplete="off" required autofocus /></label>
        <button class="strong">Enter</button>
        {refused && <p class="problem" role="alert">{refused}</p>}
      </form>
    </main>
  );
}

const SCHEMES = { "": "System", light: "Light", dark: "Dark" };

function Scheme() {
  const [scheme, setScheme] = useState(() => localStorage.getItem("duelog-scheme") ?? "");
  useEffect(() => {
    if (scheme) document.documentElement.dataset.scheme = scheme;
    else delete document.documentElement.dataset.scheme;
    localStorage.setItem("duelog-scheme", scheme);
    dispatchEvent(new Event("scheme"));
  }, [scheme]);
  return (
    <label class="scheme">
      <span>Colours</span>
      <select value={scheme} onChange={(event) => setScheme(event.target.value)}>
        {Object.entries(SCHEMES).map(([key, text]) => <option value={key}>{text}</option>)}
      </select>
    </label>
  );
}

/** Who looks and what it may ask there: asked again where that changes, and once the server answers again. */
function useRole(namespace) {
  const [role, setRole] = useState(null);
  const [refused, setRefused] = useState("");
  const [connection, setConnection] = useState("live");
  const [turn, again] = useReducer((count) => count + 1, 0);
  useEffect(() => {
    let before = "live";
    onConnection((state) => {
      if (state === 401 || (before === "lost" && state === "live")) again();
      before = state;
      if (state !== 401) setConnection(state);
    });
  }, []);
  useEffect(() => {
    let over = false, timer;
    known(namespace).then(
      (found) => over || (setRole({ ...found, within: namespace }), setRefused("")),
      (error) => {
        if (over) return;
        setRefused(error.message);
        if (error.status === 401) setRole("unknown");
        else timer = setTimeout(again, 2000);
      },
    );
    return () => ((over = true), clearTimeout(timer));
  }, [namespace, turn]);
  return { role, refused, connection, again };
}

function Page() {
  const { words, query } = useAddress();
  const [spaces, setSpaces] = useState(null); // the namespaces of a role that may not look at the whole store
  const place = words[0] ?? "";
  const ofTopic = words[1] && (place === "topics" || place === "workers") ? namespaceOf(words[1]) : undefined;
  const namespace = ofTopic ?? query.namespace ?? spaces?.[0];
  const { role, refused, connection, again } = useRole(namespace);
  useEffect(() => setSpaces(role?.namespaces ?? null), [JSON.stringify(role?.namespaces)]);
  const places = PLACES.filter(([, , needs]) => role?.operations?.[needs].allowed);
  useEffect(() => {
    if (!place && places.length && places[0][0]) location.replace(link([places[0][0]]));
    const [, title] = PLACES.find(([key]) => key === place) ?? [];
    document.title = `${words[1] ?? title ?? ""} · duelog`;
  }, [words.join("/"), places.length]);
  if (role === "unknown") return <Login refused={refused} onToken={(token) => (setToken(token), again())} />;
  if (!role || (role.namespaces?.length && !role.within)) return <main><p class="quiet" role="status">{refused || "Asking …"}</p></main>;
  const looks = !Object.values(role.operations).some((each) => each.allowed && !each.looks);
  const within = spaces ? { namespace } : {};
  return (
    <May.Provider value={role.operations}>
      <a class="skip" href="#main" onClick={(event) => (event.preventDefault(), document.querySelector("main").focus())}>To the content</a>
      <header>
        <a class="brand" href="#/">duelog</a>
        <nav aria-label="Views">
          {places.map(([key, title]) => (
            <a href={link(key ? [key] : [], within)} aria-current={key === place ? "page" : undefined}>{title}</a>
          ))}
        </nav>
        <footer>
          <span class={`dot ${connection}`} /> <span role="status">{connection === "live" ? "Live" : "No answer; trying again"}</span>
          <span class="quiet">Times in {zone}</span>
          {role.role && <span class="quiet">{role.role}{looks && ", may only look"}</span>}
          {spaces?.length > 0 && (
            <label class="scheme">
              <span>Namespace</span>
              <select value={namespace} onChange={(event) => (location.hash = link([ofTopic ? "topics" : place], { namespace: event.target.value }))}>
                {[...new Set([...spaces, namespace])].map((each) => <option value={each}>{each}</option>)}
              </select>
            </label>
          )}
          <Scheme />
        </footer>
      </header>
      <main id="main" tabIndex={-1}>
        {places.some(([key]) => key === place) || !PLACES.some(([key]) => key === place) ? view(words, { ...query, ...within })
          : place || !places.length ? <><h1>No rights here</h1><p class="problem">{role.role ?? "Who has no token"} may not look at this in {namespace ?? "any namespace"}.</p></> : null}
      </main>
      <Said />
    </May.Provider>
  );
}

takeToken();
render(<Page />, document.getElementById("page"));
