// Messages of a topic by due time, and one of them: payload, state, place; sent, cancelled, given another time.

import { useEffect, useState } from "preact/hooks";
import { change, link } from "./address.js";
import { ago, asHex, asJson, asText, bytes, fromBase64, number, preview, time, toBase64, topicName } from "./format.js";
import { Answer, Ask, Table } from "./parts.jsx";
import { ask, useWatch } from "./server.js";

const PAGE = 50;
const local = (ms) => (ms ? new Date(ms - new Date(ms).getTimezoneOffset() * 60_000).toISOString().slice(0, 16) : "");

export function SendOne({ topic }) {
  const act = ({ payload, key, delay }) =>
    ask("send", { topic, payload: toBase64(payload), deliver_after: Number(delay), ...(key && { key }) });
  return (
    <Ask label="Send a message" title={`Send to ${topicName(topic)}`} needs="send" act={act} done={(sent) => `Message ${sent.message_id} is stored, due ${time(sent.due_ms)}.`}
      fields={[{ name: "payload", label: "Payload, as text", kind: "long" }, { name: "key", label: "Key, if it has one" },
               { name: "delay", label: "Due in, seconds", kind: "number", min: 0, value: "60", required: true }]} />
  );
}

function Cancel({ topic, id, done }) {
  const act = async () => {
    const [outcome] = await ask("cancel", { topic, ids: [id] });
    if (outcome !== "cancelled") throw new Error(`It was not cancelled: ${outcome}.`);
    done?.();
  };
  return (
    <Ask label="Cancel" name={id} danger needs="cancel" title={`Cancel message ${id}`} act={act} done="It is cancelled.">
      <p>It is never delivered to anybody. This cannot be undone.</p>
    </Ask>
  );
}

function Reschedule({ topic, id, due, done }) {
  const act = async ({ at }) => {
    const [moved] = await ask("reschedule", { topic, ids: [id], deliver_at: new Date(at).getTime() });
    if (!moved) throw new Error("It is too late: it has fired, or was cancelled.");
    done?.(moved);
    return moved;
  };
  return (
    <Ask label="Reschedule" name={id} needs="reschedule" title={`Give message ${id} another time`} act={act} done={(moved) => `It is message ${moved} now.`}
      fields={[{ name: "at", label: "Due at", kind: "datetime-local", value: local(due), required: true }]}>
      <p>It gets another id.</p>
    </Ask>
  );
}

export function Messages({ topic, query }) {
  const { from = "", to = "", after = "" } = query;
  const range = { ...(from && { start_ms: new Date(from).getTime() }), ...(to && { end_ms: new Date(to).getTime() }) };
  const [page] = useWatch([["scheduled_page", { topic, ...range, limit: PAGE, ...(after && { after }) }]]);
  const find = (event) => {
    event.preventDefault();
    location.hash = link(["topics", topic, "messages", new FormData(event.target).get("id").trim()]);
  };
  const columns = [
    { title: "Due", key: "due_ms", show: (row) => <a href={link(["topics", topic, "messages", row.message_id])}>{time(row.due_ms)}</a> },
    { title: "Id", key: "message_id" },
    { title: "Key", key: "key" },
    { title: "Payload", key: "payload", show: (row) => <span class="payload" dir="auto">{preview(row.payload, row.bytes)}</span> },
    { title: "Size", key: "bytes", number: bytes },
    { title: "", show: ({ message_id, due_ms }) => (
      <span class="buttons"><Reschedule topic={topic} id={message_id} due={due_ms} /><Cancel topic={topic} id={message_id} /></span>
    ) },
  ];
  return (
    <>
      <Crumbs topic={topic} />
      <div class="title"><h1>Messages to come</h1><SendOne topic={topic} /></div>
      <div class="filters">
        <label><span>Due from</span><input type="datetime-local" value={from} onChange={(event) => change({ from: event.target.value, after: "" })} /></label>
        <label><span>until</span><input type="datetime-local" value={to} onChange={(event) => change({ to: event.target.value, after: "" })} /></label>
        <form onSubmit={find}><label><span>or by id</span><input name="id" placeholder="17:3" required pattern="\d+:\d+" /></label><button>Look up</button></form>
      </div>
      <Answer answer={page}>
        {({ messages, next }) => (
          <>
            <Table name={`messages of ${topicName(topic)}`} caption="Messages to come" rows={messages} columns={columns} empty="Nothing is to come." />
            {(after || next) && (
              <nav class="pages" aria-label="Pages">
                <button disabled={!after} onClick={() => change({ after: "" })}>First</button>
                <button disabled={!next} onClick={() => change({ after: next })}>After</button>
              </nav>
            )}
          </>
        )}
      </Answer>
    </>
  );
}

