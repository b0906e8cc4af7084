// Messages of a topic by due time, and one of them: payload, state, place; sent, cancelled, given another time.

import { useState } from "preact/hooks";
import { change, link } from "./address.js";
import { ago, asHex, asJson, asText, bytes, count, fromBase64, number, preview, sent, time, toBase64, topicName } from "./format.js";
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

function Cancel({ topic, id }) {
  const act = async () => {
    const [outcome] = await ask("cancel", { topic, ids: [id] });
    if (outcome !== "cancelled") throw new Error(`It was not cancelled: ${outcome}.`);
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
  const all = async () => {
    const found = [];
    for (let next; next !== null; ) {
      const more = await ask("scheduled_page", { topic, ...range, limit: 1000, ...(next && { after: next }) });
      found.push(...more.messages);
      next = more.next;
    }
    return found;
  };
  const find = (event) => {
    event.preventDefault();
    location.hash = link(["topics", topic, "messages", new FormData(event.target).get("id").trim()]);
  };
  const columns = [
    { title: "Due", key: "due_ms", show: (row) => <a href={link(["topics", topic, "messages", row.message_id])}>{time(row.due_ms)}</a> },
    { title: "Id", key: "message_id" },
    { title: "Key", key: "key", wrap: true, show: (row) => sent(row).key },
    { title: "Payload", key: "payload", show: (row) => <span class="payload" dir="auto">{preview(row)}</span> },
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
            <Table name={`messages of ${topicName(topic)}`} caption="Messages to come" rows={messages} all={all} columns={columns} empty="Nothing is to come." />
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

export function Message({ topic, id, query }) {
  const [answer] = useWatch([["message", { topic, message_id: id }]]);
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
                <Cancel topic={topic} id={id} />
              </>}
            </div>
            {!message ? <p class="quiet">{state === "unknown" ? "The topic has no such message." : "It is gone: its part of the log was trimmed."}</p> : <>
              <dl class="facts">
                <dt>Due</dt><dd>{time(message.due_ms)} <span class="quiet">{ago(message.due_ms)}</span></dd>
                <dt>Sent</dt><dd>{time(message.publish_ms)}</dd>
                <dt>Lies at</dt><dd>ledger {id.split(":")[0]}, entry {id.split(":")[1]}, {position === id ? "in the topic's main log" : "in the partition of its due time"}{position && position !== id && <>; delivered from {position} of the main log</>}</dd>
                {message.dedup_key != null && <><dt>Deduplication key</dt><dd>{message.dedup_key}</dd></>}
                {message.occurrence && <><dt>Schedule</dt><dd>{message.occurrence.schedule}</dd></>}
                {message.retries > 0 && <><dt>Retry</dt><dd>for <a href={link(["workers", topic, message.addressee])}>{message.addressee}</a>, after {count(message.retries, "delivery").replace("deliverys", "deliveries")}{message.failure && `: ${message.failure}`}</dd></>}
                {!message.client && <Sent message={message} />}
              </dl>
              {message.client ? <Entry entry={message.client} part={Number(query.part ?? 0)} raw={message} /> : <Payload {...message} />}
            </>}
          </>
        )}
      </Answer>
    </>
  );
}

const Sent = ({ message: { key, ordering_key, event_time, properties } }) => (
  <>
    {key != null && <><dt>Key</dt><dd>{key}</dd></>}
    {ordering_key != null && <><dt>Ordering key</dt><dd>{ordering_key}</dd></>}
    {event_time > 0 && <><dt>Event time</dt><dd>{time(event_time)}</dd></>}
    {Object.entries(properties).map(([name, value]) => <><dt>{name}</dt><dd>{value}</dd></>)}
  </>
);

/** What a client of the broker has sent: a message, or a batch of them, of which one is shown. */
function Entry({ entry, part, raw }) {
  const { producer, sequence_id, compression, count: many, messages, problem } = entry;
  const at = Math.min(part, messages.length - 1), shown = messages[at];
  return (
    <>
      <dl class="facts">
        <dt>Client</dt><dd>producer {producer ?? "unknown"}, its number {number(sequence_id)}{compression && `, compressed by ${compression}`}</dd>
        {many > 1 && <><dt>Batch</dt><dd>{count(many, "message")}</dd></>}
        {many === 1 && shown && <Sent message={shown} />}
      </dl>
      {problem && <p class="problem">It is shown as it is stored, {problem}.</p>}
      {many > 1 && shown && (
        <>
          <Table name={`batch ${raw.message_id}`} caption="Messages of the batch" rows={messages.map((each, number) => ({ ...each, number, id: number }))} columns={[
            { title: "Message", key: "number", show: (row) => <a href={link(["topics", raw.topic, "messages", raw.message_id], { part: row.number })} aria-current={row.number === at ? "true" : undefined}>{row.number + 1}</a> },
            { title: "Key", key: "key", wrap: true },
            { title: "Properties", key: "properties", wrap: true, show: (row) => Object.entries(row.properties).map(([name, value]) => `${name}=${value}`).join(", ") },
            { title: "Payload", key: "payload", show: (row) => <span class="payload" dir="auto">{preview(row)}</span> },
            { title: "Size", key: "bytes", number: bytes },
          ]} />
          {messages.length < many && <p class="quiet">The first {count(messages.length, "message")} are shown.</p>}
          <h2>Message {at + 1} of {number(many)}</h2>
          <dl class="facts"><Sent message={shown} /></dl>
        </>
      )}
      <Payload {...(shown ?? raw)} />
    </>
  );
}

const SHOWN = 1 << 18;

export function Payload({ payload, bytes: size }) {
  const data = fromBase64(payload);
  const forms = { Text: asText, JSON: asJson, Hex: asHex };
  const part = data.slice(0, SHOWN);
  const possible = Object.entries(forms).map(([name, form]) => [name, form(name === "JSON" ? data : part)]).filter(([, text]) => text !== null);
  const [form, setForm] = useState();
  const chosen = form ?? (possible.find(([name]) => name === "JSON") ?? possible[0])[0];
  const text = Object.fromEntries(possible)[chosen] ?? possible[0][1];
  return (
    <section class="card">
      <div class="title">
        <h2>Payload <span class="figure">{bytes(size)}</span></h2>
        <div class="tabs" role="group" aria-label="Shown as">
          {possible.map(([name]) => <button aria-pressed={name === chosen} onClick={() => setForm(name)}>{name}</button>)}
        </div>
      </div>
      <pre tabIndex={0} dir="auto" aria-label={`Payload as ${chosen}`}>{text.slice(0, 4 * SHOWN)}</pre>
      {size > SHOWN && <p class="quiet">The first {number(SHOWN)} bytes are shown.</p>}
    </section>
  );
}
