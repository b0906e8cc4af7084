// The page: where one can go, who looks, whether the server answers, and the view that the address names.

import "uplot/dist/uPlot.min.css";
import "./app.css";
import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import { link, useAddress } from "./address.js";
import { zone } from "./format.js";
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

const PLACES = [
  ["", "Overview"], ["topics", "Topics"], ["letters", "Dead letters"], ["partitions", "Partitions"],
  ["connections", "Connections"], ["workers", "Workers"],
];

function view([first = "", ...rest], query) {
  if (first === "topics" && rest[1] === "messages")
    return rest[2] ? <Message topic={rest[0]} id={rest[2]} /> : <Messages topic={rest[0]} query={query} />;
  if (first === "topics") return rest[0] ? <Topic name={rest[0]} query={query} /> : <Topics query={query} />;
  const found = { "": Overview, letters: Letters, partitions: Partitions, connections: Connections, workers: Workers }[first];
  if (!found) return <p class="problem">There is no such view.</p>;
  const View = found;
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

function Page() {
  const { words, query } = useAddress();
  const [role, setRole] = useState(null);
  const [refused, setRefused] = useState("");
  const [connection, setConnection] = useState("live");
  const enter = async () => {
    try {
      setRole(await known());
      setRefused("");
    } catch (error) {
      setRole(error.status === 401 ? "unknown" : null);
      setRefused(error.message);
      if (error.status !== 401) setTimeout(enter, 2000);
    }
  };
  useEffect(() => {
    onConnection((state) => (state === 401 ? enter() : setConnection(state)));
    enter();
  }, []);
  const place = words[0] ?? "";
  useEffect(() => {
    const [, title] = PLACES.find(([key]) => key === place) ?? [];
    document.title = `${words[1] ?? title ?? ""} · duelog`;
  }, [words.join("/")]);
  if (role === "unknown") return <Login refused={refused} onToken={(token) => (setToken(token), enter())} />;
  if (!role) return <main><p class="quiet" role="status">{refused || "Asking …"}</p></main>;
  const looks = !Object.values(role.operations).some((each) => each.allowed && !each.looks);
  return (
    <May.Provider value={role.operations}>
      <a class="skip" href="#main" onClick={(event) => (event.preventDefault(), document.querySelector("main").focus())}>To the content</a>
      <header>
        <a class="brand" href="#/">duelog</a>
        <nav aria-label="Views">
          {PLACES.map(([key, title]) => (
            <a href={link(key ? [key] : [])} aria-current={key === place ? "page" : undefined}>{title}</a>
          ))}
        </nav>
        <footer>
          <span class={`dot ${connection}`} /> <span role="status">{connection === "live" ? "Live" : "No answer; trying again"}</span>
          <span class="quiet">Times in {zone}</span>
          {role.role && <span class="quiet">{role.role}{looks && ", may only look"}</span>}
          <Scheme />
        </footer>
      </header>
      <main id="main" tabIndex={-1}>{view(words, query)}</main>
      <Said />
    </May.Provider>
  );
}

takeToken();
render(<Page />, document.getElementById("page"));