const Crumbs = ({ topic, messages }) => (
  <nav class="crumbs" aria-label="Where this is">
    <a href={link(["topics"])}>Topics</a> <a href={link(["topics", topic])}>{topicName(topic)}</a>
    {messages && <a href={link(["topics", topic, "messages"])}>Messages</a>}
  </nav>
);

export function Message({ topic, id }) {
  const [answer, setAnswer] = useState();
  const look = () => ask("message", { topic, message_id: id }).then((result) => setAnswer({ result }), (error) => setAnswer({ reason: error.message }));
  useEffect(() => {
    setAnswer(undefined); // nothing of the message before stands under this one's id
    look();
  }, [topic, id]);
  return (
    <>
      <Crumbs topic={topic} messages />
      <Answer answer={answer}>
        {({ state, position, message }) => (
          <>
            <div class="title">
              <h1>Message {id}</h1> <span class={`tag ${state}`}>{state}</span>
              {state === "scheduled" && <>
                <Reschedule topic={topic} id={id} due={message?.due_ms} done={(moved) => (location.hash = link(["topics", topic, "messages", moved]))} />
                <Cancel topic={topic} id={id} done={look} />
              </>}
            </div>
            {!message ? <p class="quiet">{state === "unknown" ? "The topic has no such message." : "It is gone: its part of the log was trimmed."}</p> : <>
              <dl class="facts">
                <dt>Due</dt><dd>{time(message.due_ms)} <span class="quiet">{ago(message.due_ms)}</span></dd>
                <dt>Sent</dt><dd>{time(message.publish_ms)}</dd>
                <dt>Lies at</dt><dd>ledger {id.split(":")[0]}, entry {id.split(":")[1]}{position && position !== id && <>; delivered from {position}</>}</dd>
                {message.key != null && <><dt>Key</dt><dd>{message.key}</dd></>}
                {message.dedup_key != null && <><dt>Deduplication key</dt><dd>{message.dedup_key}</dd></>}
                {message.occurrence && <><dt>Schedule</dt><dd>{message.occurrence.schedule}</dd></>}
                {Object.entries(message.properties).map(([name, value]) => <><dt>{name}</dt><dd>{value}</dd></>)}
              </dl>
              <Payload base64={message.payload} />
            </>}
          </>
        )}
      </Answer>
    </>
  );
}

const SHOWN = 1 << 18;

export function Payload({ base64 }) {
  const data = fromBase64(base64);
  const forms = { Text: asText, JSON: asJson, Hex: asHex };
  const part = data.slice(0, SHOWN);
  const possible = Object.entries(forms).map(([name, form]) => [name, form(name === "JSON" ? data : part)]).filter(([, text]) => text !== null);
  const [form, setForm] = useState();
  const chosen = form ?? (possible.find(([name]) => name === "JSON") ?? possible[0])[0];
  const text = Object.fromEntries(possible)[chosen] ?? possible[0][1];
  return (
    <section class="card">
      <div class="title">
        <h2>Payload <span class="figure">{bytes(data.length)}</span></h2>
        <div class="tabs" role="group" aria-label="Shown as">
          {possible.map(([name]) => <button aria-pressed={name === chosen} onClick={() => setForm(name)}>{name}</button>)}
        </div>
      </div>
      <pre tabIndex={0} dir="auto" aria-label={`Payload as ${chosen}`}>{text.slice(0, 4 * SHOWN)}</pre>
      {data.length > SHOWN && <p class="quiet">The first {number(SHOWN)} bytes are shown.</p>}
    </section>
  );
}
